// Number formats and small vectors of them.
//
// A kernel keeps what it read in the storage type and converts on use: a bfloat16 row
// takes half the registers of a float32 one, and a conversion is one instruction.
// Sums are in Accumulator<T>: float32, or float64 for float64.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace te_fl {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

constexpr __host__ __device__ int least(int a, int b) { return a < b ? a : b; }

// N values, aligned so that up to 16 bytes of them move in one access.
template <typename T, int N>
struct alignas(least(16, N * static_cast<int>(sizeof(T)))) Vec {
  T at[N];
};

__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

// One value, rounded to nearest even.
template <typename A>
__device__ __forceinline__ void put(double* to, A value) {
  *to = static_cast<double>(value);
}
template <typename A>
__device__ __forceinline__ void put(float* to, A value) {
  *to = static_cast<float>(value);
}
__device__ __forceinline__ void put(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void put(__half* to, float value) { *to = __float2half_rn(value); }
// From double in one rounding: through float32 it could be rounded twice.
__device__ __forceinline__ void put(__nv_bfloat16* to, double value) {
  *to = __double2bfloat16(value);
}
__device__ __forceinline__ void put(__half* to, double value) { *to = __double2half(value); }

// Two values at once, where the chip has an instruction for the pair.
template <typename T, typename A>
__device__ __forceinline__ void put_pair(T* to, A first, A second) {
  put(to, first);
  put(to + 1, second);
}
__device__ __forceinline__ void put_pair(__nv_bfloat16* to, float first, float second) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ void put_pair(__half* to, float first, float second) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(first, second);
}

template <typename T, int N, typename A>
__device__ __forceinline__ Vec<T, N> narrow(const A (&values)[N]) {
  Vec<T, N> result;
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) put_pair(result.at + i, values[i], values[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) put(result.at + i, values[i]);
  }
  return result;
}

__device__ __forceinline__ float inverse_sqrt(float value) { return rsqrtf(value); }
__device__ __forceinline__ double inverse_sqrt(double value) { return 1.0 / sqrt(value); }

}  // namespace te_fl
