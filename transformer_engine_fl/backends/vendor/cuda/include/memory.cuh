// Moving vectors between global memory, shared memory and registers.
//
// Every function takes ACCESS, the number of elements that one access may cover. A
// vector whose address is aligned to less than its size is moved in narrower pieces,
// so that which thread holds which column never depends on an address.
//
// The loads are volatile assembly: they stay where the kernel put them, ahead of the
// barrier that they should overlap with.

#pragma once

#include "numeric.cuh"

namespace te_fl {

// Read-only data that this kernel reads once: does not displace others from L1.
template <int BYTES>
__device__ __forceinline__ void read_once(void* to, const void* from) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4 || BYTES == 2, "no such access");
  if constexpr (BYTES == 16) {
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(from));
    *static_cast<uint4*>(to) = word;
  } else if constexpr (BYTES == 8) {
    uint2 word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(word.x), "=r"(word.y)
                 : "l"(from));
    *static_cast<uint2*>(to) = word;
  } else if constexpr (BYTES == 4) {
    unsigned word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];"
                 : "=r"(word)
                 : "l"(from));
    *static_cast<unsigned*>(to) = word;
  } else {
    unsigned short word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u16 %0, [%1];"
                 : "=h"(word)
                 : "l"(from));
    *static_cast<unsigned short*>(to) = word;
  }
}

// Read-only data that other blocks of this multiprocessor read too.
template <int BYTES>
__device__ __forceinline__ void read_shared_data(void* to, const void* from) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4 || BYTES == 2, "no such access");
  if constexpr (BYTES == 16) {
    uint4 word;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(from));
    *static_cast<uint4*>(to) = word;
  } else if constexpr (BYTES == 8) {
    uint2 word;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                 : "=r"(word.x), "=r"(word.y)
                 : "l"(from));
    *static_cast<uint2*>(to) = word;
  } else if constexpr (BYTES == 4) {
    unsigned word;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from));
    *static_cast<unsigned*>(to) = word;
  } else {
    unsigned short word;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(word) : "l"(from));
    *static_cast<unsigned short*>(to) = word;
  }
}

// Global to shared memory without passing through registers; zeros if not `valid`.
// A copy is seen by the thread that issued it after wait_copies, by others after a
// barrier as well.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  if constexpr (BYTES == 2) {  // too small for the copy engine of the load unit
    unsigned short word = 0;
    if (valid) read_once<2>(&word, from);
    *static_cast<unsigned short*>(to) = word;
  } else {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                   "l"(from), "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(address),
                   "l"(from), "n"(BYTES), "r"(bytes)
                   : "memory");
    }
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's latest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int ACCESS, int N, typename T>
__device__ __forceinline__ Vec<T, N> load_once(const T* from) {
  constexpr int bytes = least(16, ACCESS * static_cast<int>(sizeof(T)));
  Vec<T, N> result;
#pragma unroll
  for (int at = 0; at < static_cast<int>(sizeof(result)); at += bytes) {
    read_once<bytes>(reinterpret_cast<char*>(&result) + at,
                     reinterpret_cast<const char*>(from) + at);
  }
  return result;
}

template <int ACCESS, int N, typename T>
__device__ __forceinline__ Vec<T, N> load_shared_data(const T* from) {
  constexpr int bytes = least(16, ACCESS * static_cast<int>(sizeof(T)));
  Vec<T, N> result;
#pragma unroll
  for (int at = 0; at < static_cast<int>(sizeof(result)); at += bytes) {
    read_shared_data<bytes>(reinterpret_cast<char*>(&result) + at,
                            reinterpret_cast<const char*>(from) + at);
  }
  return result;
}

// What an earlier kernel wrote, possibly while this one was starting: past L1.
template <int N>
__device__ __forceinline__ Vec<float, N> load_written(const float* from) {
  Vec<float, N> result;
  if constexpr (N == 4) {
    *reinterpret_cast<float4*>(&result) = __ldcg(reinterpret_cast<const float4*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) result.at[i] = __ldcg(from + i);
  }
  return result;
}
template <int N>
__device__ __forceinline__ Vec<double, N> load_written(const double* from) {
  Vec<double, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result.at[i] = __ldcg(from + i);
  return result;
}

// Outputs are allocated by the operator: their rows are always aligned to a vector.
template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Vec<T, N>& value) {
  constexpr int bytes = least(16, N * static_cast<int>(sizeof(T)));
  struct alignas(bytes) Piece {
    char at[bytes];
  };
  const Piece* pieces = reinterpret_cast<const Piece*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / bytes; ++i) {
    reinterpret_cast<Piece*>(to)[i] = pieces[i];
  }
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> zeros() {
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) put(result.at + i, 0.0f);
  return result;
}

}  // namespace te_fl
