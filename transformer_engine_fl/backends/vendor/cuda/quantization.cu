// Dequantisation, transposes and permutations, and kernels for block scaling and delayed scaling.
//
// Casts are in casting.cu. The host (quantization.py) defines KERNEL_<name> and the macros below
// that the kernel needs.
//
//   KIND       format of the codes: e4m3, e5m2 or e2m1
//   SCALES     how scales are stored: float32, e8m0 or e4m3
//   WIDTH, HEIGHT   columns and rows that share a scale; a WIDTH of 0 if all do
//   TX, TY     storage types of the input and the output
//   FLAT       1 if all elements may be treated as one row
//   VEC        elements of a vector; divides the columns
//   ACCESS     elements, or bytes of codes, that one access may cover
//   ALIGNED    1 if rows of the output begin at multiples of 16 bytes
//   WORD       the type of the units that are moved
//   VECS       vectors that a thread has in flight at once
//   CASTS      1 to cast with given scales, 0 to find the amax
//   OF_ALL     1 to use the largest amax of a history, 0 to use the newest
//
// There are no atomic additions, so the same call gives the same bits.

#include "float8.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "turning.cuh"

using namespace te_fl;

#ifdef KERNEL_dequantize

// Rows of codes are `stride` bytes apart.
extern "C" __global__ void __launch_bounds__(256)
    dequantize(const unsigned char* __restrict__ data,
               const StoredScale<SCALES>::type* __restrict__ scale_inv,
               const float* __restrict__ global_scale_inv, TY* __restrict__ out,
               unsigned vectors, unsigned per_row, long long stride) {
  constexpr int kBytes = VEC * KIND::kBits / 8;
  const unsigned first = blockIdx.x * (256 * VECS) + threadIdx.x;
  const unsigned blocks = WIDTH > 0 ? (per_row * VEC + WIDTH - 1) / (WIDTH > 0 ? WIDTH : 1) : 0;
  unsigned words[VECS][kBytes < 4 ? 1 : kBytes / 4];
  float factors[VECS];
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    // Beyond the end the last vector is loaded again, unused: a branch would split the loads.
    const unsigned wanted = first + v * 256;
    const unsigned at = wanted < vectors ? wanted : vectors - 1;
    const unsigned row = FLAT ? 0 : at / per_row;
    const unsigned place = at - row * per_row;
    load_bytes<kBytes, ACCESS>(data + row * stride + static_cast<long long>(place) * kBytes,
                               words[v]);
    long long block = 0;
    if constexpr (WIDTH > 0) {
      block = static_cast<long long>(row / HEIGHT) * blocks + place * VEC / (WIDTH > 0 ? WIDTH : 1);
    }
    if constexpr (sizeof(SCALES) == 4) factors[v] = scale_inv[block];
    else factors[v] = value_of<SCALES>(scale_inv[block]);
  }
  const float whole = global_scale_inv ? *global_scale_inv : 1.0f;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    if (first + v * 256 >= vectors) break;
    float values[VEC];
    widen<KIND>(words[v], values);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      values[i] = product(values[i], factors[v]);
      if constexpr (KIND::kBits == 4) values[i] = product(values[i], whole);
    }
    store(out + static_cast<long long>(first + v * 256) * VEC, encode<TY>(values));
  }
}

#endif  // KERNEL_dequantize

#ifdef KERNEL_transpose

