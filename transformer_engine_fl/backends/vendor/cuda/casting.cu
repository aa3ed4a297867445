// Casting a matrix to a scaling format: what quantization and the quantised epilogues share.
//
// The kernels that cast compute their source: a tensor itself, an activation of it or the
// activation's gradient, or a normalized row. The host (_casting.py) defines KERNEL_<name> and
// the macros below that the kernel needs.
//
//   SOURCE     what is cast: 0 the input, 1 an activation or its gradient, 2 a norm
//   TX, TDY    storage types of the input and of the output's gradient
//   TW, TB     storage types of a norm's parameters
//   CENTRED, ZERO_CENTRED   of a norm: minus the mean; gamma is stored as gamma - 1
//   FUNCTION, GATED, CLAMPED, BACKWARD  of an activation: see activation.cu
//   BOTH       1 if a thread computes the same columns of both halves of a gated gradient
//   HALVES     1 if the columns are those of both halves, and a thread has 16 of them
//   ACCESS     elements that one access may cover
//   WHOLE      1 if every piece of 16 columns is complete, and lies in one half
//   INSIDE     1 if no tile goes beyond the rows or the columns (cast_tiles)
//   KIND       format of the codes: e4m3, e5m2 or e2m1
//   WIDTH      columns that share a scale, 0 if all do or if blocks are square
//   SQUARE     1 if blocks are 128x128
//   SCALES     how blocks' scales are stored: float32, e8m0 or e4m3
//   POW2       1 if scales are powers of two
//   STORE      bytes that one access to the codes may cover
//   ALIGNED_T  1 if rows of the transposed codes begin at multiples of 16 bytes
//   OWNED      1 if rows belong to groups with scales of their own
//   AMAX       1 to write the amax of each block of threads
//   SUMS       1 to write partial sums of columns
//   TRANSPOSED 1 to write the transposed codes too
//   STAGED_SCALES  1 to write blocks' scales for transpose_scales, those of a tile contiguously
//   BACKWARDS  1 to start at the end: data that was read last is the likeliest to be in L2 still
//   DEPENDENT  1 if the previous kernel computes the scale
//   LANES      threads along the columns of a block of threads; each has 16 neighbouring columns
//   ROWS       rows that a block of threads works on at once
//   AHEAD      rows of a thread that are in flight at once (cast_rows), or tiles (amax_tiles)
//   BLOCKS     blocks of threads that must fit on a multiprocessor; bounds the registers
//   WORD       type of the scales that a tile has of one row (transpose_scales)
//
// Along a row a thread has whole blocks of e2m1, and a half or an eighth of a block of the other
// formats. It reads its 16 columns in neighbouring accesses, the second of which hits in L1.
// There are no atomic additions, so the same call gives the same bits. Memory that the previous
// kernel may still be writing (DEPENDENT) is not `__restrict__`: reads of it must stay behind the
// wait.

#include "activations.cuh"
#include "casting.cuh"
#include "cluster.cuh"
#include "float8.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "turning.cuh"

using namespace te_fl;

namespace {

#if defined(KERNEL_cast_rows) || defined(KERNEL_cast_tiles) || defined(KERNEL_amax_tiles)

constexpr int kPiece = 16;
constexpr int kThreads = LANES * ROWS;
constexpr int kHalves = BOTH ? 2 : 1;

// The inputs. `part` is the number of columns of one half, `columns` that of the output.
struct Input {
  const TX* x;
  const TDY* grad;
  const TW* weight;
  const TB* bias;
  const float* mu;
  const float* rsigma;
  long long x_stride, grad_stride;
  int part, columns;
  float limit, alpha;
};

// N neighbouring elements of one half: the inputs that are read, and the values computed from them.
template <int N>
struct Share {
  static constexpr int kAccess = least(ACCESS, N);
  Vec<TX, N> x, gate;
  Vec<TDY, N> grad;
  Vec<TW, N> weight;
  Vec<TB, N> bias;
  float mean, scale;

  __device__ __forceinline__ void read(const Input& in, int row, int column) {
    const TX* from = in.x + row * in.x_stride + column;
    x = load<kAccess, N>(from);
    if constexpr (SOURCE == 1) {
      if constexpr (GATED) gate = load<kAccess, N>(from + in.part);
      if constexpr (BACKWARD) {
        grad = load<kAccess, N>(in.grad + row * in.grad_stride + column);
      }
    } else if constexpr (SOURCE == 2) {
      weight = load<kAccess, N>(in.weight + column);
      if constexpr (CENTRED) {
        float nothing[N];  // adding -0 keeps the sign of a sum that is 0
#pragma unroll
        for (int i = 0; i < N; ++i) nothing[i] = -0.0f;
        bias = in.bias ? load<kAccess, N>(in.bias + column) : encode<TB>(nothing);
        mean = in.mu[row];
      }
      scale = in.rsigma[row];
    }
  }

