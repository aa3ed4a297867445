// Dropout, whose mask is a function of seed, offset and position (philox.cuh).
//
// Compiled at run time, one kernel and one specialisation at a time: the host (dropout.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   TX       storage type of the input and the output
//   ACCESS   elements that one access to the input may cover
//   BYTES    bytes of the mask that a thread has
//   THREADS  threads of a block
//
// A thread works on whole bytes of the mask, each with its eight elements and drawn from one Philox
// block. The loads of elements are issued before the numbers are drawn.

#include "memory.cuh"
#include "numeric.cuh"
#include "philox.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

constexpr int kEach = 8;  // elements of a byte

// Elements whose bit is set, times `scale`; 0 for the others.
template <int N>
__device__ __forceinline__ Vec<TX, N> scaled(const Vec<TX, N>& from, unsigned bits, A scale) {
  A values[N];
  decode(from, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = bits >> i & 1 ? values[i] * scale : A(0);
  return encode<TX>(values);
}

// The elements of the last byte, if it has fewer than eight.
__device__ __forceinline__ void finish(const TX* x, TX* y, int count, unsigned bits, A scale) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    store(y + i, scaled(load<1, 1>(x + i), bits >> i, scale));
  }
}

// A thread's bytes of the mask, and the elements of those that are full. Beyond the end the last
// elements are loaded again, unused: a branch would split the loads.
struct Share {
  Vec<TX, kEach> values[BYTES];
  long long first, whole;
  int rest;

  __device__ __forceinline__ Share(const TX* x, long long size)
      : first(static_cast<long long>(blockIdx.x) * (THREADS * BYTES)),
        whole(size / kEach),
        rest(static_cast<int>(size % kEach)) {
    if (whole == 0) return;
#pragma unroll
    for (int v = 0; v < BYTES; ++v) {
      const long long at = byte(v) < whole ? byte(v) : whole - 1;
      values[v] = load<ACCESS, kEach>(x + at * kEach);
    }
  }

  __device__ __forceinline__ long long byte(int v) const {
    return first + v * THREADS + static_cast<int>(threadIdx.x);
  }
};

}  // namespace

#ifdef KERNEL_forward

namespace {

// A byte of the mask. Because THREADS * BYTES is a power of two, `high` is the same in all of a
// block of threads.
__device__ __forceinline__ unsigned drawn(unsigned low, unsigned high, unsigned long long offset,
                                          int threshold, const PhiloxKeys& keys) {
  static_assert((THREADS * BYTES & THREADS * BYTES - 1) == 0,
                "THREADS * BYTES must be a power of two");
  const PhiloxBlock numbers = philox(low, high, offset, keys);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = numbers.words[i];
    bits |= static_cast<int>(word & 0xffffu) >= threshold ? 1u << 2 * i : 0;
    bits |= static_cast<int>(word >> 16) >= threshold ? 2u << 2 * i : 0;
  }
  return bits;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    forward(const TX* __restrict__ x, TX* __restrict__ y, unsigned char* __restrict__ mask,
            long long size, long long offset, int threshold, double scale,
            const __grid_constant__ PhiloxKeys keys) {
  const Share share(x, size);
#pragma unroll
  for (int v = 0; v < BYTES; ++v) {
    const long long byte = share.byte(v);
    unsigned bits = drawn(static_cast<unsigned>(byte), static_cast<unsigned>(share.first >> 32),
                          offset, threshold, keys);
    if (byte < share.whole) {
      mask[byte] = static_cast<unsigned char>(bits);
      store(y + byte * kEach, scaled(share.values[v], bits, A(scale)));
    } else if (byte == share.whole && share.rest > 0) {
      bits &= (1u << share.rest) - 1;
      mask[byte] = static_cast<unsigned char>(bits);
      finish(x + byte * kEach, y + byte * kEach, share.rest, bits, A(scale));
    }
  }
}

#endif  // KERNEL_forward

#ifdef KERNEL_backward

extern "C" __global__ void __launch_bounds__(THREADS)
    backward(const TX* __restrict__ dy, const unsigned char* __restrict__ mask,
             TX* __restrict__ dx, long long size, double scale) {
  const Share share(dy, size);
  unsigned bits[BYTES];
#pragma unroll
  for (int v = 0; v < BYTES; ++v) {
    const long long byte = share.byte(v);
    bits[v] = byte * kEach < size ? mask[byte] : 0;
  }
#pragma unroll
  for (int v = 0; v < BYTES; ++v) {
    const long long byte = share.byte(v);
    if (byte < share.whole) {
      store(dx + byte * kEach, scaled(share.values[v], bits[v], A(scale)));
    } else if (byte == share.whole) {
      finish(dy + byte * kEach, dx + byte * kEach, share.rest, bits[v], A(scale));
    }
  }
}

#endif  // KERNEL_backward