// Transposes a matrix of bytes by tiles of 256 rows and 128 columns, so that each row of the output
// is written in pairs of cache lines.
extern "C" __global__ void __launch_bounds__(512, 3)
    transpose(const unsigned char* __restrict__ x, unsigned char* __restrict__ y, long long stride,
         int rows, int columns) {
  constexpr int kThreads = 512;
  constexpr int kRows = 256;
  __shared__ __align__(16) unsigned char tile[kRows * 128];
  const int across = (columns + 127) / 128;
  const auto [above, before] = tile_of(blockIdx.x, (rows + kRows - 1) / kRows, across, rows);
  const int first_row = above * kRows;
  const int first_column = before * 128;
  const int column = first_column + threadIdx.x % 8 * 16;
  unsigned words[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + threadIdx.x / 8 + i * (kThreads / 8);
    const unsigned char* source = x + row * stride + column;
    if (row < rows && column + 16 <= columns) {
      load_bytes<16, ACCESS>(source, words[i]);
    } else {
#pragma unroll
      for (int word = 0; word < 4; ++word) words[i][word] = 0;
#pragma unroll
      for (int at = 0; at < 16; ++at) {
        if (row < rows && column + at < columns) {
          words[i][at / 4] |= static_cast<unsigned>(source[at]) << at % 4 * 8;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int place = threadIdx.x / 8 + i * (kThreads / 8);
    store_bytes<16, 16>(tile + place * 128 + threadIdx.x % 8 * 16, words[i]);
  }
  __syncthreads();
  transpose_bytes<kThreads>(tile);
  drain_transposed<kThreads, kRows, 2, ALIGNED>(tile, y, first_column, columns, first_row, rows);
}

#endif  // KERNEL_transpose

#ifdef KERNEL_transpose_words

// Transposes a matrix of larger units tile by tile.
extern "C" __global__ void __launch_bounds__(256)
    transpose_words(const WORD* __restrict__ x, WORD* __restrict__ y, long long stride, int rows,
               int columns) {
  transpose_numbers<256>(x, y, stride, rows, columns, blockIdx.x);
}

#endif  // KERNEL_transpose_words

#ifdef KERNEL_swap_rows

// Swaps the first two dimensions: output row i is row (i % first, i / first) of the input, whose
// strides are `x_first` and `x_second`. Sizes and strides, except `first`, count WORDs.
extern "C" __global__ void __launch_bounds__(256)
    swap_rows(const WORD* __restrict__ x, WORD* __restrict__ y, unsigned words,
              unsigned per_row, unsigned first, long long x_first, long long x_second) {
  const unsigned start = blockIdx.x * (256 * VECS) + threadIdx.x;
  WORD moved[VECS];
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const unsigned wanted = start + v * 256;
    const unsigned at = wanted < words ? wanted : words - 1;
    const unsigned row = at / per_row;
    const unsigned second = row / first;
    moved[v] = load_unit(x + (row - second * first) * x_first + second * x_second +
                         (at - row * per_row));
  }
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    if (start + v * 256 < words) y[start + v * 256] = moved[v];
  }
}

#endif  // KERNEL_swap_rows

#ifdef KERNEL_shard

// One block of `length` rows and columns of a matrix, of which `x` is a contiguous flat part: the
// amax of the block's elements in `x`, or their cast. Sizes, except `across` and `length`, count
// vectors.
extern "C" __global__ void __launch_bounds__(256)
    shard(const TX* __restrict__ x, const float* __restrict__ scale, float* __restrict__ amax,
          unsigned char* __restrict__ data, long long width, long long start, long long count,
          int across, int length, int run) {
  const int above = blockIdx.x / across;
  const int before = blockIdx.x - above * across;
  const float factor = CASTS ? scale[blockIdx.x] : 1.0f;
  float largest = 0.0f;
  const long long all = static_cast<long long>(length) * run;
#pragma unroll 4
  for (long long at = threadIdx.x; at < all; at += 256) {
    const long long down = at / run;
    const long long column = static_cast<long long>(before) * run + (at - down * run);
    const long long place = (static_cast<long long>(above) * length + down) * width + column - start;
    if (column >= width || place < 0 || place >= count) continue;
    float values[VEC];
    decode(load<VEC, VEC>(x + place * VEC), values);
    if constexpr (CASTS) {
      const auto codes = narrow<KIND>(values, factor);
      store_bytes<VEC, VEC>(data + place * VEC, codes.words);
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) largest = fmaxf(largest, fabsf(values[i]));
    }
  }
  if constexpr (!CASTS) {
    __shared__ float warps[8];
    largest = largest_of_lanes<32>(largest);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    largest = largest_of_lanes<8>(warps[threadIdx.x % 8]);
    if (threadIdx.x == 0) amax[blockIdx.x] = largest;
  }
}

#endif  // KERNEL_shard

#ifdef KERNEL_update

// A block of threads updates one column of a history of amaxes, and its scale.
extern "C" __global__ void __launch_bounds__(256)
    update(const float* __restrict__ reduced, float* history, float* __restrict__ scale,
           int length, long long row_stride, long long column_stride, long long scale_stride,
           float numerator) {
  __shared__ float warps[8];
  float* column = history + blockIdx.x * column_stride;
  const float buffered = reduced[blockIdx.x];
  const float newest = buffered == 0.0f ? *column : buffered;
  float largest = 0.0f;
  for (int first = 0; first < length; first += 256) {
    const int row = first + threadIdx.x;
    float moved = 0.0f;
    if (row < length) moved = row == length - 1 ? newest : column[(row + 1) * row_stride];
    largest = fmaxf(largest, moved);
    __syncthreads();  // a thread writes the row that another one has read
    if (row < length) column[row * row_stride] = row == 0 ? 0.0f : moved;
  }
  largest = largest_of_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  largest = largest_of_lanes<8>(warps[threadIdx.x % 8]);
  const float amax = OF_ALL ? largest : newest;
  if (threadIdx.x == 0 && amax > 0.0f && __float_as_uint(amax) < kInfinite) {
    scale[blockIdx.x * scale_stride] = bounded_quotient(numerator, amax);
  }
}

#endif  // KERNEL_update
