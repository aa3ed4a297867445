// Number formats and small vectors of them.
//
// Values are kept in their storage format and converted on use, by one instruction.
// Sums are in Accumulator<T>: float32, or float64 for float64.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "instructions.cuh"

// The names of the formats in the host's macros.
using bfloat16 = __nv_bfloat16;
using float16 = __half;
using float32 = float;
using float64 = double;
using int32 = int;
using int64 = long long;

namespace te_fl {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <bool Short>
struct WordOf {
  using type = unsigned;
};
template <>
struct WordOf<true> {
  using type = unsigned short;
};

constexpr __host__ __device__ int least(int a, int b) { return a < b ? a : b; }

// N values of T as they lie in memory. They are kept as whole words, so that two 16-bit values
// share a register.
template <typename T, int N>
struct alignas(least(16, N * static_cast<int>(sizeof(T)))) Vec {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  using Word = typename WordOf<(kBytes < 4)>::type;
  Word words[kWords];
};

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> zeros() {
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kWords; ++i) result.words[i] = 0;
  return result;
}

// One element of a vector.
template <typename T, int N>
__device__ __forceinline__ Vec<T, 1> element(const Vec<T, N>& of, int i) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements must be 2 or 4 bytes");
  Vec<T, 1> result;
  if constexpr (sizeof(T) == 4) result.words[0] = of.words[i];
  else result.words[0] = static_cast<unsigned short>(of.words[i / 2] >> i % 2 * 16);
  return result;
}

// The value in the low or the high half of a word; for bfloat16 this is one instruction.
template <bool High>
__device__ __forceinline__ float widen_half(unsigned word, __nv_bfloat16) {
  return __uint_as_float(High ? word & 0xffff0000u : word << 16);
}
template <bool High>
__device__ __forceinline__ float widen_half(unsigned word, __half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(High ? word >> 16 : word)));
}

template <typename A, typename T, int N>
__device__ __forceinline__ void decode(const Vec<T, N>& from, A (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 8) {
      to[i] = static_cast<A>(__hiloint2double(from.words[2 * i + 1], from.words[2 * i]));
    } else if constexpr (sizeof(T) == 4) {
      to[i] = static_cast<A>(__uint_as_float(from.words[i]));
    } else {
      const unsigned word = from.words[i / 2];
      to[i] = static_cast<A>(i % 2 ? widen_half<true>(word, T()) : widen_half<false>(word, T()));
    }
  }
}

template <typename T>
constexpr bool kIsBFloat = false;
template <>
constexpr bool kIsBFloat<__nv_bfloat16> = true;

// The largest magnitude, ignoring NaN; 16-bit numbers are compared two at a time.
template <typename T, int N>
__device__ __forceinline__ float largest_of(const Vec<T, N>& from) {
  float largest = 0.0f;
  if constexpr (sizeof(T) == 2 && N > 1) {
    unsigned pair = from.words[0];
#pragma unroll
    for (int i = 1; i < Vec<T, N>::kWords; ++i) {
      pair = larger_halves<kIsBFloat<T>>(pair, from.words[i]);
    }
    largest = fmaxf(largest, fabsf(widen_half<false>(pair, T())));
    largest = fmaxf(largest, fabsf(widen_half<true>(pair, T())));
  } else {
    float values[N];
    decode(from, values);
#pragma unroll
    for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(values[i]));
  }
  return largest;
}

// Two values rounded to nearest even, the first in the low half. A double is rounded once;
// going through float32 could round it twice.
__device__ __forceinline__ unsigned pair_bits(float first, float second, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return __bfloat16_as_ushort(pair.x) | static_cast<unsigned>(__bfloat16_as_ushort(pair.y)) << 16;
}
__device__ __forceinline__ unsigned pair_bits(float first, float second, __half) {
  const __half2 pair = __floats2half2_rn(first, second);
  return __half_as_ushort(pair.x) | static_cast<unsigned>(__half_as_ushort(pair.y)) << 16;
}
__device__ __forceinline__ unsigned pair_bits(double first, double second, __nv_bfloat16) {
  return __bfloat16_as_ushort(__double2bfloat16(first)) |
         static_cast<unsigned>(__bfloat16_as_ushort(__double2bfloat16(second))) << 16;
}
__device__ __forceinline__ unsigned pair_bits(double first, double second, __half) {
  return __half_as_ushort(__double2half(first)) |
         static_cast<unsigned>(__half_as_ushort(__double2half(second))) << 16;
}

template <typename T, typename A, int N>
__device__ __forceinline__ Vec<T, N> encode(const A (&from)[N]) {
  Vec<T, N> result;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result.words[2 * i] = __double2loint(static_cast<double>(from[i]));
      result.words[2 * i + 1] = __double2hiint(static_cast<double>(from[i]));
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) result.words[i] = __float_as_uint(static_cast<float>(from[i]));
  } else if constexpr (N == 1) {
    result.words[0] = static_cast<unsigned short>(pair_bits(from[0], A(0), T()));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) result.words[i / 2] = pair_bits(from[i], from[i + 1], T());
  }
  return result;
}

__device__ __forceinline__ float inverse_sqrt(float value) { return rsqrtf(value); }
__device__ __forceinline__ double inverse_sqrt(double value) { return 1.0 / sqrt(value); }

__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

__device__ __forceinline__ float exponential(float x) {
  return power_of_two(x * 1.4426950408889634f);
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }

__device__ __forceinline__ double least_or_nan(double a, double b) { return a > b ? b : a; }

template <typename A>
__device__ __forceinline__ A lowest() {
  return -static_cast<A>(__int_as_float(0x7f800000));
}

// NaN.
template <typename A>
__device__ __forceinline__ A quiet_nan() {
  return static_cast<A>(__int_as_float(0x7fc00000));
}

// A product that the compiler does not fuse with an addition that follows.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// total / count, where `share` is about 1 / count. The mean of equal numbers is exactly that
// number, so that their variance is 0. The remainder corrects the product of total and share
// (P. W. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor,
// 1990); for an infinite total the remainder is NaN, and the product stays as it is.
template <typename A>
__device__ __forceinline__ A quotient(A total, A count, A share) {
  const A close = product(total, share);
  const A rest = fma(-close, count, total);
  return rest == rest ? fma(rest, share, close) : close;
}
// The same for a compile-time count; for a power of two it is a product.
template <int Count, typename A>
__device__ __forceinline__ A quotient(A total) {
  constexpr A kShare = A(1) / A(Count);
  if constexpr ((Count & (Count - 1)) == 0) return total * kShare;
  else return quotient(total, A(Count), kShare);
}

}  // namespace te_fl