  // The values; for a gated gradient those of both halves.
  __device__ __forceinline__ void values(const Input& in, float (&first)[N],
                                         float (&second)[N]) const {
    decode(x, first);
    if constexpr (SOURCE == 1) {
      float b[N], dy[N];
      if constexpr (GATED) decode(gate, b);
      if constexpr (BACKWARD) decode(grad, dy);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        bool outside = false, gate_outside = false;  // always false for NaN
        float a = first[i];
        if constexpr (CLAMPED) {
          outside = a > in.limit;
          gate_outside = b[i] > in.limit || b[i] < -in.limit;
          a = a > in.limit ? in.limit : a;
          b[i] = clamp(b[i], in.limit) + 1.0f;
        }
        const Activated<float> f = FUNCTION::at(a, in.alpha);
        if constexpr (!BACKWARD) {
          first[i] = GATED ? f.value * b[i] : f.value;
        } else if constexpr (!GATED) {
          first[i] = dy[i] * f.slope;
        } else {
          first[i] = outside ? 0.0f : dy[i] * b[i] * f.slope;
          second[i] = gate_outside ? 0.0f : dy[i] * f.value;
        }
      }
    } else if constexpr (SOURCE == 2) {
      float gamma[N], beta[N];
      decode(weight, gamma);
      if constexpr (CENTRED) decode(bias, beta);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float offset = ZERO_CENTRED ? 1.0f : 0.0f;
        first[i] = (first[i] - (CENTRED ? mean : 0.0f)) * scale * (gamma[i] + offset);
        if constexpr (CENTRED) first[i] += beta[i];
      }
    }
  }
};

// 16 values of a row, of both halves if BOTH; 0 beyond the rows or columns.
struct Piece {
#if SOURCE == 0
  Vec<TX, kPiece> stored;  // decoded on use, which takes fewer registers
#else
  float made[kHalves][kPiece];
#endif

  __device__ __forceinline__ void get(int half, float (&to)[kPiece]) const {
#if SOURCE == 0
    decode(stored, to);
#else
#pragma unroll
    for (int i = 0; i < kPiece; ++i) to[i] = made[half][i];
#endif
  }

  // The amax of a half.
  __device__ __forceinline__ float largest(int half) const {
#if SOURCE == 0
    return largest_of(stored);
#else
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) largest = fmaxf(largest, fabsf(made[half][i]));
    return largest;
#endif
  }

  __device__ __forceinline__ void clear() {
#if SOURCE == 0
    stored = zeros<TX, kPiece>();
#else
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) made[half][i] = 0.0f;
    }
#endif
  }

  // For a complete piece in one half: `fetch` issues the reads, `make` computes the values.
  static __device__ __forceinline__ void fetch(const Input& in, int row, int column,
                                               Share<kPiece>& share) {
    const bool of_gate = HALVES && column >= in.part;
    share.read(in, row, of_gate ? column - in.part : column);
  }

  __device__ __forceinline__ void make(const Input& in, int column, const Share<kPiece>& share) {
#if SOURCE == 0
    stored = share.x;
#else
    const bool of_gate = HALVES && column >= in.part;
    float second[kPiece];
    share.values(in, made[0], second);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if constexpr (BOTH) made[kHalves - 1][i] = second[i];
      if constexpr (HALVES) made[0][i] = of_gate ? second[i] : made[0][i];
    }
#endif
  }

  template <bool Inside = false>
  __device__ __forceinline__ void read(const Input& in, int row, int column, bool exists) {
    const int end = BOTH ? in.part : in.columns;
    const bool straddles = HALVES && column < in.part && column + kPiece > in.part;
    if (!exists || (!Inside && column >= end)) {
      clear();
    } else if (WHOLE || (column + kPiece <= end && !straddles)) {
      Share<kPiece> share;
      fetch(in, row, column, share);
      make(in, column, share);
    } else {
#if SOURCE == 0
      stored = zeros<TX, kPiece>();
#endif
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        Share<1> share;
        float first[1] = {}, second[1] = {};
        const bool of_gate = HALVES && column + i >= in.part;
        if (column + i < end) {
          share.read(in, row, of_gate ? column + i - in.part : column + i);
#if SOURCE == 0
          if constexpr (sizeof(TX) == 4) stored.words[i] = share.x.words[0];
          else stored.words[i / 2] |= static_cast<unsigned>(share.x.words[0]) << i % 2 * 16;
#else
          share.values(in, first, second);
#endif
        }
#if SOURCE != 0
        made[0][i] = of_gate ? second[0] : first[0];
        if constexpr (BOTH) made[kHalves - 1][i] = second[0];
#endif
      }
    }
  }
};

