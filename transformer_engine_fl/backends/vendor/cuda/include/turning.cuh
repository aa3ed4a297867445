// Transposing a tile of 128 columns in shared memory, so that writes are coalesced too.
//
// Chunks of 16 bytes are swizzled, so that threads of a warp that access them together use
// different banks. All functions must be called by every thread of a block.

#pragma once

#include "float8.cuh"
#include "memory.cuh"

namespace te_fl {

// A tile of 128x128 values that is read down its columns, two neighbouring columns at a time.
template <typename T>
struct ValueTile {
  static constexpr int kRow = 128 * static_cast<int>(sizeof(T));

  static __device__ __forceinline__ unsigned char* chunk(unsigned char* tile, int row, int c) {
    return tile + row * kRow + (c ^ (c >> 3 & (sizeof(T) == 4 ? 3 : 1))) * 16;
  }

  static __device__ __forceinline__ void pair(unsigned char* tile, int row, int pair,
                                              float (&two)[2]) {
    constexpr int kPairs = 8 / static_cast<int>(sizeof(T));  // per chunk
    const unsigned char* from =
        chunk(tile, row, pair / kPairs) + pair % kPairs * (2 * static_cast<int>(sizeof(T)));
    decode(*reinterpret_cast<const Vec<T, 2>*>(from), two);
  }

  // The amaxes of Rows rows of the two columns; 16-bit values are compared two at a time.
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

// A chunk of a transposed tile. A column has Bytes bytes, and neighbouring threads write columns
// that are 2^Shift apart.
template <int Bytes, int Shift>
__device__ __forceinline__ unsigned char* transposed_chunk(unsigned char* tile, int column,
                                                           int chunk) {
  constexpr int kChunks = Bytes / 16;
  return tile + (column * kChunks + (chunk ^ (column >> Shift & (kChunks - 1)))) * 16;
}

// Transposes Threads / 2 rows of 128 bytes in place, a thread 4 columns of 16 rows; the result is
// laid out as by transposed_chunk with Shift = 2.
template <int Threads>
__device__ __forceinline__ void transpose_bytes(unsigned char* tile) {
  const int group = threadIdx.x % 32;
  const int run = threadIdx.x / 32;
  unsigned transposed[4][4];
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
    transposed[0][part] = __byte_perm(low01, low23, 0x5410);
    transposed[1][part] = __byte_perm(low01, low23, 0x7632);
    transposed[2][part] = __byte_perm(high01, high23, 0x5410);
    transposed[3][part] = __byte_perm(high01, high23, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_bytes<16, 16>(transposed_chunk<Threads / 2, 2>(tile, group * 4 + i, run), transposed[i]);
  }
  __syncthreads();
}

// The position of a tile: how many tiles are above it in the matrix, and how many before it in
// its row of tiles.
struct Tile {
  int above, before;
};

// Tile number `index` of a launch. If transposed rows, of `bytes` bytes, do not begin at sectors of
// 32 bytes, tiles that are neighbours along these rows follow each other, so that a sector that two
// tiles share is soon complete in L2. Without transposed rows `bytes` is 0.
__device__ __forceinline__ Tile tile_of(unsigned index, int down, int across, int bytes) {
  const bool sectors = bytes % 32 == 0;
  const unsigned line = sectors ? across : down;
  const int passed = line ? index / line : 0;
  const int place = index - passed * line;
  return sectors ? Tile{passed, place} : Tile{place, passed};
}

// Writes the transposed tile to rows of `bytes` bytes, which may begin at any address, up to their
// end. The lanes that share a column's bytes, or a run of 128 of them, write aligned words, each
// combined from two words of the tile; the first lane writes the bytes left at both ends of the
// run, whose words are shared with the neighbouring runs.
template <int Threads, int Bytes, int Shift>
__device__ __forceinline__ void drain_words(unsigned char* tile, unsigned char* to,
                                            int first_column, int columns, int first_byte,
                                            int bytes) {
  constexpr int kRun = least(Bytes, 128);
  constexpr int kLanes = kRun / 4;
  constexpr int kRuns = Bytes / kRun;
  constexpr int kTeams = Threads / kLanes;
  static_assert(128 * kRuns % kTeams == 0, "all lanes must iterate equally often");
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int run = threadIdx.x / kLanes; run < 128 * kRuns; run += kTeams) {
    const int column = run / kRuns;
    const int start = run % kRuns * kRun;
    const unsigned word = *reinterpret_cast<const unsigned*>(
        transposed_chunk<Bytes, Shift>(tile, column, start / 16 + lane / 4) + lane % 4 * 4);
    const unsigned before = __shfl_sync(0xffffffffu, word, (lane + kLanes - 1) % kLanes, kLanes);
    unsigned char* target =
        to + static_cast<long long>(first_column + column) * bytes + first_byte + start;
    const int ahead = reinterpret_cast<unsigned long long>(target) % 4;  // bytes from `before`
    const unsigned made = __funnelshift_l(before, word, ahead * 8);
    const int place = lane * 4 - ahead;
    const int left = first_column + column < columns ? bytes - first_byte - start : 0;
    if (place >= 0 && place + 4 <= left) {
      *reinterpret_cast<unsigned*>(target + place) = made;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int byte = place + i < 0 ? place + i + kRun : place + i;
        if (byte < left) target[byte] = static_cast<unsigned char>(made >> i * 8);
      }
    }
  }
}

