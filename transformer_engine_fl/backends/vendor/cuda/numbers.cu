// Integers of the host in a device's memory: they travel as the kernel's arguments.
//
//   COUNT  how many
//
// So they are those of the call wherever a CUDA graph replays it.

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
