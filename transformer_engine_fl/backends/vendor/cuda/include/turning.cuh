// Turning a tile of 128 columns in shared memory, so that what goes out is contiguous too.
//
// Chunks of 16 bytes lie where threads of a warp that access them together use different
// banks. All functions are called by every thread of a block.

#pragma once

#include "float8.cuh"
#include "memory.cuh"

namespace te_fl {

// Values of 128x128, to be read down their columns, two neighbouring ones at a time.
template <typename T>
struct ValueTile {
  static constexpr int kRow = 128 * static_cast<int>(sizeof(T));

  static __device__ __forceinline__ unsigned char* chunk(unsigned char* tile, int row, int c) {
    return tile + row * kRow + (c ^ (c >> 3 & (sizeof(T) == 4 ? 3 : 1))) * 16;
  }

  static __device__ __forceinline__ void pair(unsigned char* tile, int row, int pair,
                                              float (&two)[2]) {
    constexpr int kPairs = 8 / static_cast<int>(sizeof(T));  // of a chunk
    const unsigned char* from =
        chunk(tile, row, pair / kPairs) + pair % kPairs * (2 * static_cast<int>(sizeof(T)));
    decode(*reinterpret_cast<const Vec<T, 2>*>(from), two);
  }

  // The amaxes of so many rows of the two columns, by two at a time where that can be.
  template <int Rows>
  static __device__ __forceinline__ void largest(unsigned char* tile, int first, int pair,
                                                 float (&two)[2]) {
    constexpr int kPairs = 8 / static_cast<int>(sizeof(T));
    two[0] = two[1] = 0.0f;
    Vec<T, 2> both;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const unsigned char* from = chunk(tile, first + i, pair / kPairs) +
                                  pair % kPairs * (2 * static_cast<int>(sizeof(T)));
      const Vec<T, 2> own = *reinterpret_cast<const Vec<T, 2>*>(from);
      if constexpr (sizeof(T) == 2) {
        both.words[0] = i == 0 ? own.words[0] : larger_halves<kIsBFloat<T>>(both.words[0],
                                                                            own.words[0]);
      } else {
        float values[2];
        decode(own, values);
        two[0] = fmaxf(two[0], fabsf(values[0]));
        two[1] = fmaxf(two[1], fabsf(values[1]));
      }
    }
    if constexpr (sizeof(T) == 2) {
      float values[2];
      decode(both, values);
      two[0] = fmaxf(0.0f, fabsf(values[0]));
      two[1] = fmaxf(0.0f, fabsf(values[1]));
    }
  }
};

// A chunk of a turned tile, whose columns have Bytes bytes each and are written by threads
// that are 2^Shift columns apart.
template <int Bytes, int Shift>
__device__ __forceinline__ unsigned char* turned_chunk(unsigned char* tile, int column,
                                                       int chunk) {
  constexpr int kChunks = Bytes / 16;
  return tile + (column * kChunks + (chunk ^ (column >> Shift & (kChunks - 1)))) * 16;
}

// Turns Threads / 2 rows of 128 bytes, in their place, a thread 4 columns of 16 rows; the turned
// chunks are shifted by 2.
template <int Threads>
__device__ __forceinline__ void turn_bytes(unsigned char* tile) {
  const int group = threadIdx.x % 32;
  const int run = threadIdx.x / 32;
  unsigned turned[4][4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    unsigned rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = *reinterpret_cast<const unsigned*>(tile + (run * 16 + part * 4 + i) * 128 +
                                                   group * 4);
    }
    const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140);
    const unsigned low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const unsigned high01 = __byte_perm(rows[0], rows[1], 0x7362);
    const unsigned high23 = __byte_perm(rows[2], rows[3], 0x7362);
    turned[0][part] = __byte_perm(low01, low23, 0x5410);
    turned[1][part] = __byte_perm(low01, low23, 0x7632);
    turned[2][part] = __byte_perm(high01, high23, 0x5410);
    turned[3][part] = __byte_perm(high01, high23, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_bytes<16, 16>(turned_chunk<Threads / 2, 2>(tile, group * 4 + i, run), turned[i]);
  }
  __syncthreads();
}

// Writes the turned tile to rows of `bytes` bytes, `Access` at a time, as far as they go.
// Inside: all of it does, and a thread's chunks lie equally far apart.
template <int Threads, int Bytes, int Shift, int Access, bool Inside = false>
__device__ __forceinline__ void drain_turned(unsigned char* tile, unsigned char* to,
                                             int first_column, int columns, int first_byte,
                                             int bytes) {
  constexpr int kChunks = Bytes / 16;
  if constexpr (Inside) {
    constexpr int kColumns = Threads / kChunks;  // that are written at once
    static_assert(128 % kColumns == 0 && (kColumns >> Shift) % kChunks == 0,
                  "chunks of the columns that follow are shifted as these are");
    const int column = threadIdx.x / kChunks;
    const int place = threadIdx.x % kChunks;
    const unsigned char* from = turned_chunk<Bytes, Shift>(tile, column, place);
    to += static_cast<long long>(first_column + column) * bytes + first_byte + place * 16;
#pragma unroll
    for (int i = 0; i < 128 / kColumns; ++i) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(from + i * kColumns * Bytes);
      const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      store_bytes<16, Access>(to, words);
      to += static_cast<long long>(kColumns) * bytes;
    }
  } else {
    for (int at = threadIdx.x; at < 128 * kChunks; at += Threads) {
      const int column = at / kChunks;
      const int byte = first_byte + at % kChunks * 16;
      if (first_column + column >= columns || byte >= bytes) continue;
      const uint4 chunk =
          *reinterpret_cast<const uint4*>(turned_chunk<Bytes, Shift>(tile, column, at % kChunks));
      const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      unsigned char* target = to + static_cast<long long>(first_column + column) * bytes + byte;
      if (byte + 16 <= bytes) {
        store_bytes<16, Access>(target, words);
      } else {
        store_some_bytes<16>(target, words, bytes - byte);
      }
    }
  }
}

// Tile `block` of 64x64 of a matrix of numbers, transposed.
template <int Threads, typename Word>
__device__ __forceinline__ void turn_numbers(const Word* x, Word* y, long long stride, int rows,
                                             int columns, int block) {
  __shared__ Word tile[64][65];
  const int across = (columns + 63) / 64;
  const int above = block / across;
  const int first_row = above * 64;
  const int first_column = (block - above * across) * 64;
  const int lane = threadIdx.x % 64;
  const int team = threadIdx.x / 64;
  constexpr int kTeams = Threads / 64;
  // Past the end the last ones again, unused: a branch would break up the loads.
  const int column = first_column + lane < columns ? first_column + lane : columns - 1;
  Word kept[64 / kTeams];
#pragma unroll
  for (int i = 0; i < 64 / kTeams; ++i) {
    const int row = first_row + team + i * kTeams;
    kept[i] = load_unit(x + (row < rows ? row : rows - 1) * stride + column);
  }
#pragma unroll
  for (int i = 0; i < 64 / kTeams; ++i) tile[team + i * kTeams][lane] = kept[i];
  __syncthreads();
  if (first_row + lane >= rows) return;
  y += static_cast<long long>(first_column) * rows + first_row + lane;
#pragma unroll
  for (int i = 0; i < 64 / kTeams; ++i) {
    const int place = team + i * kTeams;
    if (first_column + place < columns) y[static_cast<long long>(place) * rows] = tile[lane][place];
  }
}

}  // namespace te_fl
