// Functions for instructions that CUDA C++ does not expose.
//
// Inline assembly is only here and in cluster.cuh: to run the kernels on the CPU, the tests
// replace these two files with C++ (tests/cuda_emulation).

#pragma once

namespace te_fl {

// One instruction, or two, with an error of about 2 ulp, and |x| / 2 ulp more for an exponential;
// subnormal results are flushed to zero.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Unlike fmin, NaN if either operand is.
__device__ __forceinline__ float least_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The L2 policy of what kernels read: evict_last, so that L2 evicts written lines before these.
// It took 1 to 5% off memory-bound kernels on an H200, although data that is read once is not hit
// in L2 again. Data that blocks share is read with the policy too, or it would be evicted before
// the data that is read once. Hints for L1, or for stores, gained nothing or cost time.
__device__ __forceinline__ unsigned long long after_writes() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

#define TE_FL_READ(NAME, LOAD)                                                               \
  template <int Bytes, typename Word>                                                        \
  __device__ __forceinline__ void NAME(Word* to, const void* from) {                         \
    static_assert(Bytes == 16 || Bytes == 8 || Bytes == 4 || Bytes == 2, "no such access");  \
    const unsigned long long policy = after_writes();                                        \
    if constexpr (Bytes == 16) {                                                             \
      asm volatile(LOAD ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"                 \
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                      \
                   : "l"(from), "l"(policy));                                                \
    } else if constexpr (Bytes == 8) {                                                       \
      asm volatile(LOAD ".L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"                         \
                   : "=r"(to[0]), "=r"(to[1])                                                \
                   : "l"(from), "l"(policy));                                                \
    } else if constexpr (Bytes == 4) {                                                       \
      asm volatile(LOAD ".L2::cache_hint.u32 %0, [%1], %2;"                                  \
                   : "=r"(to[0])                                                             \
                   : "l"(from), "l"(policy));                                                \
    } else {                                                                                 \
      asm volatile(LOAD ".L2::cache_hint.u16 %0, [%1], %2;"                                  \
                   : "=h"(to[0])                                                             \
                   : "l"(from), "l"(policy));                                                \
    }                                                                                        \
  }
// Memory that no kernel writes while this one runs.
TE_FL_READ(read_piece, "ld.global.nc")
// Memory that an earlier kernel wrote, possibly while this one was starting, or that this thread
// will write: bypasses L1.
TE_FL_READ(read_written_piece, "ld.global.cg")
#undef TE_FL_READ

// As read_piece, without an L2 policy. The compiler may move the load up or merge several.
template <int Bytes, typename Word>
__device__ __forceinline__ void read_plain_piece(Word* to, const void* from) {
  static_assert(Bytes == 16 || Bytes == 8 || Bytes == 4 || Bytes == 2, "no such access");
  if constexpr (Bytes == 16) {
    const uint4 words = __ldg(static_cast<const uint4*>(from));
    to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
  } else if constexpr (Bytes == 8) {
    const uint2 words = __ldg(static_cast<const uint2*>(from));
    to[0] = words.x, to[1] = words.y;
  } else if constexpr (Bytes == 4) {
    to[0] = __ldg(static_cast<const unsigned*>(from));
  } else {
    to[0] = __ldg(static_cast<const unsigned short*>(from));
  }
}

// Two bytes as read_piece reads them, or zero if not `valid`. There is no branch: behind a branch,
// a read would wait for the use of the one before.
__device__ __forceinline__ unsigned short read_where(const void* from, bool valid) {
  unsigned short word;
  asm volatile(
      "{ .reg .pred valid; setp.ne.u32 valid, %2, 0; mov.u16 %0, 0;\n"
      "  @valid ld.global.nc.L2::cache_hint.u16 %0, [%1], %3; }"
      : "=h"(word)
      : "l"(from), "r"(static_cast<unsigned>(valid)), "l"(after_writes()));
  return word;
}

// Writes 16 bytes to global memory if `valid`, without a branch.
__device__ __forceinline__ void write_where(void* to, const unsigned* words, bool valid) {
  asm volatile(
      "{ .reg .pred valid; setp.ne.u32 valid, %5, 0;\n"
      "  @valid st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
      "r"(static_cast<unsigned>(valid))
      : "memory");
}

// Reads 16 bytes of shared memory. Volatile, so that the compiler reads again rather than keep
// values in registers.
__device__ __forceinline__ void read_shared(unsigned* to, const void* from) {
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
               : "memory");
}

enum Reading {
  kReused,  // data that blocks share: through L1
  kOnce,   // bypasses L1 where possible, that is in copies of 16 bytes
  kPlain,  // as kOnce, but copies of 16 bytes have no L2 policy
};

// Copies from global to shared memory, to `at` bytes behind `to`, bypassing registers, with zeros
// after the first `bytes`. Copies behind the same `to` share one register for the address, if the
// compiler knows each `at`.
template <int Bytes, Reading How>
__device__ __forceinline__ void copy_async_piece(void* to, int at, const void* from, int bytes) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (How == kPlain && Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address + at),
                 "l"(from), "r"(bytes)
                 : "memory");
  } else {
    // For a sum with a value that all threads share, the compiler of CUDA 13.0 forms an address
    // operand that instructions with a policy do not accept. This move hides the sum from it: the
    // compiler does not know that lanemask_eq is never 0, so that the move never happens.
    asm("{ .reg .b32 self; .reg .pred never; mov.u32 self, %%lanemask_eq;\n"
        "  setp.eq.u32 never, self, 0; @never mov.u32 %0, 0; }"
        : "+r"(address));
    if constexpr (How == kOnce && Bytes == 16) {
      asm volatile(
          "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
          :
          : "r"(address + at), "l"(from), "r"(bytes), "l"(after_writes())
          : "memory");
    } else {
      asm volatile(
          "cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], %2, %3, %4;"
          :
          : "r"(address + at), "l"(from), "n"(Bytes), "r"(bytes), "l"(after_writes())
          : "memory");
    }
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most Pending of this thread's latest groups are still in flight.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four values as float8, the first in the lowest byte: rounded to nearest even and clamped.
#if __CUDA_ARCH__ >= 890
#define TE_FL_CONVERTS_FLOAT8
#define TE_FL_FOUR(NAME, TO)                                                        \
  __device__ __forceinline__ unsigned NAME(float a, float b, float c, float d) {    \
    unsigned codes;                                                                 \
    asm("{ .reg .b16 low, high;\n"                                                  \
        "  cvt.rn.satfinite." TO ".f32 low, %2, %1;\n"                              \
        "  cvt.rn.satfinite." TO ".f32 high, %4, %3;\n"                             \
        "  mov.b32 %0, {low, high}; }"                                              \
        : "=r"(codes)                                                               \
        : "f"(a), "f"(b), "f"(c), "f"(d));                                          \
    return codes;                                                                   \
  }
TE_FL_FOUR(four_e4m3, "e4m3x2")
TE_FL_FOUR(four_e5m2, "e5m2x2")
#undef TE_FL_FOUR

// Two e4m3 codes as float16, exactly.
__device__ __forceinline__ unsigned halves_of_e4m3(unsigned codes) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  return halves;
}
#endif

// The larger, or smaller, of the low halves and of the high halves of two words of 16-bit floats;
// NaN is ignored unless both are NaN.
template <bool BFloat, bool Least>
__device__ __forceinline__ unsigned extreme_halves(unsigned a, unsigned b) {
  unsigned found;
  if constexpr (BFloat && Least) asm("min.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else if constexpr (BFloat) asm("max.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else if constexpr (Least) asm("min.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else asm("max.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  return found;
}

// The larger magnitude of the low halves and of the high halves of two words of 16-bit floats; NaN
// is ignored unless both are NaN. The signs of the result are undefined.
template <bool BFloat>
__device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 860
  unsigned larger;
  if constexpr (BFloat) asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  else asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return extreme_halves<BFloat, false>(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// All 64 bits of a product. For a product of two widened numbers the compiler would also add the
// products of their high words, which are 0.
__device__ __forceinline__ unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long result;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace te_fl