// The largest over the threads of a block, returned in each. Every thread must call it, once only.
__device__ __forceinline__ float largest_of_block(float value) {
  __shared__ float warps[kThreads / 32];
  value = largest_of_lanes<32>(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[threadIdx.x % (kThreads / 32)];
  return largest_of_lanes<kThreads / 32>(value);
}

#endif

#if defined(KERNEL_cast_rows) || defined(KERNEL_cast_tiles)

using Stored = StoredScale<SCALES>::type;
using PieceCodes = Codes<KIND, kPiece>;

using Output = RowCast<KIND, SCALES, POW2, WIDTH, kPiece,
                       (WIDTH > kPiece ? WIDTH / kPiece : 1), STORE, WHOLE>;

// The scale that all values share, or 1; one thread writes its inverse.
__device__ __forceinline__ float shared_scale(const float* scale, bool writes, Stored* scale_inv,
                                              Stored* scale_inv_t, float* global_scale_inv) {
  if constexpr (DEPENDENT) wait_for_predecessor();
  if (OWNED || scale == nullptr) return 1.0f;
  const float shared = *scale;
  if (writes) {
    constexpr bool alone = WIDTH == 0 && !SQUARE;
    write_inverse<alone>(shared, scale_inv, scale_inv_t, global_scale_inv);
  }
  return shared;
}

// The group of a row, -1 if it belongs to none.
__device__ __forceinline__ int owner_of(const int* owner, int row, int rows) {
  return OWNED && row < rows ? owner[row] : -1;
}

#endif

}  // namespace

#ifdef KERNEL_cast_rows

// A row index, possibly beyond the rows: with SUMS a block advances by many rows at a time.
#if SUMS
using Number = long long;
#else
using Number = int;
#endif