// Writes the transposed tile to rows of `bytes` bytes, up to their end. Aligned: rows begin at
// multiples of 16 bytes. Inside: the whole tile lies in the rows, and a thread's chunks are equally
// far apart.
template <int Threads, int Bytes, int Shift, bool Aligned, bool Inside = false>
__device__ __forceinline__ void drain_transposed(unsigned char* tile, unsigned char* to,
                                                 int first_column, int columns, int first_byte,
                                                 int bytes) {
  constexpr int kChunks = Bytes / 16;
  static_assert(Aligned || !Inside, "Inside needs Aligned rows");
  if constexpr (Inside) {
    constexpr int kColumns = Threads / kChunks;  // columns that are written at once
    static_assert(128 % kColumns == 0 && (kColumns >> Shift) % kChunks == 0,
                  "all columns of a thread must have the same shift");
    const int column = threadIdx.x / kChunks;
    const int place = threadIdx.x % kChunks;
    const unsigned char* from = transposed_chunk<Bytes, Shift>(tile, column, place);
    to += static_cast<long long>(first_column + column) * bytes + first_byte + place * 16;
#pragma unroll
    for (int i = 0; i < 128 / kColumns; ++i) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * kColumns * Bytes);
      to += static_cast<long long>(kColumns) * bytes;
    }
  } else if constexpr (Aligned) {
    for (int at = threadIdx.x; at < 128 * kChunks; at += Threads) {
      const int column = at / kChunks;
      const int byte = first_byte + at % kChunks * 16;
      if (first_column + column >= columns || byte >= bytes) continue;
      *reinterpret_cast<uint4*>(to + static_cast<long long>(first_column + column) * bytes + byte) =
          *reinterpret_cast<const uint4*>(transposed_chunk<Bytes, Shift>(tile, column,
                                                                         at % kChunks));
    }
  } else {
    drain_words<Threads, Bytes, Shift>(tile, to, first_column, columns, first_byte, bytes);
  }
}

// Transposes the 64x64 tile number `block` of a matrix of words.
template <int Threads, typename Word>
__device__ __forceinline__ void transpose_numbers(const Word* x, Word* y, long long stride,
                                                  int rows, int columns, int block) {
  __shared__ Word tile[64][65];
  const int across = (columns + 63) / 64;
  const int above = block / across;
  const int first_row = above * 64;
  const int first_column = (block - above * across) * 64;
  const int lane = threadIdx.x % 64;
  const int team = threadIdx.x / 64;
  constexpr int kTeams = Threads / 64;
  // Beyond the end the last row and column are loaded again, unused: a branch would split loads.
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
