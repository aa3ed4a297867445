// Integers of the host written to a device's memory. They are passed as kernel arguments, so that
// a CUDA graph replays the call with the integers that it captured.
//
//   COUNT  how many

#ifdef KERNEL_write_numbers

template <int Count>
struct Numbers {
  long long values[Count];
};

extern "C" __global__ void write_numbers(long long* __restrict__ out,
                                         const __grid_constant__ Numbers<COUNT> numbers) {
  for (int at = threadIdx.x; at < COUNT; at += blockDim.x) out[at] = numbers.values[at];
}

#endif  // KERNEL_write_numbers