// Casts tiles of ROWS rows along their rows. Blocks of threads are numbered along the columns
// first; `shares` of them lie below each other. A block has AHEAD tiles, and only with SUMS it
// goes on to further ones.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    cast_rows(const TX* __restrict__ x, const TDY* __restrict__ grad,
              const TW* __restrict__ weight, const TB* __restrict__ bias,
              const float* mu, const float* rsigma, const float* scale,
              const int* __restrict__ owner, unsigned char* __restrict__ data,
              Stored* __restrict__ scale_inv, float* global_scale_inv,
              float* __restrict__ partial, float* __restrict__ sums, long long x_stride,
              long long grad_stride, int rows, int part, int columns, int shares, float limit,
              float alpha, float epsilon) {
  const Input in{x,        grad,        weight, bias,    mu,    rsigma,
                 x_stride, grad_stride, part,   columns, limit, alpha};
  const Output out{data, scale_inv, columns, epsilon};
  const unsigned width = BOTH ? part : columns;
  const unsigned across = (width + LANES * kPiece - 1) / (LANES * kPiece);
  const unsigned block = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int share = across ? block / across : shares;
  const int lane = threadIdx.x % LANES;
  const int column = (block - share * across) * (LANES * kPiece) + lane * kPiece;
  const int team = threadIdx.x / LANES;

  if constexpr (DEPENDENT && SOURCE == 2) wait_for_predecessor();  // for the statistics
  float largest = 0.0f;
  float total[SUMS ? kPiece : 1] = {};
  // AHEAD rows of a thread are in flight at once.
  Piece pieces[AHEAD];
  int groups[AHEAD];
  const auto row_of = [&](Number base, int i) { return base + i * ROWS + team; };
  const Number step = static_cast<Number>(shares) * (AHEAD * ROWS);
  // With SUMS the reads of a row are issued before the values of the previous row are computed.
  constexpr bool pipelined = SUMS && WHOLE && !OWNED;
  static_assert(!pipelined || AHEAD == 1, "pipelined reads need AHEAD == 1");
  Share<kPiece> next;
  const auto is_inside = [&](Number row) {
    return row < rows && share < shares && column < static_cast<int>(width);
  };
  const auto fetch = [&](Number base) {
    const Number row = row_of(base, 0);
    if (is_inside(row)) Piece::fetch(in, static_cast<int>(row), column, next);
  };
  const auto read = [&](Number base) {
    if constexpr (pipelined) {
      const Share<kPiece> present = next;
      fetch(base + step);
      if (is_inside(row_of(base, 0))) pieces[0].make(in, column, present);
      else pieces[0].clear();
      return;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const Number row = row_of(base, i);
      const bool exists = row < rows && share < shares;
      groups[i] = exists ? owner_of(owner, static_cast<int>(row), rows) : -1;
      pieces[i].read(in, static_cast<int>(row), column, exists && (!OWNED || groups[i] >= 0));
    }
  };
  Number base = static_cast<Number>(share) * (AHEAD * ROWS);
  if constexpr (pipelined) fetch(base);
  read(base);
  const float shared = shared_scale(scale, block == 0 && threadIdx.x == 0, scale_inv, nullptr,
                                    global_scale_inv);
  // Lanes that share blocks divide the computation of the scales among them.
  constexpr int kLanes = WIDTH > kPiece ? WIDTH / kPiece : 1;
  constexpr bool divided = SOURCE == 0 && KIND::kBits == 8 && kLanes >= AHEAD && AHEAD > 1;
  // All threads of a block run the same number of iterations, since they exchange values.
  while (true) {
    float scales[AHEAD];
    if constexpr (divided) {
      float amaxes[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) amaxes[i] = pieces[i].largest(0);
      Stored inverse;
      out.scales_of(amaxes, scales, inverse);
      const int own = threadIdx.x % kLanes;
      const Number row = row_of(base, own);
      // If the row ends within a block, this lane may have no column of it.
      if (own < AHEAD && row < rows && column - own * kPiece < columns) {
        *out.inverse_at(Output::At{static_cast<int>(row), column}) = inverse;
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const Number row = row_of(base, i);
      const float scale_of_row = OWNED && groups[i] >= 0 && scale ? scale[groups[i]] : shared;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float values[kPiece];
        pieces[i].get(half, values);
        float amax = 0.0f;
        if constexpr (AMAX || (WIDTH > 0 && !divided)) amax = pieces[i].largest(half);
        if constexpr (AMAX) largest = fmaxf(largest, amax);
        if constexpr (SUMS) {
#pragma unroll
          for (int j = 0; j < kPiece; ++j) total[SUMS ? j : 0] += values[j];
        }
        // The columns of the second half end where the row ends.
        const bool inside = is_inside(row);
        const int first = column + half * part;
        const Output::At to{static_cast<int>(row), first};
        if constexpr (divided) out.put_codes(values, to, first, inside, scales[i]);
        else out.put(values, amax, to, first, inside, scale_of_row);
      }
    }
    if constexpr (!SUMS) break;
    base += step;
    if (base >= rows) break;
    read(base);
  }
  if constexpr (AMAX) {
    largest = largest_of_block(largest);
    if (threadIdx.x == 0) partial[block] = largest;
  }
  if constexpr (SUMS) {
    // Lanes are an odd number of banks apart.
    __shared__ float teams[ROWS][LANES * (kPiece + 1)];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) teams[team][lane * (kPiece + 1) + i] = total[SUMS ? i : 0];
    __syncthreads();
    const int start = (block - share * across) * (LANES * kPiece);
    for (int at = threadIdx.x; at < LANES * kPiece; at += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < ROWS; ++other) sum += teams[other][at + at / kPiece];
      if (start + at < columns && share < shares) {
        sums[static_cast<long long>(share) * columns + start + at] = sum;
      }
    }
  }
  release_dependents();
}

#endif  // KERNEL_cast_rows

#ifdef KERNEL_cast_tiles

constexpr int kSide = 128;
constexpr int kIterations = kSide / ROWS;
// With one scale for all, a code is the same along rows and columns.
constexpr bool kSame = WIDTH == 0;
// The type in which the tile waits in shared memory to be cast along its columns.
#if SOURCE == 0
using Value = TX;
#else
using Value = float;
#endif

static_assert(LANES * kPiece == kSide, "LANES must cover a tile's columns");
static_assert(!STAGED_SCALES || (INSIDE && TRANSPOSED && WIDTH > 0),
              "STAGED_SCALES needs block scales");

