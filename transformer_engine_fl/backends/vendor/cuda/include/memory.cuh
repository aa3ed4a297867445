// Moving vectors between global memory, shared memory and registers.
//
// Every function takes Access, the number of elements that one access may cover. A
// vector whose address is aligned to less than its size is moved in narrower pieces,
// so that which thread holds which column never depends on an address.
//
// A load into registers stays where the kernel put it only as far as ptxas likes: to save
// registers it moves loads behind the sums that they should overlap with. What must be
// under way early is copied to shared memory instead.

#pragma once

#include "numeric.cuh"

namespace te_fl {

// Read-only data. With `Once` it is read by nobody else: it does not displace from L1
// what neighbouring blocks share (gamma and beta).
template <int Bytes, bool Once, typename Word>
__device__ __forceinline__ void read_piece(Word* to, const void* from) {
  static_assert(Bytes == 16 || Bytes == 8 || Bytes == 4 || Bytes == 2, "no such access");
#define TE_FL_READ(TYPE, RESULTS, OUTPUTS)                                                        \
  if constexpr (Once) {                                                                           \
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B." TYPE " " RESULTS : OUTPUTS : "l"(from)); \
  } else {                                                                                        \
    asm volatile("ld.global.nc." TYPE " " RESULTS : OUTPUTS : "l"(from));                         \
  }
#define TE_FL_LIST(...) __VA_ARGS__
  if constexpr (Bytes == 16) {
    TE_FL_READ("v4.u32", "{%0, %1, %2, %3}, [%4];",
               TE_FL_LIST("=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])))
  } else if constexpr (Bytes == 8) {
    TE_FL_READ("v2.u32", "{%0, %1}, [%2];", TE_FL_LIST("=r"(to[0]), "=r"(to[1])))
  } else if constexpr (Bytes == 4) {
    TE_FL_READ("u32", "%0, [%1];", TE_FL_LIST("=r"(to[0])))
  } else {
    TE_FL_READ("u16", "%0, [%1];", TE_FL_LIST("=h"(to[0])))
  }
#undef TE_FL_LIST
#undef TE_FL_READ
}

// Global to shared memory without passing through registers; zeros if not `valid`.
// A copy is seen by the thread that issued it after wait_copies, by others after a
// barrier as well.
template <int Bytes, bool Once>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  if constexpr (Bytes == 2) {  // smaller than an asynchronous copy can be
    unsigned short word = 0;
    if (valid) read_piece<2, Once>(&word, from);
    *static_cast<unsigned short*>(to) = word;
  } else {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = valid ? Bytes : 0;
    if constexpr (Once && Bytes == 16) {  // past L1; smaller ones cannot be
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                   "l"(from), "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(address),
                   "l"(from), "n"(Bytes), "r"(bytes)
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

// A vector whose 16-byte chunks lie `stride` bytes apart in shared memory. Volatile:
// reading twice means two reads, not values kept in registers meanwhile.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> read_chunks(const unsigned char* from, int stride) {
  Vec<T, N> result;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += 4) {
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(result.words[i]), "=r"(result.words[i + 1]),
                     "=r"(result.words[i + 2]), "=r"(result.words[i + 3])
                   : "r"(address + i / 4 * stride)
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      result.words[i] =
          reinterpret_cast<const volatile typename Vec<T, N>::Word*>(from)[i];
    }
  }
  return result;
}

// A vector to where read_chunks finds it.
template <typename T, int N>
__device__ __forceinline__ void write_chunks(unsigned char* to, int stride,
                                             const Vec<T, N>& value) {
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += 4) {
      *reinterpret_cast<uint4*>(to + i / 4 * stride) = make_uint4(
          value.words[i], value.words[i + 1], value.words[i + 2], value.words[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      reinterpret_cast<typename Vec<T, N>::Word*>(to)[i] = value.words[i];
    }
  }
}

template <int Access, bool Once, int N, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* from) {
  constexpr int bytes = least(16, Access * static_cast<int>(sizeof(T)));
  const char* source = reinterpret_cast<const char*>(from);
  Vec<T, N> result;
  if constexpr (bytes == 2 && Vec<T, N>::kBytes >= 4) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      unsigned short low, high;
      read_piece<2, Once>(&low, source + 4 * i);
      read_piece<2, Once>(&high, source + 4 * i + 2);
      result.words[i] = low | static_cast<unsigned>(high) << 16;
    }
  } else {
    constexpr int words = bytes < 4 ? 1 : bytes / 4;
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += words) {
      read_piece<bytes, Once>(result.words + i, source + 4 * i);
    }
  }
  return result;
}

template <int Access, int N, typename T>
__device__ __forceinline__ Vec<T, N> load_once(const T* from) {
  return load<Access, true, N>(from);
}

template <int Access, int N, typename T>
__device__ __forceinline__ Vec<T, N> load_shared_data(const T* from) {
  return load<Access, false, N>(from);
}

// What an earlier kernel wrote, possibly while this one was starting: past L1.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_written(const T* from) {
  Vec<T, N> result;
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kBytes / 16; ++i) {
      const uint4 word = __ldcg(reinterpret_cast<const uint4*>(from) + i);
      result.words[4 * i] = word.x;
      result.words[4 * i + 1] = word.y;
      result.words[4 * i + 2] = word.z;
      result.words[4 * i + 3] = word.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      result.words[i] = __ldcg(reinterpret_cast<const unsigned*>(from) + i);
    }
  }
  return result;
}

// Outputs are allocated by the operator: their rows are always aligned to a vector.
template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Vec<T, N>& value) {
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += 4) {
      reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(value.words[i], value.words[i + 1],
                                                       value.words[i + 2], value.words[i + 3]);
    }
  } else if constexpr (Vec<T, N>::kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(value.words[0], value.words[1]);
  } else {
    *reinterpret_cast<typename Vec<T, N>::Word*>(to) = value.words[0];
  }
}

}  // namespace te_fl
