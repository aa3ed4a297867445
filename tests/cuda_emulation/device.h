// CUDA for the .cu files when g++ compiles them for the CPU.
//
// CUDA's own headers define the number formats, their conversions and the vector types; the other
// built-ins that kernels use are here, written for one thread of engine.cpp. Add those that a new
// kernel needs. Functions with PTX have their twins in instructions.cuh and cluster.cuh.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#endif

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine.h"

#undef __device__
#undef __host__
#undef __global__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition)

#define threadIdx (emulation::place->thread)
#define blockIdx (emulation::place->block)
#define blockDim (emulation::place->threads)
#define gridDim (emulation::place->blocks)
#define warpSize 32

namespace emulation {

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
inline uint64_t widened(T value) {
  static_assert(sizeof(T) <= 8, "no such value is exchanged");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
inline T narrowed(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static int reserved_bytes = 0;

// The offset of a variable in shared memory.
inline int reserve(size_t bytes, size_t alignment) {
  const int at = (reserved_bytes + alignment - 1) / alignment * alignment;
  reserved_bytes = at + bytes;
  if (reserved_bytes > static_cast<int>(kStaticBytes)) fail("too much static shared memory");
  return at;
}

template <typename... Parameters>
struct Entry {
  static constexpr int kSizes[] = {static_cast<int>(sizeof(Parameters))..., 0};
  template <size_t... At>
  static void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<At...>) {
    kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[At])...);
  }
};
template <typename... Parameters>
inline void call(void (*kernel)(Parameters...), void** arguments) {
  Entry<Parameters...>::call(kernel, arguments, std::index_sequence_for<Parameters...>());
}
template <typename... Parameters>
inline const int* sizes(void (*)(Parameters...)) {
  return Entry<Parameters...>::kSizes;
}

}  // namespace emulation

// --------------------------------------------------------------------------- barriers

inline void __syncthreads() { emulation::meet_block(false); }
inline int __syncthreads_or(int vote) { return emulation::meet_block(vote) != 0; }
inline int __syncthreads_count(int vote) { return emulation::meet_block(vote); }
inline int __syncthreads_and(int vote) { return emulation::meet_block(!vote) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::meet_lanes(mask, emulation::Meeting::sync, 0);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { emulation::fail("__trap()"); }

// ---------------------------------------------------------------------- lanes of a warp

inline unsigned __activemask() { return emulation::lanes_alive(); }

namespace emulation {
// `from` maps this lane's index within its part of `width` lanes to the source's index.
template <typename T, typename From>
inline T shuffle(unsigned mask, T value, int width, From from) {
  const uint64_t* values = meet_lanes(mask, Meeting::shuffle, widened(value));
  const int lane = place->thread.x % 32;
  const int base = lane / width * width;
  const int source = from(lane - base);
  if (source < 0 || source >= width) return value;
  if (!(mask >> (base + source) & 1)) fail("shuffles from lane %d, not in its mask", base + source);
  return narrowed<T>(values[base + source]);
}
}  // namespace emulation

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulation::shuffle(mask, value, width, [=](int) { return lane & (width - 1); });
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32) {
  return emulation::shuffle(mask, value, width, [=](int own) { return own ^ by; });
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulation::shuffle(mask, value, width, [=](int own) { return own - int(by); });
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulation::shuffle(mask, value, width, [=](int own) { return own + int(by); });
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
  const uint64_t* votes = emulation::meet_lanes(mask, emulation::Meeting::vote, vote != 0);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= unsigned((mask >> i & 1) && votes[i] == 1) << i;
  return result;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }

template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t own = emulation::widened(value);
  const uint64_t* values = emulation::meet_lanes(mask, emulation::Meeting::match, own);
  mask &= emulation::lanes_existing();
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= unsigned((mask >> i & 1) && values[i] == own) << i;
  return result;
}

namespace emulation {
template <typename T, typename Operation>
inline T reduce(unsigned mask, T value, Operation operation) {
  const uint64_t* values = meet_lanes(mask, Meeting::reduce, widened(value));
  bool first = true;
  T result = value;
  mask &= lanes_existing();
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const T other = narrowed<T>(values[i]);
    result = first ? other : operation(result, other);
    first = false;
  }
  return result;
}
}  // namespace emulation

#define TE_FL_REDUCE(NAME, TYPE, RESULT)                             \
  inline TYPE NAME(unsigned mask, TYPE value) {                      \
    return emulation::reduce(mask, value, [](TYPE a, TYPE b) -> TYPE { return RESULT; }); \
  }
TE_FL_REDUCE(__reduce_add_sync, unsigned, a + b)
TE_FL_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
TE_FL_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
TE_FL_REDUCE(__reduce_and_sync, unsigned, a & b)
TE_FL_REDUCE(__reduce_or_sync, unsigned, a | b)
TE_FL_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
TE_FL_REDUCE(__reduce_add_sync, int, a + b)
TE_FL_REDUCE(__reduce_min_sync, int, a < b ? a : b)
TE_FL_REDUCE(__reduce_max_sync, int, a > b ? a : b)
#undef TE_FL_REDUCE

// ------------------------------------------------------------------------------ memory

template <typename T>
inline T __ldg(const T* from) {
  emulation::check_read(from, sizeof(T));
  return *from;
}
#define TE_FL_LOAD(NAME) \
  template <typename T>  \
  inline T NAME(const T* from) { return __ldg(from); }