// The stored scales of all blocks of one column of the tile, or of one row.
using Inverses = Stored[kSide / (WIDTH > 0 ? WIDTH : 1)];

// Writes the Inverses of all columns or rows of the tile contiguously. `lines` is how many of these
// the matrix has, `line` the tile's first, and `place` how many tiles come before it across them.
__device__ __forceinline__ void store_staged(const Inverses* inverses, Stored* staged, int line,
                                             int lines, int place) {
  if (threadIdx.x < kSide) {
    unsigned char* to = reinterpret_cast<unsigned char*>(staged);
    to += (static_cast<long long>(place) * lines + line + threadIdx.x) * sizeof(Inverses);
    store_bytes<sizeof(Inverses), sizeof(Inverses)>(
        to, reinterpret_cast<const unsigned*>(inverses[threadIdx.x]));
  }
}

// Casts a tile of 128x128 along its rows, or as a square block, and with TRANSPOSED along its
// columns.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    cast_tiles(const TX* __restrict__ x, const TDY* __restrict__ grad,
               const TW* __restrict__ weight, const TB* __restrict__ bias,
               const float* mu, const float* rsigma, const float* scale,
               const int* __restrict__ owner, unsigned char* __restrict__ data,
               Stored* __restrict__ scale_inv,
               float* global_scale_inv, unsigned char* __restrict__ data_t,
               Stored* __restrict__ scale_inv_t, float* __restrict__ partial,
               float* __restrict__ sums, long long x_stride, long long grad_stride, int rows,
               int part, int columns, float limit, float alpha, float epsilon) {
  extern __shared__ __align__(16) unsigned char tile[];
  const Input in{x,        grad,        weight, bias,    mu,    rsigma,
                 x_stride, grad_stride, part,   columns, limit, alpha};
  const Output out{data, scale_inv, columns, epsilon};
  const int across = (columns + kSide - 1) / kSide;
  const int byte_rows = rows / (8 / KIND::kBits);
  const auto [above, before] =
      tile_of(BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x, (rows + kSide - 1) / kSide,
              across, INSIDE || !TRANSPOSED ? 0 : byte_rows);
  const unsigned block = above * across + before;
  const int first_row = above * kSide;
  const int first_column = before * kSide;
  const int lane = threadIdx.x % LANES;
  const int team = threadIdx.x / LANES;
  const int column = first_column + lane * kPiece;
  if constexpr (DEPENDENT && SOURCE == 2) wait_for_predecessor();  // for the statistics

  // Values as stored are kept in registers, so that all reads are in flight at once; computed ones
  // are kept only if the scale of a square block needs all of them.
  constexpr bool kept = SOURCE == 0 || SQUARE;
  Piece pieces[kept ? kIterations : 1];
  int groups[kIterations];
  auto read = [&](int iteration, Piece& piece) {
    const int row = first_row + team + iteration * ROWS;
    groups[iteration] = owner_of(owner, row, rows);
    piece.read<INSIDE>(in, row, column,
                       (INSIDE || row < rows) && (!OWNED || groups[iteration] >= 0));
  };
  float largest = 0.0f;
  if constexpr (kept) {
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration)
      read(iteration, pieces[iteration]);
  }
  float shared = shared_scale(scale, block == 0 && threadIdx.x == 0, scale_inv, scale_inv_t,
                              global_scale_inv);
  if constexpr (SQUARE) {
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      largest = fmaxf(largest, pieces[kept ? iteration : 0].largest(0));
    }
    largest = largest_of_block(largest);
    Stored inverse;
    shared = block_scale<KIND, SCALES, POW2>(largest, 1.0f, epsilon, inverse);
    if (threadIdx.x == 0 && first_row < rows && first_column < columns) {
      scale_inv[block] = inverse;
      if constexpr (TRANSPOSED) {
        const int down = (rows + kSide - 1) / kSide;
        scale_inv_t[static_cast<long long>(before) * down + above] = inverse;
      }
    }
  }
  float total[SUMS ? kPiece : 1] = {};
  __shared__ __align__(8) Inverses of_rows[STAGED_SCALES ? kSide : 1];
