// Instructions that CUDA C++ has no name for, each a function.
//
// Inline assembly stands here and in cluster.cuh, nowhere else: the tests run the kernels
// on the CPU with C++ in place of these two files (tests/cuda_emulation).

#pragma once

namespace te_fl {

// Of one instruction, or two, with an error of about two units in the last place, and for
// an exponential of |x| / 2 more; subnormal results become zero.
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

// Unlike fmin it is NaN if one of them is.
__device__ __forceinline__ float least_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// What L2 is asked for what kernels read: to give up those lines after what is written, which
// took 1 to 5% off kernels bound by memory on an H200, though what they read once is not found
// there again. What blocks share is read so too: it would go before what each reads once does.
// Hints for L1, or for what is written, took nothing off, or cost.
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
// What no kernel writes while this one runs.
TE_FL_READ(read_piece, "ld.global.nc")
// What an earlier kernel wrote, possibly while this one was starting, or what this thread
// will write: past L1.
TE_FL_READ(read_written_piece, "ld.global.cg")
#undef TE_FL_READ

// As read_piece, and L2 is asked for nothing. The compiler may read it earlier, or several at once.
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

// Two bytes as read_piece reads them, zero if they are not `valid`, without a branch: behind one, a
// read would wait for what becomes of the one before.
__device__ __forceinline__ unsigned short read_where(const void* from, bool valid) {
  unsigned short word;
  asm volatile(
      "{ .reg .pred valid; setp.ne.u32 valid, %2, 0; mov.u16 %0, 0;\n"
      "  @valid ld.global.nc.L2::cache_hint.u16 %0, [%1], %3; }"
      : "=h"(word)
      : "l"(from), "r"(static_cast<unsigned>(valid)), "l"(after_writes()));
  return word;
}

// 16 bytes to global memory if they are `valid`, without a branch.
__device__ __forceinline__ void write_where(void* to, const unsigned* words, bool valid) {
  asm volatile(
      "{ .reg .pred valid; setp.ne.u32 valid, %5, 0;\n"
      "  @valid st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
      "r"(static_cast<unsigned>(valid))
      : "memory");
}

// 16 bytes of shared memory. Volatile: reading twice means two reads, not values kept in
// registers meanwhile.
__device__ __forceinline__ void read_shared(unsigned* to, const void* from) {
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
               : "memory");
}

enum Reading {
  kAgain,  // what blocks share: through L1
  kOnce,   // past L1, where that can be: 16 bytes at a time
  kPlain,  // so too, and L2 is asked for nothing
};

// Global to shared memory, `at` bytes behind `to`, without passing through registers; zeros behind
// the first `bytes`. What is copied behind the same `to`, as far as the compiler knows how far, has
// one address in a register.
template <int Bytes, Reading How>
__device__ __forceinline__ void copy_async_piece(void* to, int at, const void* from, int bytes) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (How == kPlain && Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address + at),
                 "l"(from), "r"(bytes)
                 : "memory");
  } else {
    // Of a sum with what all threads share, the compiler of CUDA 13.0 makes an address that an
    // instruction with a policy cannot have. So it may not see that this is one: for all that
    // it knows, a lane could have an empty mask of itself.
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

// Waits until at most Pending of this thread's latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four values to float8, the first to the lowest byte: rounded to nearest even and clamped.
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

// The float16 values of two codes of e4m3, exactly.
__device__ __forceinline__ unsigned halves_of_e4m3(unsigned codes) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  return halves;
}
#endif

// Of two words of two 16-bit floats each, the largest, or least, of the halves; what is not a number
// is left out unless both are.
template <bool BFloat, bool Least>
__device__ __forceinline__ unsigned extreme_halves(unsigned a, unsigned b) {
  unsigned found;
  if constexpr (BFloat && Least) asm("min.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else if constexpr (BFloat) asm("max.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else if constexpr (Least) asm("min.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  else asm("max.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  return found;
}

// Of two words of two 16-bit floats each, the larger magnitudes of the halves; what is not a
// number is left out unless both are. The signs of the result mean nothing.
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

// All 64 bits of a product. Of two widened numbers the compiler adds the high words' zeros.
__device__ __forceinline__ unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long result;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace te_fl