TE_FL_LOAD(__ldca)
TE_FL_LOAD(__ldcg)
TE_FL_LOAD(__ldcs)
TE_FL_LOAD(__ldcv)
TE_FL_LOAD(__ldlu)
#undef TE_FL_LOAD
#define TE_FL_STORE(NAME)                           \
  template <typename T>                             \
  inline void NAME(T* to, T value) {                \
    emulation::check_aligned(to, sizeof(T));        \
    *to = value;                                    \
  }
TE_FL_STORE(__stcg)
TE_FL_STORE(__stcs)
TE_FL_STORE(__stwb)
TE_FL_STORE(__stwt)
#undef TE_FL_STORE

inline size_t __cvta_generic_to_shared(const void* at) {
  return static_cast<const unsigned char*>(at) - emulation::shared_memory();
}

// The engine switches threads only where they wait, so that these are atomic.
#define TE_FL_ATOMIC(NAME, RESULT)                        \
  template <typename T>                                   \
  inline T NAME(T* at, std::common_type_t<T> value) {     \
    emulation::check_aligned(at, sizeof(T));              \
    const T old = *at;                                    \
    *at = RESULT;                                         \
    return old;                                           \
  }
TE_FL_ATOMIC(atomicAdd, old + value)
TE_FL_ATOMIC(atomicSub, old - value)
TE_FL_ATOMIC(atomicMin, old < value ? old : value)
TE_FL_ATOMIC(atomicMax, old > value ? old : value)
TE_FL_ATOMIC(atomicAnd, old & value)
TE_FL_ATOMIC(atomicOr, old | value)
TE_FL_ATOMIC(atomicXor, old ^ value)
TE_FL_ATOMIC(atomicExch, value)
TE_FL_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
#undef TE_FL_ATOMIC
template <typename T>
inline T atomicCAS(T* at, std::common_type_t<T> compare, std::common_type_t<T> value) {
  const T old = *at;
  if (old == compare) *at = value;
  return old;
}

// ---------------------------------------------------------------------------- numbers

inline unsigned __float_as_uint(float x) { return emulation::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return emulation::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits_as<float>(x); }
inline float __int_as_float(int x) { return emulation::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::bits_as<double>(x); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

// Keeps a product from being fused with an addition: g++ does not see that it is a product.
namespace emulation {
template <typename T>
inline T kept(T value) {
  asm volatile("" : "+x"(value));
  return value;
}
}  // namespace emulation
inline float __fmul_rn(float a, float b) {
  const float result = emulation::kept(a * b);
  return result == result ? result : NAN;  // the instruction returns one NaN, without a sign
}
inline float __fadd_rn(float a, float b) { return emulation::kept(a) + b; }
inline float __fsub_rn(float a, float b) { return emulation::kept(a) - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(double(x))); }
inline double __dmul_rn(double a, double b) { return emulation::kept(a * b); }
inline double __dadd_rn(double a, double b) { return emulation::kept(a) + b; }
inline double __dsub_rn(double a, double b) { return emulation::kept(a) - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return static_cast<float>(pow(10.0, double(x))); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline void sincospif(float x, float* s, float* c) {
  *s = static_cast<float>(sin(M_PI * double(x)));
  *c = static_cast<float>(cos(M_PI * double(x)));
}

// Conversions from floating point round as their names say, and saturate; NaN gives 0.
namespace emulation {
template <typename To, typename From>
inline To saturated(From x) {
  using Limits = std::numeric_limits<To>;
  if (x != x) return 0;
  if (x <= static_cast<From>(Limits::min())) return Limits::min();
  if (x >= static_cast<From>(Limits::max())) return Limits::max();
  return static_cast<To>(x);
}
}  // namespace emulation
#define TE_FL_CONVERT(NAME, TO)                                                      \
  inline TO __float2##NAME##_rn(float x) { return emulation::saturated<TO>(rintf(x)); }  \
  inline TO __float2##NAME##_rz(float x) { return emulation::saturated<TO>(truncf(x)); } \
  inline TO __float2##NAME##_ru(float x) { return emulation::saturated<TO>(ceilf(x)); }  \
  inline TO __float2##NAME##_rd(float x) { return emulation::saturated<TO>(floorf(x)); } \
  inline TO __double2##NAME##_rn(double x) { return emulation::saturated<TO>(rint(x)); } \
  inline TO __double2##NAME##_rz(double x) { return emulation::saturated<TO>(trunc(x)); } \
  inline float __##NAME##2float_rn(TO x) { return static_cast<float>(x); }             \
  inline double __##NAME##2double_rn(TO x) { return static_cast<double>(x); }
TE_FL_CONVERT(int, int)
TE_FL_CONVERT(uint, unsigned)
TE_FL_CONVERT(ll, long long)
TE_FL_CONVERT(ull, unsigned long long)
#undef TE_FL_CONVERT
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// ----------------------------------------------------------------------------- integers

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1u) << (31 - i);
  return result;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 0xf;
    unsigned byte = bytes >> 8 * (choice & 7) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (by & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <typename T, typename U>
constexpr std::common_type_t<T, U> min(T a, U b) { return b < a ? b : a; }
template <typename T, typename U>
constexpr std::common_type_t<T, U> max(T a, U b) { return a < b ? b : a; }