#pragma unroll
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Piece& piece = pieces[kept ? iteration : 0];
    if constexpr (!kept) read(iteration, piece);
    const int row = first_row + team + iteration * ROWS;
    float values[kPiece];
    piece.get(0, values);
    float amax = 0.0f;
    if constexpr (AMAX || WIDTH > 0) amax = piece.largest(0);
    if constexpr (AMAX) largest = fmaxf(largest, amax);
    if constexpr (SUMS) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[SUMS ? i : 0] += values[i];
    }
    const float scale_of_row =
        OWNED && groups[iteration] >= 0 && scale ? scale[groups[iteration]] : shared;
    PieceCodes codes;
    const Output::At to{row, column};
    if constexpr (STAGED_SCALES) {
      constexpr int kLanes = WIDTH > kPiece ? WIDTH / kPiece : 1;
      Stored inverse;
      const float scale_of_block = block_scale<KIND, SCALES, POW2>(
          largest_of_lanes<kLanes>(amax), scale_of_row, epsilon, inverse);
      if (lane % kLanes == 0) of_rows[team + iteration * ROWS][lane / kLanes] = inverse;
      codes = out.put_codes<INSIDE>(values, to, column, true, scale_of_block);
    } else {
      codes = out.put<INSIDE>(values, amax, to, column, INSIDE || row < rows, scale_of_row);
    }
    if constexpr (TRANSPOSED) {
      const int place = team + iteration * ROWS;
      if constexpr (kSame) {
        store_bytes<16, 16>(tile + place * kSide + lane * kPiece, codes.words);
      } else {
#if SOURCE == 0
        const Vec<Value, kPiece>& kept_values = piece.stored;
#else
        const Vec<Value, kPiece> kept_values = encode<Value>(values);
#endif
#pragma unroll
        for (int chunk = 0; chunk < static_cast<int>(sizeof(Value)); ++chunk) {
          store_bytes<16, 16>(ValueTile<Value>::chunk(tile, place, lane * sizeof(Value) + chunk),
                              kept_values.words + 4 * chunk);
        }
      }
    }
  }
  if constexpr (AMAX) {
    largest = largest_of_block(largest);
    if (threadIdx.x == 0) partial[block] = largest;
  }
  if constexpr (SUMS) {
    // A warp adds up its four rows; shared memory collects the sums of all warps.
    __shared__ float warps[kThreads / 32][LANES * (kPiece + 1)];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      float sum = total[SUMS ? i : 0];
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (threadIdx.x % 32 < LANES) warps[threadIdx.x / 32][lane * (kPiece + 1) + i] = sum;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kSide; at += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < kThreads / 32; ++other) sum += warps[other][at + at / kPiece];
      if (first_column + at < columns && first_row < rows) {
        sums[static_cast<long long>(above) * columns + first_column + at] = sum;
      }
    }
  }
  if constexpr (TRANSPOSED) {
    __syncthreads();
    if constexpr (STAGED_SCALES) store_staged(of_rows, scale_inv, first_row, rows, before);
    const int first_byte = first_row / (8 / KIND::kBits);
    if constexpr (kSame) {
      transpose_bytes<kThreads>(tile);
      drain_transposed<kThreads, kSide, 2, ALIGNED_T, INSIDE>(tile, data_t, first_column, columns,
                                                              first_byte, byte_rows);
    } else {
      // A thread has 32 rows of two columns.
      constexpr int kRun = 32;
      constexpr int kBlocks = WIDTH < kRun ? kRun / (WIDTH > 0 ? WIDTH : 1) : 1;
      constexpr int kPerColumn = sizeof(Inverses) / sizeof(Stored);
      constexpr int kBlockRows = kRun / kBlocks;
      static_assert(kThreads * 2 * kRun == kSide * kSide, "the threads must cover the tile");
      __shared__ __align__(8) Inverses inverses[kSide];
      const int pair = threadIdx.x % (kSide / 2);
      const int run = threadIdx.x / (kSide / 2);
      float scales[kBlocks][2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        ValueTile<Value>::template largest<kBlockRows>(tile, run * kRun + b * kBlockRows, pair,
                                                       scales[b]);
      }
      if constexpr (WIDTH > kRun) {
        __shared__ float2 runs[kSide / kRun][kSide / 2];
        runs[run][pair] = make_float2(scales[0][0], scales[0][1]);
        __syncthreads();
#pragma unroll
        for (int other = 0; other < kSide / kRun; ++other) {
          scales[0][0] = fmaxf(scales[0][0], runs[other][pair].x);
          scales[0][1] = fmaxf(scales[0][1], runs[other][pair].y);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float all = shared;
        if constexpr (OWNED) {  // the first row of a block decides
          const int group = owner_of(owner, first_row + run * kRun + b * kBlockRows, rows);
          all = group >= 0 && scale ? scale[group] : 1.0f;
        }
        const int at = WIDTH > kRun ? 0 : run * kBlocks + b;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Stored inverse;
          scales[b][j] = block_scale<KIND, SCALES, POW2>(scales[b][j], all, epsilon, inverse);
          if (WIDTH <= kRun || run == 0) inverses[2 * pair + j][at] = inverse;
        }
      }
      Codes<KIND, kRun> codes[2];
      constexpr int each = 32 / KIND::kBits;
#pragma unroll
      for (int word = 0; word < kRun / each; ++word) {
        float parts[2][each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
          float two[2];
          ValueTile<Value>::pair(tile, run * kRun + word * each + i, pair, two);
          parts[0][i] = two[0];
          parts[1][i] = two[1];
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float own = scales[word * each / kBlockRows][j];
          codes[j].words[word] = narrow<KIND>(parts[j], own).words[0];
        }
      }
      __syncthreads();
      constexpr int kBytes = kSide * KIND::kBits / 8;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int chunk = 0; chunk < Codes<KIND, kRun>::kBytes / 16; ++chunk) {
          const int place = run * (Codes<KIND, kRun>::kBytes / 16) + chunk;
          store_bytes<16, 16>(transposed_chunk<kBytes, 1>(tile, 2 * pair + j, place),
                              codes[j].words + 4 * chunk);
        }
      }
      __syncthreads();
      drain_transposed<kThreads, kBytes, 1, ALIGNED_T, INSIDE>(tile, data_t, first_column, columns,
                                                               first_byte, byte_rows);
      constexpr int width = WIDTH > 0 ? WIDTH : 1;
      const int down = (rows + width - 1) / width;
      if constexpr (STAGED_SCALES) {
        store_staged(inverses, scale_inv_t, first_column, columns, above);
      } else if constexpr (INSIDE) {  // the scales of a column by one access of 4 or 8 bytes
        if (threadIdx.x < kSide) {
          Stored* to = scale_inv_t + static_cast<long long>(first_column + threadIdx.x) * down +
                       first_row / width;
          store_bytes<sizeof(Inverses), sizeof(Inverses)>(
              reinterpret_cast<unsigned char*>(to),
              reinterpret_cast<const unsigned*>(inverses[threadIdx.x]));
        }
      } else {
        for (int at = threadIdx.x; at < kSide * kPerColumn; at += kThreads) {
          const int own = first_column + at / kPerColumn;
          const int place = first_row / width + at % kPerColumn;
          if (own < columns && place < down) {
            scale_inv_t[static_cast<long long>(own) * down + place] =
                inverses[at / kPerColumn][at % kPerColumn];
          }
        }
      }
    }
  }
  release_dependents();
}

