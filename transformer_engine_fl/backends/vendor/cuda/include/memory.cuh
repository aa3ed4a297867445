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

#include "instructions.cuh"
#include "numeric.cuh"

namespace te_fl {

// Global to shared memory, `at` bytes behind `to`, without passing through registers; zeros if not
// `valid`. A copy is seen by the thread that issued it after wait_copies, by others after a barrier
// as well.
template <int Bytes, Reading How>
__device__ __forceinline__ void copy_async(unsigned char* to, int at, const void* from,
                                           bool valid) {
  if constexpr (Bytes == 2) {  // smaller than an asynchronous copy can be
    *reinterpret_cast<unsigned short*>(to + at) = read_where(from, valid);
  } else {
    copy_async_piece<Bytes, How>(to, at, from, valid ? Bytes : 0);
  }
}

// A vector whose 16-byte chunks lie `stride` bytes apart in shared memory. Volatile:
// reading twice means two reads, not values kept in registers meanwhile.
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

template <int Bytes, bool Plain, typename Word>
__device__ __forceinline__ void read_one(Word* to, const void* from) {
  if constexpr (Plain) read_plain_piece<Bytes>(to, from);
  else read_piece<Bytes>(to, from);
}

// What no kernel writes while this one runs; Plain: as read_plain_piece.
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

// As read_written_piece.
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

// As `load`, of something of 1 to 16 bytes, whatever it stands for.
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

// Stores 16 bytes if they are `valid`, without a branch; Known: they are, however many.
template <bool Known, int N, typename T>
__device__ __forceinline__ void store_where(T* to, const Vec<T, N>& value, bool valid) {
  static_assert(Known || Vec<T, N>::kBytes == 16, "written at once");
  if constexpr (Known) store(to, value);
  else write_where(to, value.words, valid);
}

// As `store`, where the compiler would make several stores of one: where it cannot see which
// memory an address is of, as of one that was itself read from memory, or sees too much.
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
