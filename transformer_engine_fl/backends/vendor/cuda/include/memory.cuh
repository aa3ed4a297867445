// Moving vectors between global memory, shared memory and registers.
//
// Access is the number of elements that one access may cover. A vector whose address is
// aligned to less than its size is moved in narrower pieces, so that the columns of a thread
// never depend on an address.
//
// ptxas may move a load into registers: to save registers it moves loads behind the sums that
// they should overlap with. Data that must be in flight early is copied to shared memory instead.

#pragma once

#include "instructions.cuh"
#include "numeric.cuh"

namespace te_fl {

// Asynchronous copy from global to shared memory, to `at` bytes behind `to`, bypassing registers;
// writes zeros if not `valid`. The issuing thread sees the copy after wait_copies, other threads
// after a barrier that follows it.
template <int Bytes, Reading How>
__device__ __forceinline__ void copy_async(unsigned char* to, int at, const void* from,
                                           bool valid) {
  if constexpr (Bytes == 2) {  // an asynchronous copy has at least 4 bytes
    *reinterpret_cast<unsigned short*>(to + at) = read_where(from, valid);
  } else {
    copy_async_piece<Bytes, How>(to, at, from, valid ? Bytes : 0);
  }
}

// A vector whose 16-byte chunks lie `stride` bytes apart in shared memory. The reads are
// volatile, so that the compiler reads again rather than keep values in registers.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> read_chunks(const unsigned char* from, int stride) {
  Vec<T, N> result;
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += 4) {
      read_shared(result.words + i, from + i / 4 * stride);
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

// Writes a vector in the layout of read_chunks.
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

template <int Bytes, bool Plain, typename Word>
__device__ __forceinline__ void read_one(Word* to, const void* from) {
  if constexpr (Plain) read_plain_piece<Bytes>(to, from);
  else read_piece<Bytes>(to, from);
}

// Loads memory that no kernel writes while this one runs. Plain: as read_plain_piece does.
template <int Access, int N, bool Plain = false, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* from) {
  constexpr int bytes = least(16, Access * static_cast<int>(sizeof(T)));
  const char* source = reinterpret_cast<const char*>(from);
  Vec<T, N> result;
  if constexpr (bytes == 2 && Vec<T, N>::kBytes >= 4) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      unsigned short low, high;
      read_one<2, Plain>(&low, source + 4 * i);
      read_one<2, Plain>(&high, source + 4 * i + 2);
      result.words[i] = low | static_cast<unsigned>(high) << 16;
    }
  } else {
    constexpr int words = bytes < 4 ? 1 : bytes / 4;
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += words) {
      read_one<bytes, Plain>(result.words + i, source + 4 * i);
    }
  }
  return result;
}

// Loads with read_written_piece.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_written(const T* from) {
  constexpr int bytes = least(16, Vec<T, N>::kBytes);
  const char* source = reinterpret_cast<const char*>(from);
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kWords; i += bytes < 4 ? 1 : bytes / 4) {
    read_written_piece<bytes>(result.words + i, source + 4 * i);
  }
  return result;
}

// As `load`, for a unit of 1 to 16 bytes of any type.
template <typename Unit>
__device__ __forceinline__ Unit load_unit(const Unit* from) {
  constexpr int bytes = static_cast<int>(sizeof(Unit));
  if constexpr (bytes == 1) {
    return __ldg(from);
  } else {
    typename WordOf<(bytes < 4)>::type words[bytes < 4 ? 1 : bytes / 4];
    read_piece<bytes>(words, from);
    Unit unit;
    memcpy(&unit, words, bytes);
    return unit;
  }
}

// Operators allocate the outputs, so that their rows are always aligned to a vector.
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

// Stores 16 bytes if `valid`, without a branch. Known: they are valid, and may be any number.
template <bool Known, int N, typename T>
__device__ __forceinline__ void store_where(T* to, const Vec<T, N>& value, bool valid) {
  static_assert(Known || Vec<T, N>::kBytes == 16, "conditional stores are 16 bytes");
  if constexpr (Known) store(to, value);
  else write_where(to, value.words, valid);
}

// As `store`, for code in which the compiler would split one store into several: where it cannot
// tell the address space (of an address that was itself loaded from memory), or sees too much.
template <int N, typename T>
__device__ __forceinline__ void store_to_global(T* to, const Vec<T, N>& value) {
  if constexpr (Vec<T, N>::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; i += 4) {
      __stcg(reinterpret_cast<uint4*>(to) + i / 4,
             make_uint4(value.words[i], value.words[i + 1], value.words[i + 2],
                        value.words[i + 3]));
    }
  } else if constexpr (Vec<T, N>::kBytes == 8) {
    __stcg(reinterpret_cast<uint2*>(to), make_uint2(value.words[0], value.words[1]));
  } else {
    __stcg(reinterpret_cast<typename Vec<T, N>::Word*>(to), value.words[0]);
  }
}

}  // namespace te_fl