#endif  // KERNEL_cast_tiles

#ifdef KERNEL_transpose_scales

// Puts the scales that tiles wrote with STAGED_SCALES in order: first those of `rows` rows of
// `across` tiles each, in `blocks` blocks of threads, then those of `columns` columns of `down`
// tiles each.
extern "C" __global__ void __launch_bounds__(256)
    transpose_scales(const WORD* staged, WORD* scale_inv, const WORD* staged_t, WORD* scale_inv_t,
                int rows, int across, int columns, int down, int blocks) {
  wait_for_predecessor();
  int block = blockIdx.x;
  if (block >= blocks) {
    block -= blocks;
    staged = staged_t;
    scale_inv = scale_inv_t;
    rows = columns;
    across = down;
  }
  transpose_numbers<256>(staged, scale_inv, rows, across, rows, block);
  release_dependents();
}

#endif  // KERNEL_transpose_scales

#ifdef KERNEL_amax_tiles

// The amax of AHEAD tiles, which are in flight at once.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    amax_tiles(const TX* __restrict__ x, const TDY* __restrict__ grad,
               const TW* __restrict__ weight, const TB* __restrict__ bias,
               const float* __restrict__ mu, const float* __restrict__ rsigma,
               float* __restrict__ partial, long long x_stride, long long grad_stride, int rows,
               int part, int columns, float limit, float alpha) {
  const Input in{x,        grad,        weight, bias,    mu,    rsigma,
                 x_stride, grad_stride, part,   columns, limit, alpha};
  const unsigned width = BOTH ? part : columns;
  const unsigned across = (width + LANES * kPiece - 1) / (LANES * kPiece);
  const unsigned tiles = across * ((static_cast<unsigned>(rows) + ROWS - 1) / ROWS);
  const int lane = threadIdx.x % LANES;
  const int team = threadIdx.x / LANES;
  Piece pieces[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const unsigned tile = blockIdx.x * AHEAD + i;
    const unsigned above = across ? tile / across : 0;
    const unsigned before = tile - above * across;
    const long long row = static_cast<long long>(above) * ROWS + team;
    pieces[i].read(in, static_cast<int>(row), (before * LANES + lane) * kPiece,
                   tile < tiles && row < rows);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) largest = fmaxf(largest, pieces[i].largest(half));
  }
  release_dependents();
  largest = largest_of_block(largest);
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

#endif  // KERNEL_amax_tiles

#ifdef KERNEL_largest

// The largest of all partial amaxes and, if `scale` is given, the scale that follows from it.
extern "C" __global__ void __launch_bounds__(1024)
    largest(const float* partial, float* __restrict__ amax, float* __restrict__ scale,
            long long count, float most, float epsilon) {
  __shared__ float warps[32];
  release_dependents();
  wait_for_predecessor();
  float value = 0.0f;
#pragma unroll 4
  for (long long at = threadIdx.x; at < count; at += 1024) {
    value = fmaxf(value, __ldcg(partial + at));
  }
  value = largest_of_lanes<32>(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  value = largest_of_lanes<32>(warps[threadIdx.x]);
  if (threadIdx.x == 0) {
    *amax = value;
    if (scale) *scale = scale_of<POW2>(value, most, epsilon);
  }
}

#endif  // KERNEL_largest

#ifdef KERNEL_amax_rows

// The amax of each row, one warp for a row.
extern "C" __global__ void __launch_bounds__(256)
    amax_rows(const TX* __restrict__ x, float* __restrict__ amaxes, long long x_stride, int rows,
              int columns) {
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;  // a whole warp
  const TX* source = x + row * x_stride;
  float largest = 0.0f;
#pragma unroll 4
  for (int column = lane * VEC; column < columns; column += 32 * VEC) {
    float values[VEC];
    decode(load<ACCESS, VEC>(source + column), values);
#pragma unroll
    for (int i = 0; i < VEC; ++i) largest = fmaxf(largest, fabsf(values[i]));
  }
  largest = largest_of_lanes<32>(largest);
  if (lane == 0) amaxes[row] = largest;
}

#endif  // KERNEL_amax_rows

#ifdef KERNEL_own_rows

// For each group, a block: marks the group's rows, and with SCALED writes its amax and scale. Rows
// behind the last group belong to none. No access is out of bounds, whatever the sizes are.
extern "C" __global__ void __launch_bounds__(256)
    own_rows(const TSIZE* __restrict__ sizes, const float* __restrict__ amaxes,
             const float* __restrict__ given, int* __restrict__ owner, float* __restrict__ amax,
             float* __restrict__ scale, float* __restrict__ inverse,
             float* __restrict__ inverse_t, int rows, int groups, int inner, float most,
             float epsilon) {
  __shared__ long long starts[8];
  __shared__ float warps[8];
  const int group = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  long long before = 0;
  for (int other = threadIdx.x; other < group; other += 256) before += sizes[other];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xffffffffu, before, offset);
  }
  if (lane == 0) starts[warp] = before;
  __syncthreads();
  before = 0;
#pragma unroll
  for (int other = 0; other < 8; ++other) before += starts[other];

  const auto within = [&](long long row, long long from) {
    return row < from ? from : row > rows ? rows : row;
  };
  const long long start = within(before * inner, 0);
  const long long end = within((before + sizes[group]) * inner, start);
  float largest = 0.0f;
  for (long long row = start + threadIdx.x; row < end; row += 256) {
    owner[row] = group;
    if constexpr (SCALED) largest = fmaxf(largest, amaxes[row]);
  }
  if (group == groups - 1) {
    for (long long row = end + threadIdx.x; row < rows; row += 256) owner[row] = -1;
  }
  if constexpr (SCALED) {
    largest = largest_of_lanes<32>(largest);
    if (lane == 0) warps[warp] = largest;
    __syncthreads();
    if (warp != 0) return;
    largest = largest_of_lanes<32>(warps[lane % 8]);
    if (lane == 0) {
      const float own = given ? given[group] : scale_of<POW2>(largest, most, epsilon);
      amax[group] = largest;
      scale[group] = own;
      inverse[group] = __frcp_rn(own);
      if (inverse_t) inverse_t[group] = __frcp_rn(own);
    }
  }
}

#endif  // KERNEL_own_rows
