// Root mean square and layer normalization, forward and backward.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (normalization.py)
// defines KERNEL_<name> and those of the macros below that the kernel needs.
//
//   TX, TY, TW, TB, TDY  storage types of input, output, gamma, beta, output gradient
//   TADD                 storage type of the gradient that is added to the input's gradient
//   CENTRED              1 for layer normalization, 0 for root mean square
//   ZERO_CENTRED         1 if gamma is stored as gamma - 1
//   BIASED               1 if there is a beta (forward)
//   ADDED                1 if a residual is added before (forward), a gradient after (backward)
//   CAST                 of a forward: 0 to write values, 1 codes, 2 neither (statistics alone)
//   AMAX                 1 to write the amax of each row, or of a group's rows, too (with CAST)
//   KIND, WIDTH, SCALES, POW2   how codes are scaled: see casting.cu
//   VEC                  elements per vector; divides the number of columns
//   ACCESS               elements that the addresses allow in one access, up to VEC
//   VECS                 vectors of a row that belong to one thread
//   LANES                threads of a block that share a row: a power of two, or whole warps where
//                        one block has a row or blocks exchange through memory
//   ROWS                 rows that a block works on at once; 1 if LANES is above 32
//   CLUSTER              blocks that share a row: a cluster, unless they exchange through memory
//   FULL                 1 if the row fills all vectors, so that no column is compared with the
//                        row's end
//   STRIPED              1 if neighbouring lanes have neighbouring columns, for rows of any
//                        alignment: see rows.cuh (forward without CAST, backward)
//   AHEAD                1 to keep gamma and beta in shared memory (forward)
//   SPAN                 neighbouring columns that a thread casts: VEC, or two vectors (forward with
//                        AHEAD, forward_stream)
//   STAGES               rows, or batches, in flight from global to shared memory (backward,
//                        backward_registers, backward_pairs, forward_stream, forward_pieces)
//   EXCHANGE             0 to exchange sums behind a cluster barrier, 1 without one (backward,
//                        forward_stream), 2 through global memory, without a cluster (backward)
//   BATCH                rows that a block processes at a time (backward_registers)
//   LATE_ADD             1 to load the added gradient to registers only when needed (backward)
//   OVERLAP              1 to sum the next row while the sums of one are exchanged (backward)
//   HOLD_GAMMA           1 to keep gamma in registers, not in shared memory, and beta with it
//                        (backward, forward_pieces)
//   SHARED_DBETA         1 to keep dbeta in shared memory, not in registers (backward)
//   BLOCKS               blocks that must fit on a multiprocessor (bounds the registers)
//
// All but three kernels read a row once: `forward`, `forward_stream` and `backward` keep it in
// shared memory, `forward_pieces`, `backward_registers` and `backward_pairs` in registers, and
// prefetch the next rows to shared memory. Rows that do not fit go to `forward_wide`, or to
// `backward_rows` and `backward_columns`, which read them again from L2. sums.cu adds up the
// partial gradients of gamma and beta that backwards write.
//
// `share` is 1 / columns: a division in the kernel would take a call and registers.
//
// A row's result depends on its values, H and the types alone, never on the number of rows. There
// are no atomic additions, so the same call gives the same bits.

#include "casting.cuh"
#include "memory.cuh"
#include "memory_exchange.cuh"
#include "numeric.cuh"
#include "row_reduction.cuh"
#include "rows.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

#if defined(KERNEL_forward) || defined(KERNEL_forward_stream) || defined(KERNEL_forward_pieces) || \
    defined(KERNEL_backward) || defined(KERNEL_backward_registers) || defined(KERNEL_backward_pairs)

#ifdef KERNEL_forward_pieces
constexpr int kTogether = 1;  // a block's columns are contiguous
#else
constexpr int kTogether = CLUSTER;
#endif
using Row = RowTile<VEC, VECS, ACCESS, LANES, ROWS, kTogether, FULL, STRIPED>;
template <typename T>
using Slots = Row::Slots<T>;
#if defined(KERNEL_forward)
static_assert(!STRIPED || CAST == 0, "STRIPED rows cannot be cast");
static_assert(!STRIPED || !AHEAD, "AHEAD would read gamma and beta past their end");
#elif !defined(KERNEL_backward)
static_assert(!STRIPED, "this kernel does not support STRIPED");
#endif

#endif

#ifndef KERNEL_backward_columns

template <int N>
__device__ __forceinline__ void decode_gamma(const Vec<TW, N>& stored, A (&gamma)[N]) {
  decode(stored, gamma);
  if constexpr (ZERO_CENTRED) {
#pragma unroll
    for (int i = 0; i < N; ++i) gamma[i] += 1;
  }
}

#endif

#if defined(KERNEL_forward) || defined(KERNEL_forward_stream) || \
    defined(KERNEL_forward_pieces) || defined(KERNEL_forward_wide)

__device__ __forceinline__ A sum_of(const Vec<TX, VEC>& row) {
  A x[VEC];
  decode(row, x);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum += x[i];
  return sum;
}

// The sum rounded to TX, as it is stored and as the norm sees it.
__device__ __forceinline__ Vec<TX, VEC> sum_with(const Vec<TX, VEC>& row,
                                                 const Vec<TX, VEC>& residual) {
  A x[VEC], r[VEC];
  decode(row, x);
  decode(residual, r);
#pragma unroll
  for (int i = 0; i < VEC; ++i) x[i] += r[i];
  return encode<TX>(x);
}

// The squares around a mean of a vector whose elements are Step columns apart. With Step > 1, only
// of elements in the row, of which `left` columns remain.
template <int Step = 1>
__device__ __forceinline__ A squares_of(const Vec<TX, VEC>& row, A mean, int left = VEC) {
  A x[VEC];
  decode(row, x);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const A off = Step == 1 || i * Step < left ? x[i] - mean : A(0);
    sum += off * off;
  }
  return sum;
}

#ifndef KERNEL_forward_wide

// What is reduced to a row's statistics: the sum of squares, or the values of Moments. If a row
// fills all vectors of a power of two of threads, threads are parts of equal size. Otherwise the
// parts are warps, of any size, whose lanes first sum their values, and then the squares around
// that mean: merging two parts of any size takes several times as long as two sums.
constexpr bool kEqual = CENTRED && FULL && (LANES & (LANES - 1)) == 0;
constexpr bool kOfWarps = CENTRED && !kEqual;
constexpr int kStatistics = !CENTRED ? 1 : kEqual ? 2 : 3;
template <ExchangeMode Mode>
using Statistics = RowReduction<LANES, CLUSTER, kStatistics, A, Mode>;

// The number of columns of the lanes of a warp that share a row.
__device__ __forceinline__ A columns_of_warp(int rank, int columns) {
  constexpr int kLanes = least(LANES, 32);
  if constexpr (FULL) return A(kLanes * VECS * VEC);
  int count = 0;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int first = Row::first_column(v, rank) - lane * (STRIPED ? 1 : VEC);
    count += max(0, min(columns - first, kLanes * VEC));
  }
  return A(count);
}

__device__ __forceinline__ A sum_of_warp(A own) {
  A sum[1] = {own};
  halve<Sum, least(LANES, 32)>(sum);
  return sum[0];
}

// The statistics of a thread's vectors `own(v)`, or of its warp's.
template <typename Own, int K>
__device__ __forceinline__ void own_statistics(Own own, int rank, int columns, A (&found)[K]) {
  constexpr bool kOfThread = K == 2;
  A mean = 0;
  A count = 0;
  A total = 0;
  if constexpr (CENTRED) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) total += sum_of(own(v));  // zeros beyond the columns
    if constexpr (kOfThread) {
      mean = quotient<VECS * VEC>(total);
    } else {
      total = sum_of_warp(total);
      count = columns_of_warp(rank, columns);
      mean = count > 0 ? quotient(total, count, reciprocal(count)) : A(0);
    }
  }
  A squares = 0;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    if (CENTRED && !kOfThread && !Row::in_row(column, columns)) continue;
    squares += squares_of<Row::kStep>(own(v), mean, kOfThread ? VEC : columns - column);
  }
  if constexpr (!CENTRED) {
    found[0] = squares;
  } else if constexpr (kOfThread) {
    found[0] = mean;
    found[1] = squares * (A(1) / A(VECS * VEC));
  } else {
    found[0] = count;
    found[1] = total;
    found[2] = sum_of_warp(squares);
  }
}

// The same of vectors in shared memory. Held: they stay in registers from the mean to the
// deviations.
template <bool Held>
__device__ __forceinline__ void kept_statistics(unsigned char* kept, int rank, int columns,
                                                A (&found)[kStatistics]) {
  if constexpr (Held) {
    Vec<TX, VEC> held[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) held[v] = Slots<TX>::read(kept, v);
    own_statistics([&](int v) { return held[v]; }, rank, columns, found);
  } else {
    own_statistics([&](int v) { return Slots<TX>::read(kept, v); }, rank, columns, found);
  }
}

// The mean and the variance from the reduced statistics.
__device__ __forceinline__ A mean_of(const A (&found)[kStatistics], int columns, A share) {
  if constexpr (!CENTRED) return 0;
  else return kEqual ? found[0] : quotient(found[1], A(columns), share);
}
__device__ __forceinline__ A variance_of(const A (&found)[kStatistics], A share) {
  if constexpr (kEqual) return found[1];
  else return found[kStatistics - 1] * share;
}

#if CENTRED
using Merging = Moments;
#else
using Merging = Sum;
#endif

#endif

template <int N>
__device__ __forceinline__ void normalize(const Vec<TX, N>& row, A mean, A scale,
                                          const Vec<TW, N>& gamma, const Vec<TB, N>& beta,
                                          A (&y)[N]) {
  A x[N], g[N];
  decode(row, x);
  decode_gamma(gamma, g);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = (x[i] - mean) * scale * g[i];
  if constexpr (BIASED) {
    A b[N];
    decode(beta, b);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += b[i];
  }
}

#endif

#if defined(KERNEL_backward) || defined(KERNEL_backward_rows) || \
    defined(KERNEL_backward_registers) || defined(KERNEL_backward_pairs)

constexpr int kSums = CENTRED ? 2 : 1;
#ifdef EXCHANGE
constexpr bool kMemory = EXCHANGE == 2;
constexpr ExchangeMode kExchangeMode =
    kMemory ? kThroughMemory : EXCHANGE ? kByWarps : kBehindBarrier;
#endif

// The terms of one vector's gradients: dy, xhat and u = dy * gamma.
struct Terms {
  A dy[VEC], xhat[VEC], u[VEC];

  Terms() = default;
  __device__ __forceinline__ Terms(const Vec<TX, VEC>& row, const Vec<TDY, VEC>& gradient,
                                   A mean, A scale, const A (&g)[VEC]) {
    A x[VEC];
    decode(row, x);
    decode(gradient, dy);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      xhat[i] = (x[i] - mean) * scale;
      u[i] = dy[i] * g[i];
    }
  }

  // Adds the sums over the row that dx needs: of u * xhat, and of u.
  __device__ __forceinline__ void add_to(A (&sums)[kSums]) const {
    A products = 0;
    A values = 0;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      products += u[i] * xhat[i];
      values += u[i];
    }
    sums[0] += products;
    if constexpr (CENTRED) sums[1] += values;
  }

  // dx = scale * (u - xhat * product - value) + added, where product and value are the means of
  // u * xhat and of u.
  __device__ __forceinline__ Vec<TX, VEC> dx(A scale, A product, A value,
                                             const Vec<TADD, VEC>& added) const {
    A result[VEC];
    product *= scale;
    value *= scale;
#pragma unroll
    for (int i = 0; i < VEC; ++i) result[i] = u[i] * scale - (xhat[i] * product + value);
    if constexpr (ADDED) {
      A more[VEC];
      decode(added, more);
#pragma unroll
      for (int i = 0; i < VEC; ++i) result[i] += more[i];
    }
    return encode<TX>(result);
  }
};

#endif

}  // namespace

#if defined(KERNEL_forward) || defined(KERNEL_forward_stream)

// The parameters of a forward that casts, beside those of all forwards.
#if CAST == 1
using Cast = RowCast<KIND, SCALES, POW2, WIDTH, SPAN,
                     (WIDTH > SPAN ? least(LANES, least(32, WIDTH / SPAN)) : 1), 16, true>;
#define CAST_PARAMETERS                                                                      \
  , const float *all_scale, Cast::Stored *scale_inv, float *global_scale_inv, float *amaxes, \
      float epsilon
#elif CAST == 2
#define CAST_PARAMETERS , float *amaxes
#else
#define CAST_PARAMETERS
#endif

// The neighbouring columns that a thread writes. If a span is wider than a vector, other threads
// have copied part of it to shared memory, where the row lies as in global memory.
constexpr int kSpans = VECS * VEC / SPAN;
using Span = RowTile<SPAN, kSpans, ACCESS, LANES, ROWS, CLUSTER, FULL, STRIPED>;
static_assert(SPAN == VEC || (LANES > 32 && ROWS == 1 && CLUSTER == 1 && VECS * VEC % SPAN == 0),
              "a wider SPAN needs one row per block and a barrier before the store");

#if CAST == 1
// kPlaceKept: the addresses of a thread's spans are offsets from those of its first span, which
// stay in registers: spans are whole blocks apart. With more than 1,024 threads on a multiprocessor
// a thread has 40 registers, too few for that beside a residual or the making of 4-bit codes.
// kCramped: full rows of 4-bit codes are then written with bounds checks too.
constexpr bool kRoomy = Row::kThreads * BLOCKS <= 1024;
constexpr bool kPlaceKept =
    Span::kVectorStride % Cast::kWidth == 0 && (kRoomy || !ADDED && KIND::kBits == 8);
constexpr bool kCramped = !kRoomy && FULL && KIND::kBits == 4;
constexpr bool kInside = FULL && !kCramped;

// The place of span `at`; `first` is that of the thread's first span.
__device__ __forceinline__ auto place_of(const Cast::Place& first, long long row, int at,
                                         int column) {
  if constexpr (kPlaceKept) return first.further(at * Span::kVectorStride);
  else return Cast::At{static_cast<int>(row), column};
}
#else
constexpr bool kCramped = false;
#endif

template <typename T>
__device__ __forceinline__ Vec<T, SPAN> read_span(unsigned char* row, int at) {
  if constexpr (SPAN == VEC) return Slots<T>::read(row, at);
  else return read_chunks<T, SPAN>(row + Span::first_column(at, 0) * sizeof(T), 16);
}

#endif

#ifdef KERNEL_forward

// One set of ROWS rows per block, or per cluster. Many short-lived blocks keep the memory busy:
// while some wait for their sums, others on the multiprocessor load and store.
extern "C" __global__ void __launch_bounds__(Row::kThreads, BLOCKS)
    forward(const TX* __restrict__ x, const TX* __restrict__ residual,
            const TW* __restrict__ gamma, const TB* __restrict__ beta, TY* __restrict__ y,
            TX* __restrict__ sum, A* __restrict__ mu, A* __restrict__ rsigma, long long rows,
            long long x_stride, long long residual_stride, int columns, A share,
            A eps CAST_PARAMETERS) {
  extern __shared__ __align__(16) unsigned char kept[];
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row =
      static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
  const bool active = Row::in_rows(row, rows);
  Statistics<kBehindBarrier> over_row;
  // With many vectors a thread should load gamma and beta early.
  constexpr bool kEarly = CENTRED && LANES * CLUSTER * VECS * VEC > 8192;

  // The row waits in shared memory: it is read from there at each use, and takes no registers
  // between. So more blocks fit, and more rows are in flight.
  const TX* source = x + row * x_stride;
  const TX* added = residual + row * residual_stride;
  const int first = Row::first_column(0, rank);
  const bool last = row >= Row::first_last(rows, ADDED ? min(x_stride, residual_stride) : x_stride);
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    const int copied_columns = Row::in_pieces(columns, last);
    Slots<TX>::fill<kOnce>(kept, v, source + first, active, column, copied_columns);
    if constexpr (ADDED) {
      Slots<TX>::fill<kOnce>(kept + Slots<TX>::kBytes, v, added + first, active, column,
                             copied_columns);
    }
  }
  commit_copies();
  unsigned char* kept_gamma = kept + (1 + ADDED) * Slots<TX>::kBytes;
  unsigned char* kept_beta = kept_gamma + Slots<TW>::kBytes;
  if constexpr (AHEAD) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      Slots<TW>::fill<kReused>(kept_gamma, v, gamma + first, true, column, columns);
      if constexpr (BIASED) {
        Slots<TB>::fill<kReused>(kept_beta, v, beta + first, true, column, columns);
      }
    }
  }
  commit_copies();
  Row::wait<(SPAN == VEC ? 1 : 0)>();
  unsigned char* kept_row = kept + Slots<TX>::begin(source);
#if STRIPED
  if (last && active) {
    const int rest = Row::rest_of(columns, rank);
    Slots<TX>::fill_rest(kept, source, rest);
    if constexpr (ADDED) Slots<TX>::fill_rest(kept + Slots<TX>::kBytes, added, rest);
    Row::release();
  }
#endif

  if constexpr (ADDED) {
    unsigned char* kept_added = kept + Slots<TX>::kBytes + Slots<TX>::begin(added);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      const Vec<TX, VEC> total =
          sum_with(Slots<TX>::read(kept_row, v), Slots<TX>::read(kept_added, v));
      Slots<TX>::write(kept_row, v, total);
      if (active && Row::in_row(column, columns)) {
        Row::put(Row::place<!kCramped>(sum + row * columns, v, rank), total, columns - column);
      }
    }
  }

  A found[kStatistics];
  kept_statistics<false>(kept_row, rank, columns, found);
  over_row.reduce<Merging, kOfWarps>(found);
  const A mean = mean_of(found, columns, share);
  const A scale = inverse_sqrt(variance_of(found, share) + eps);

  Row::wait<0>();
  if (CAST == 0 && !active) return;  // casting, threads exchange values
  if (active && rank == 0 && threadIdx.x % LANES == 0) {
    if constexpr (CENTRED) mu[row] = mean;
    rsigma[row] = scale;
  }
#if CAST == 2 && !AMAX
  return;
#endif
#if CAST == 1
  const Cast cast{y, scale_inv, columns, epsilon};
  float shared = 1.0f;
  if (all_scale) {
    shared = *all_scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      write_inverse<WIDTH == 0>(shared, scale_inv, static_cast<Cast::Stored*>(nullptr),
                                global_scale_inv);
    }
  }
  const Cast::Place place = cast.place({static_cast<int>(row), Span::first_column(0, rank)});
#endif
  A largest[kStatistics] = {};
#pragma unroll
  for (int at = 0; at < kSpans; ++at) {
    const int column = Span::first_column(at, rank);
    const bool inside = active && Row::in_row(column, columns);
    if (CAST == 0 && !inside) continue;
    Vec<TW, SPAN> g = zeros<TW, SPAN>();
    Vec<TB, SPAN> b = zeros<TB, SPAN>();
    if constexpr (AHEAD) {
      g = read_span<TW>(kept_gamma, at);
      if constexpr (BIASED) b = read_span<TB>(kept_beta, at);
    } else if (inside) {
      g = Span::get<kEarly>(gamma + column, columns - column);
      if constexpr (BIASED) b = Span::get<kEarly>(beta + column, columns - column);
    }
    A values[SPAN];
    normalize(read_span<TX>(kept_row, at), mean, scale, g, b, values);
#if CAST == 0
    // The two vectors of a root mean square have an address each: with one for both it took fewer
    // registers, and so more blocks were on a multiprocessor, which was slower.
    constexpr bool kFromFirst = CENTRED || VECS > 2;
    Span::put(Span::place<kFromFirst>(y + row * columns, at, rank), encode<TY>(values),
              columns - column);
#else
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      values[i] = inside ? values[i] : A(0);
      if constexpr (AMAX) largest[0] = fmaxf(largest[0], fabsf(values[i]));
    }
#if CAST == 1
    cast.put<kInside>(values, place_of(place, row, at, column), column, inside, shared);
#endif
#endif
    // Keeps the compiler from moving all stores to the end, for which there are no registers.
    if constexpr (FULL && (CAST == 1 || kEarly)) __syncwarp();
  }
#if CAST != 0
  if constexpr (AMAX) {
    over_row.reduce<Max>(largest);
    if (active && rank == 0 && threadIdx.x % LANES == 0) amaxes[row] = largest[0];
  }
#endif
}

#endif  // KERNEL_forward

#ifdef KERNEL_forward_stream

// A persistent kernel for long rows: each group of blocks loops over rows and keeps gamma, and beta
// if it fits, in registers: for long rows both are too large to be read from L2 with each row.
// STAGES rows are in flight at any time, and while the blocks of a group exchange the statistics of
// one row, they write the row before it.
extern "C" __global__ void __launch_bounds__(Row::kThreads, BLOCKS)
    forward_stream(const TX* __restrict__ x, const TX* __restrict__ residual,
                   const TW* __restrict__ gamma, const TB* __restrict__ beta,
                   TY* __restrict__ y, TX* __restrict__ sum, A* __restrict__ mu,
                   A* __restrict__ rsigma, long long rows, long long x_stride,
                   long long residual_stride, int columns, A share, A eps CAST_PARAMETERS) {
  static_assert(ROWS == 1 && STAGES > 1, "needs one row per block and several stages");
  constexpr int kStageBytes = (1 + ADDED) * Slots<TX>::kBytes;
  // Whether there are registers for beta, too.
  constexpr bool kHoldsBeta = BIASED && VECS * VEC * LANES * BLOCKS <= 16 * 1024;
  extern __shared__ __align__(16) unsigned char ring[];
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long group = blockIdx.x / CLUSTER;
  const long long groups = gridDim.x / CLUSTER;
  // Merging the moments of warps takes long, so layer norms merge them within each block first.
  Statistics<(!EXCHANGE ? kBehindBarrier : CENTRED ? kByBlocks : kByWarps)> over_row;

  const int first = Row::first_column(0, rank);
  auto fetch = [&](long long row, unsigned char* slots) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      const bool exists = row < rows;
      Slots<TX>::fill<kOnce>(slots, v, x + row * x_stride + first, exists, column, columns);
      if constexpr (ADDED) {
        Slots<TX>::fill<kOnce>(slots + Slots<TX>::kBytes, v,
                               residual + row * residual_stride + first, exists, column, columns);
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch(group + stage * groups, ring + stage * kStageBytes);
  }
  Vec<TW, SPAN> own_gamma[kSpans];
  Vec<TB, SPAN> own_beta[kSpans];
#pragma unroll
  for (int at = 0; at < kSpans; ++at) {
    const int column = Span::first_column(at, rank);
    own_gamma[at] = zeros<TW, SPAN>();
    own_beta[at] = zeros<TB, SPAN>();
    if (CAST == 2 && !AMAX) continue;
    if (Row::in_row(column, columns)) {
      own_gamma[at] = load<ACCESS, SPAN>(gamma + column);
      if constexpr (kHoldsBeta) own_beta[at] = load<ACCESS, SPAN>(beta + column);
    }
  }

  // Reads a row in shared memory, adds the residual, and begins the reduction of its statistics.
  A found[kStatistics];
  auto begin = [&](long long row, unsigned char* slots) {
    if constexpr (ADDED) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = Row::first_column(v, rank);
        const Vec<TX, VEC> total =
            sum_with(Slots<TX>::read(slots, v), Slots<TX>::read(slots + Slots<TX>::kBytes, v));
        Slots<TX>::write(slots, v, total);
        if (Row::in_row(column, columns)) store(Row::place(sum + row * columns, v, rank), total);
      }
    }
    kept_statistics<(CENTRED && LANES * BLOCKS <= 512)>(slots, rank, columns, found);
    over_row.begin<Merging, kOfWarps>(found);
  };

#if CAST == 1
  const Cast cast{y, scale_inv, columns, epsilon};
  float shared = 1.0f;
  if (all_scale) {
    shared = *all_scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      write_inverse<WIDTH == 0>(shared, scale_inv, static_cast<Cast::Stored*>(nullptr),
                                global_scale_inv);
    }
  }
#endif
  A largest[kStatistics] = {};
  wait_copies<STAGES - 1>();
  begin(group, ring);
  unsigned char* written = ring;
  int stage = 0;
#pragma unroll 1
  for (long long row = group; row < rows; row += groups) {
    over_row.end<Merging>(found);
    const A mean = mean_of(found, columns, share);
    const A scale = inverse_sqrt(variance_of(found, share) + eps);
    // A row that other threads read too is free once all have passed the barrier of the reduction.
    if (SPAN != VEC && row != group) fetch(row + (STAGES - 1) * groups, written);
    unsigned char* slots = ring + stage * kStageBytes;
    written = slots;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (row + groups < rows) {
      wait_copies<STAGES - 2>();
      begin(row + groups, ring + stage * kStageBytes);
    }
    if (rank == 0 && threadIdx.x == 0) {
      if constexpr (CENTRED) mu[row] = mean;
      rsigma[row] = scale;
    }
#if !(CAST == 2 && !AMAX)
#if CAST == 1
    const Cast::Place place = cast.place({static_cast<int>(row), Span::first_column(0, rank)});
#endif
#pragma unroll
    for (int at = 0; at < kSpans; ++at) {
      const int column = Span::first_column(at, rank);
      const bool inside = Row::in_row(column, columns);
      if (CAST == 0 && !inside) continue;
      A values[SPAN];
      Vec<TB, SPAN> b = own_beta[at];
      if (BIASED && !kHoldsBeta && inside) b = load<ACCESS, SPAN>(beta + column);
      normalize(read_span<TX>(slots, at), mean, scale, own_gamma[at], b, values);
#if CAST == 0
      store(Span::place(y + row * columns, at, rank), encode<TY>(values));
#else
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        values[i] = inside ? values[i] : A(0);
        if constexpr (AMAX) largest[0] = fmaxf(largest[0], fabsf(values[i]));
      }
#if CAST == 1
      cast.put<kInside>(values, place_of(place, row, at, column), column, inside, shared);
#endif
#endif
    }
#endif
    if (SPAN == VEC) fetch(row + STAGES * groups, slots);
  }
#if CAST != 0
  // One amax for all rows of a group, numbered by groups.
  if constexpr (AMAX) {
    over_row.reduce<Max>(largest);
    if (rank == 0 && threadIdx.x == 0) amaxes[group] = largest[0];
  }
#endif
  wait_copies<0>();
}

#endif  // KERNEL_forward_stream

#ifdef KERNEL_forward_pieces

#if CENTRED

// The reduction of a row's statistics over its blocks, in two halves as in RowReduction. A block
// posts the mean of its columns and the sum of squared deviations from it or, if blocks are merged
// pairwise, the mean of squared deviations. The number of a block's columns follows from its rank.
class StatisticsOfRow {
  using Exchange = MemoryExchange<CLUSTER, 2>;
  static constexpr int kColumns = LANES * VECS * VEC;  // of a full block
  static constexpr bool kHalvedBlocks = FULL && (CLUSTER & (CLUSTER - 1)) == 0;

 public:
  __device__ __forceinline__ StatisticsOfRow(FlaggedSlot* exchange_slots, unsigned first_epoch,
                                             unsigned group, int columns)
      : exchange_(exchange_slots, first_epoch, group) {
#pragma unroll
    for (int i = 0; i < Exchange::kPerLane; ++i) {
      const int left = columns - Exchange::block_of(i) * kColumns;
      counts_[i] = A(FULL && Exchange::kAll ? kColumns : max(0, min(left, kColumns)));
    }
  }

  // `left`: the number of columns of the row from the block's first one on.
  __device__ __forceinline__ void begin(const Vec<TX, VEC> (&row)[VECS], int left) {
    auto own = [&](int v) { return row[v]; };
    if (FULL || left >= kColumns) {
      A found[2];
      own_statistics(own, 0, left, found);
      over_filled_.template reduce<Moments>(found);
      exchange_.post({found[0], found[1] * A(kHalvedBlocks ? 1 : kColumns)});
    } else {
      A found[3];
      own_statistics(own, 0, left, found);
      over_block_.template reduce<Moments, true>(found);
      exchange_.post({quotient(found[1], found[0], reciprocal(found[0])), found[2]});
    }
  }

  __device__ __forceinline__ void end(A share, A& mean, A& variance) {
    A parts[Exchange::kPerLane][2];
    exchange_.wait({A(0), A(0)}, parts);
    if constexpr (kHalvedBlocks) {
      A found[2];
      merge_parts<Moments>(parts, found);
      halve<Moments, Exchange::kReducedLanes>(found);
      mean = found[0];
      variance = found[1];
    } else {
      // The mean is computed from distances to one of the blocks' means, which are exactly 0 if the
      // means are equal, whatever the blocks' counts. `nearly` is the mean from these, rounded;
      // `rest`, the mean distance to it, corrects it.
      const A first = __shfl_sync(0xffffffffu, parts[0][0], 0);
      const A close = first - first == A(0) ? first : A(0);  // if not finite, all would be NaN
      A off[1] = {A(0)};
#pragma unroll
      for (int i = 0; i < Exchange::kPerLane; ++i) off[0] += counts_[i] * (parts[i][0] - close);
      halve<Sum, Exchange::kReducedLanes>(off);
      const A nearly = fma(off[0], share, close);
      A sums[2] = {A(0), A(0)};
#pragma unroll
      for (int i = 0; i < Exchange::kPerLane; ++i) {
        const A distance = parts[i][0] - nearly;
        sums[0] += counts_[i] * distance;
        sums[1] += parts[i][1] + counts_[i] * distance * distance;
      }
      halve<Sum, Exchange::kReducedLanes>(sums);
      const A rest = sums[0] * share;
      mean = rest == rest ? nearly + rest : nearly;
      variance = fma(-rest, rest, sums[1] * share);
    }
  }

 private:
  Exchange exchange_;
  RowReduction<LANES, 1, 2, A> over_filled_;
  RowReduction<LANES, 1, 3, A> over_block_;
  A counts_[Exchange::kPerLane];  // columns of the blocks that this lane reads
};

#else

// The same for a root mean square: a block posts its sum of squares.
class StatisticsOfRow {
 public:
  __device__ __forceinline__ StatisticsOfRow(FlaggedSlot* exchange_slots, unsigned first_epoch,
                                             unsigned group, int)
      : over_row_(exchange_slots, first_epoch, group) {}

  __device__ __forceinline__ void begin(const Vec<TX, VEC> (&row)[VECS], int left) {
    own_statistics([&](int v) { return row[v]; }, 0, left, found_);
    over_row_.template begin<Sum>(found_);
  }

  __device__ __forceinline__ void end(A share, A& mean, A& variance) {
    over_row_.template end<Sum>(found_);
    mean = 0;
    variance = found_[0] * share;
  }

 private:
  Statistics<kThroughMemory> over_row_;
  A found_[1];
};

#endif

// As `forward_stream` for groups of blocks that form no cluster, but exchange sums through
// `exchange_slots`: see memory_exchange.cuh. A row, or its sum with the residual, stays in
// registers until the other blocks' slots have arrived. A block's columns are contiguous.
extern "C" __global__ void __launch_bounds__(LANES, BLOCKS)
    forward_pieces(const TX* __restrict__ x, const TX* __restrict__ residual,
                   const TW* __restrict__ gamma, const TB* __restrict__ beta,
                   TY* __restrict__ y, TX* __restrict__ sum, A* __restrict__ mu,
                   A* __restrict__ rsigma, long long rows, long long x_stride,
                   long long residual_stride, int columns, A share, A eps,
                   unsigned long long first_epoch, FlaggedSlot* exchange_slots) {
  static_assert(ROWS == 1 && CAST == 0 && !(CENTRED && ADDED), "unsupported in pieces");
  constexpr int kStageBytes = (1 + ADDED) * Slots<TX>::kBytes;
  extern __shared__ __align__(16) unsigned char ring[];
  using Piece = RowPiece<Row, CLUSTER, VECS>;
  StatisticsOfRow statistics(exchange_slots, static_cast<unsigned>(first_epoch), Piece::group(),
                             columns);
  const Piece piece(columns);
  auto fetch = [&](long long row, unsigned char* slots) {
    const bool exists = row < rows;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      piece.fill<kOnce>(slots, v, x + row * x_stride, exists);
      if constexpr (ADDED) {
        piece.fill<kOnce>(slots + Slots<TX>::kBytes, v, residual + row * residual_stride, exists);
      }
    }
  };
  unsigned char* gamma_slots = ring + STAGES * kStageBytes;
  unsigned char* beta_slots = gamma_slots + Slots<TW>::kBytes;
  Vec<TW, VEC> held_gamma[VECS];
  Vec<TB, VEC> held_beta[VECS];
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    if constexpr (HOLD_GAMMA) {
      const bool valid = piece.has(v);
      held_gamma[v] = zeros<TW, VEC>();
      held_beta[v] = zeros<TB, VEC>();
      if (valid) held_gamma[v] = load<ACCESS, VEC>(piece.place(gamma, v));
      if (BIASED && valid) held_beta[v] = load<ACCESS, VEC>(piece.place(beta, v));
    } else {
      piece.fill<kReused>(gamma_slots, v, gamma, true);
      if constexpr (BIASED) piece.fill<kReused>(beta_slots, v, beta, true);
    }
  }
  auto gamma_of = [&](int v) {
    return HOLD_GAMMA ? held_gamma[v] : Slots<TW>::read(gamma_slots, v);
  };
  auto beta_of = [&](int v) {
    if constexpr (!BIASED) return zeros<TB, VEC>();
    else return HOLD_GAMMA ? held_beta[v] : Slots<TB>::read(beta_slots, v);
  };
  struct Held {
    Vec<TX, VEC> total[VECS];
  };
  // Reads a row to registers, posts its statistics, and stores its sum with the residual.
  auto take = [&](long long row, unsigned char* slots, Held& held) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      held.total[v] = Slots<TX>::read(slots, v);
      if constexpr (ADDED) {
        held.total[v] = sum_with(held.total[v], Slots<TX>::read(slots + Slots<TX>::kBytes, v));
      }
    }
    statistics.begin(held.total, piece.left());
    if constexpr (ADDED) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        if (piece.has(v)) store(piece.place(sum + row * columns, v), held.total[v]);
      }
    }
  };
  auto write = [&](long long row, const Held& held) {
    A mean, variance;
    statistics.end(share, mean, variance);
    const A scale = inverse_sqrt(variance + eps);
    if (Piece::rank() == 0 && threadIdx.x == 0) {
      rsigma[row] = scale;
      if constexpr (CENTRED) mu[row] = mean;
    }
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      if (!piece.has(v)) continue;
      A values[VEC];
      normalize(held.total[v], mean, scale, gamma_of(v), beta_of(v), values);
      store(piece.place(y + row * columns, v), encode<TY>(values));
      // As in `forward`; with a residual there are registers enough.
      if constexpr (FULL && !ADDED) __syncwarp();
    }
  };
  for_each_row<CLUSTER, STAGES, kStageBytes, Held>(ring, rows, fetch, take, write);
}

#endif  // KERNEL_forward_pieces

#ifdef KERNEL_forward_wide

#if CAST == 2
#define CAST_PARAMETERS , float *amaxes
#else
#define CAST_PARAMETERS
#endif

// One block per row, any number of columns. The row is read two or three times, after the first
// time from L2. With a residual the sum is read again, by the threads that wrote it.
extern "C" __global__ void __launch_bounds__(LANES)
    forward_wide(const TX* __restrict__ x, const TX* __restrict__ residual,
                 const TW* __restrict__ gamma, const TB* __restrict__ beta, TY* __restrict__ y,
                 TX* sum, A* __restrict__ mu, A* __restrict__ rsigma, long long rows,
                 long long x_stride, long long residual_stride, int columns, A share,
                 A eps CAST_PARAMETERS) {
  const int first = threadIdx.x * VEC;
  RowReduction<LANES, 1, 1, A> over_row;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const TX* source = x + row * x_stride;
    TX* total_row = sum + row * columns;
    if constexpr (ADDED) {
#pragma unroll 4
      for (int column = first; column < columns; column += LANES * VEC) {
        const TX* other = residual + row * residual_stride;
        store_to_global(total_row + column, sum_with(load<ACCESS, VEC>(source + column),
                                                     load<ACCESS, VEC>(other + column)));
      }
    }
    auto part = [&](int column) {
      if constexpr (ADDED) return load_written<VEC>(total_row + column);
      else return load<ACCESS, VEC>(source + column);
    };
    A mean = 0;
    if constexpr (CENTRED) {
      A total[1] = {0};
#pragma unroll 4
      for (int column = first; column < columns; column += LANES * VEC) {
        total[0] += sum_of(part(column));
      }
      over_row.sum(total);
      mean = quotient(total[0], A(columns), share);
    }
    A squares[1] = {0};
#pragma unroll 4
    for (int column = first; column < columns; column += LANES * VEC) {
      squares[0] += squares_of(part(column), mean);
    }
    over_row.sum(squares);
    const A scale = inverse_sqrt(squares[0] * share + eps);
    if (threadIdx.x == 0) {
      if constexpr (CENTRED) mu[row] = mean;
      rsigma[row] = scale;
    }
#if CAST == 0
    TY* target = y + row * columns;
#pragma unroll 2
    for (int column = first; column < columns; column += LANES * VEC) {
      Vec<TB, VEC> b = zeros<TB, VEC>();
      if constexpr (BIASED) b = load<ACCESS, VEC>(beta + column);
      A values[VEC];
      normalize(part(column), mean, scale, load<ACCESS, VEC>(gamma + column), b,
                values);
      store(target + column, encode<TY>(values));
    }
#endif
  }
}

#endif  // KERNEL_forward_wide

#if defined(KERNEL_backward) || defined(KERNEL_backward_registers) || \
    defined(KERNEL_backward_pairs)

// Pieces of several warps are 1 to 2% slower with the L2 policy.
#if defined(KERNEL_backward) && EXCHANGE == 2
constexpr Reading kReading = LANES == 32 ? kOnce : kPlain;
#else
constexpr Reading kReading = kOnce;
#endif

// A row in shared memory: x, the output's gradient and, if WithAdded, the gradient that is added.
template <bool WithAdded>
struct Operands {
  static constexpr int kGradientAt = Slots<TX>::kBytes;
  static constexpr int kAddedAt = kGradientAt + Slots<TDY>::kBytes;
  static constexpr int kBytes = kAddedAt + (WithAdded ? Slots<TADD>::kBytes : 0);

  static __device__ __forceinline__ void fetch(unsigned char* slots, const TX* x, const TDY* dy,
                                               const TADD* add, bool valid_row, int rank,
                                               int columns) {
    const int first = Row::first_column(0, rank);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      Slots<TX>::fill<kReading>(slots, v, x + first, valid_row, column, columns);
      Slots<TDY>::fill<kReading>(slots + kGradientAt, v, dy + first, valid_row, column, columns);
      if constexpr (WithAdded) {
        Slots<TADD>::fill<kReading>(slots + kAddedAt, v, add + first, valid_row, column, columns);
      }
    }
  }

  // Loads the column of `rest_of` of a last row whose copies have arrived.
  static __device__ __forceinline__ void fetch_rest(unsigned char* slots, const TX* x,
                                                    const TDY* dy, const TADD* add, int column) {
    Slots<TX>::fill_rest(slots, x, column);
    Slots<TDY>::fill_rest(slots + kGradientAt, dy, column);
    if constexpr (WithAdded) Slots<TADD>::fill_rest(slots + kAddedAt, add, column);
  }
};

#if defined(KERNEL_backward_registers) || defined(KERNEL_backward_pairs)

// Loads a thread's gamma; 0 beyond the row.
__device__ __forceinline__ void read_gamma(const TW* __restrict__ gamma, A (&own)[VECS][VEC],
                                           int rank, int columns) {
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    Vec<TW, VEC> stored = zeros<TW, VEC>();
    if (Row::in_row(column, columns)) stored = load<ACCESS, VEC>(gamma + column);
    decode_gamma(stored, own[v]);
  }
}

#endif

// kBranches: threads branch around vectors that are not in the row. A branch keeps the compiler
// from interleaving the work on several vectors. So where only few threads would branch, only the
// stores are predicated; where whole warps have no columns, they should skip the work.
#if defined(KERNEL_backward)
constexpr bool kFewEmpty = EXCHANGE == 2;
#elif defined(KERNEL_backward_registers)
constexpr bool kFewEmpty = BATCH == 1;
#else
constexpr bool kFewEmpty = true;
#endif
constexpr bool kBranches = FULL || STRIPED || !kFewEmpty || Vec<TX, VEC>::kBytes < 16;

// Writes a thread's sums of its columns to its group's partial sums.
__device__ __forceinline__ void write_sums(const A (&sums)[VECS][VEC], A* target, int rank,
                                           int columns) {
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    if (Row::in_row(column, columns)) {
      Row::put(target + column, encode<A>(sums[v]), columns - column);
    }
  }
}

#endif

#ifdef KERNEL_backward

#if EXCHANGE == 2
// The epoch has 64 bits, so that a repeated launch packs it as it packs addresses.
#define EXCHANGE_PARAMETERS , unsigned long long first_epoch, FlaggedSlot *exchange_slots
#define EXCHANGE_ARGUMENTS(group) (exchange_slots, static_cast<unsigned>(first_epoch), group)
#else
#define EXCHANGE_PARAMETERS
#define EXCHANGE_ARGUMENTS(group)
#endif

// A persistent kernel: each group of blocks loops over rows, keeps the gradients of gamma and beta
// over its rows on the chip, and writes them once, to partial[gamma or beta][group][column]. STAGES
// rows are in flight at any time. `exchange_slots`: see memory_exchange.cuh.
extern "C" __global__ void __launch_bounds__(Row::kThreads, BLOCKS)
    backward(const TDY* __restrict__ dy, const TX* __restrict__ x, const TADD* __restrict__ add,
             const A* __restrict__ mu, const A* __restrict__ rsigma, const TW* __restrict__ gamma,
             TX* __restrict__ dx, A* __restrict__ partial, long long rows, long long dy_stride,
             long long x_stride, long long add_stride, int columns, A share EXCHANGE_PARAMETERS) {
  using Kept = Operands<ADDED && !LATE_ADD>;
  constexpr int kStageBytes = Kept::kBytes;
  extern __shared__ __align__(16) unsigned char ring[];

  const int rank = kMemory ? blockIdx.x % CLUSTER : CLUSTER > 1 ? cluster_rank() : 0;
  const int group = blockIdx.x / CLUSTER;
  const int groups = gridDim.x / CLUSTER;
  const long long step = static_cast<long long>(groups) * ROWS;
  RowReduction<LANES, CLUSTER, kSums, A, kExchangeMode> over_row EXCHANGE_ARGUMENTS(group);

  long long stride = min(x_stride, dy_stride);
  if constexpr (ADDED && !LATE_ADD) stride = min(stride, add_stride);
  const long long first_last = Row::first_last(rows, stride);
  auto fetch = [&](long long row, unsigned char* slots) {
    Kept::fetch(slots, x + row * x_stride, dy + row * dy_stride, add + row * add_stride, row < rows,
              rank, Row::in_pieces(columns, row >= first_last));
    commit_copies();
  };

  const long long first_base = static_cast<long long>(group) * ROWS;
  const int team = threadIdx.x / LANES;
  unsigned char* own_gamma = ring + STAGES * kStageBytes;
  Vec<TW, VEC> held_gamma[VECS];  // with HOLD_GAMMA, which frees its place for dbeta
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    if constexpr (HOLD_GAMMA) {
      held_gamma[v] = zeros<TW, VEC>();
      if (Row::in_row(column, columns)) {
        held_gamma[v] = Row::get(gamma + column, columns - column);
      }
    } else {
      Slots<TW>::fill<kReused>(own_gamma, v, gamma + Row::first_column(0, rank), true, column,
                              Row::in_pieces(columns, true));
    }
  }
#if STRIPED
  if constexpr (!HOLD_GAMMA) commit_copies();
#endif
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch(first_base + team + stage * step, ring + stage * kStageBytes);
  }
#if STRIPED
  const int rest = Row::rest_of(columns, rank);
  if constexpr (!HOLD_GAMMA) {
    Row::wait<STAGES>();
    Slots<TW>::fill_rest(own_gamma, gamma, rest);
  }
#endif

  A dgamma[VECS][VEC] = {};
  A dbeta[VECS][VEC] = {};
  unsigned char* own_dbeta = own_gamma;
  using Sums = RowTile<VEC, VECS, VEC, LANES, ROWS, CLUSTER, FULL, false>::Slots<A>;
  if constexpr (CENTRED && SHARED_DBETA) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) Sums::write(own_dbeta, v, zeros<A, VEC>());
  }
  A next_scale = 0;
  A next_mean = 0;
  auto fetch_statistics = [&](long long row) {
    next_scale = row < rows ? rsigma[row] : A(0);
    if constexpr (CENTRED) next_mean = row < rows ? mu[row] : A(0);
  };
  fetch_statistics(first_base + team);

  // The terms of a vector of the row in these slots. The row is read from there once for the sums
  // and again for dx: beside dgamma and dbeta it would not fit into the registers.
  unsigned char* kept_gamma = own_gamma + Slots<TW>::begin(gamma);
  auto terms = [&](unsigned char* slots, long long row, int v, A scale, A mean) {
    unsigned char* of_x = slots + Slots<TX>::begin(x + row * x_stride);
    unsigned char* of_dy = slots + Kept::kGradientAt + Slots<TDY>::begin(dy + row * dy_stride);
    A g[VEC];
    decode_gamma(HOLD_GAMMA ? held_gamma[v] : Slots<TW>::read(kept_gamma, v), g);
    return Terms(Slots<TX>::read(of_x, v), Slots<TDY>::read(of_dy, v), mean, scale, g);
  };
  A sums[kSums];
  auto begin = [&](unsigned char* slots, long long row, A scale, A mean) {
#if STRIPED
    if (row >= first_last && row < rows) {
      Kept::fetch_rest(slots, x + row * x_stride, dy + row * dy_stride, add + row * add_stride,
                     rest);
      Row::release();
    }
#endif
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] = 0;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const Terms part = terms(slots, row, v, scale, mean);
      part.add_to(sums);
#pragma unroll
      for (int i = 0; i < VEC; ++i) dgamma[v][i] += part.dy[i] * part.xhat[i];
      if constexpr (CENTRED && SHARED_DBETA) {
        A dbeta_part[VEC];
        decode(Sums::read(own_dbeta, v), dbeta_part);
#pragma unroll
        for (int i = 0; i < VEC; ++i) dbeta_part[i] += part.dy[i];
        Sums::write(own_dbeta, v, encode<A>(dbeta_part));
      } else if constexpr (CENTRED) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dbeta[v][i] += part.dy[i];
      }
    }
    over_row.template begin<Sum>(sums);
  };

  int stage = 0;
  A scale = next_scale;
  A mean = next_mean;
  if constexpr (OVERLAP) {
    Row::wait<STAGES - 1>();
    fetch_statistics(first_base + team + step);
    begin(ring, first_base + team, scale, mean);
  }
#pragma unroll 1
  for (long long base = first_base; base < rows; base += step) {
    const long long row = base + team;
    unsigned char* slots = ring + stage * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if constexpr (!OVERLAP) {
      scale = next_scale;
      mean = next_mean;
      Row::wait<STAGES - 1>();
      begin(slots, row, scale, mean);
      fetch_statistics(row + step);
    }
    // Loaded while the next row is summed; in shared memory it would take the place of one of the
    // prefetched rows.
    Vec<TADD, VEC> late[VECS];
    if constexpr (ADDED && LATE_ADD) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = Row::first_column(v, rank);
        late[v] = zeros<TADD, VEC>();
        if (!Row::in_rows(row, rows) || !Row::in_row(column, columns)) continue;
        late[v] = Row::get(add + row * add_stride + column, columns - column);
      }
    }
    A product, value;
    auto end = [&] {
      over_row.template end<Sum>(sums);
      product = sums[0] * share;
      value = CENTRED ? sums[kSums - 1] * share : A(0);
    };
    if constexpr (!kMemory) end();
    const A own_scale = scale;
    const A own_mean = mean;
    // From a lambda the compiler schedules the instructions better: layer norms through memory of
    // 131,072 columns and more take 5 % less time.
    auto begin_next = [&] {
      if (OVERLAP && base + step < rows) {
        Row::wait<(OVERLAP ? STAGES - 2 : 0)>();
        scale = next_scale;
        mean = next_mean;
        fetch_statistics(row + 2 * step);
        begin(ring + stage * kStageBytes, row + step, scale, mean);
      }
    };
    begin_next();
    if constexpr (kMemory) end();  // slots take longer to arrive
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      const bool valid = Row::in_rows(row, rows) && Row::in_row(column, columns);
      if (kBranches && !valid) continue;
      Vec<TADD, VEC> added = zeros<TADD, VEC>();
      if constexpr (ADDED && LATE_ADD) added = late[v];
      else if constexpr (ADDED) {
        const int begin = Slots<TADD>::begin(add + row * add_stride);
        added = Slots<TADD>::read(slots + Kept::kAddedAt + begin, v);
      }
      // For full rows the threads of a root mean square have no register for a common address.
      TX* to = Row::place<(CENTRED || !FULL)>(dx + row * columns, v, rank);
      auto result = [&] {
        return terms(slots, row, v, own_scale, own_mean).dx(own_scale, product, value, added);
      };
      if constexpr (STRIPED) {
        Row::put(to, result(), columns - column);
      } else {
        store_where<kBranches>(to, result(), valid);
      }
    }
    Row::release();
    fetch(row + STAGES * step, slots);
  }

  release_dependents();
  wait_copies<0>();
  auto write = [&](const A(&sums)[VECS][VEC], int which) {
    A* target = partial + (static_cast<long long>(which) * groups + group) * columns;
    if constexpr (ROWS == 1) {
      write_sums(sums, target, rank, columns);
    } else {
      // The ROWS teams of a block have sums of the same columns, which are added up in the ring: it
      // is free by now, and a stage of it is never smaller than these sums.
      constexpr int kColumns = VECS * LANES * VEC;
      static_assert(ROWS * kColumns * static_cast<int>(sizeof(A)) <= kStageBytes, "sums too large");
      A* teams = reinterpret_cast<A*>(ring);
      __syncthreads();
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          teams[team * kColumns + Row::first_column(v, 0) + i * Row::kStep] = sums[v][i];
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int column = threadIdx.x; column < least(columns, kColumns); column += Row::kThreads) {
        A total = 0;
#pragma unroll
        for (int other = 0; other < ROWS; ++other) total += teams[other * kColumns + column];
        target[column] = total;
      }
    }
  };
  write(dgamma, 0);
  if constexpr (CENTRED && SHARED_DBETA) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) decode(Sums::read(own_dbeta, v), dbeta[v]);
  }
  if constexpr (CENTRED) write(dbeta, 1);
}

#endif  // KERNEL_backward

#ifdef KERNEL_backward_registers

// As `backward`, but the terms of a row's gradient stay in registers until it is written, so that
// the row's place in shared memory is free before the threads of the row wait for each other.
// Blocks are few, and threads have many registers. A block processes BATCH short rows at a time,
// behind one barrier.
extern "C" __global__ void __launch_bounds__(LANES, BLOCKS)
    backward_registers(const TDY* __restrict__ dy, const TX* __restrict__ x,
                       const TADD* __restrict__ add, const A* __restrict__ mu,
                       const A* __restrict__ rsigma, const TW* __restrict__ gamma,
                       TX* __restrict__ dx, A* __restrict__ partial, long long rows,
                       long long dy_stride, long long x_stride, long long add_stride,
                       int columns, A share) {
  static_assert(ROWS == 1 && CLUSTER == 1, "all threads of a block share each row");
  using Kept = Operands<ADDED>;
  constexpr int kStageBytes = BATCH * Kept::kBytes;
  extern __shared__ __align__(16) unsigned char ring[];
  constexpr int rank = 0;
  const int group = blockIdx.x;
  const int groups = gridDim.x;
  const long long step = static_cast<long long>(groups) * BATCH;
  const long long first_base = static_cast<long long>(group) * BATCH;
  RowReduction<LANES, 1, BATCH * kSums, A> over_rows;

  auto fetch = [&](long long base, unsigned char* slots) {
#pragma unroll
    for (int t = 0; t < BATCH; ++t) {
      const long long row = base + t;
      Kept::fetch(slots + t * Kept::kBytes, x + row * x_stride, dy + row * dy_stride,
                add + row * add_stride, row < rows, rank, columns);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch(first_base + stage * step, ring + stage * kStageBytes);
  }

  A own_gamma[VECS][VEC];
  read_gamma(gamma, own_gamma, rank, columns);
  A dgamma[VECS][VEC] = {};
  A dbeta[VECS][VEC] = {};
  A next_scale[BATCH], next_mean[BATCH];
  auto fetch_statistics = [&](long long base) {
#pragma unroll
    for (int t = 0; t < BATCH; ++t) {
      next_scale[t] = base + t < rows ? rsigma[base + t] : A(0);
      next_mean[t] = CENTRED && base + t < rows ? mu[base + t] : A(0);
    }
  };
  fetch_statistics(first_base);

  int stage = 0;
#pragma unroll 1
  for (long long base = first_base; base < rows; base += step) {
    unsigned char* slots = ring + stage * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    Terms parts[BATCH][VECS];
    Vec<TADD, VEC> added[BATCH][VECS];
    A scale[BATCH];
    A sums[BATCH * kSums] = {};
    wait_copies<STAGES - 1>();
#pragma unroll
    for (int t = 0; t < BATCH; ++t) {
      unsigned char* own = slots + t * Kept::kBytes;
      scale[t] = next_scale[t];
      A found[kSums] = {};
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const Terms part(Slots<TX>::read(own, v), Slots<TDY>::read(own + Kept::kGradientAt, v),
                         next_mean[t], scale[t], own_gamma[v]);
        added[t][v] = zeros<TADD, VEC>();
        if constexpr (ADDED) added[t][v] = Slots<TADD>::read(own + Kept::kAddedAt, v);
        parts[t][v] = part;
        part.add_to(found);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          dgamma[v][i] += part.dy[i] * part.xhat[i];
          if constexpr (CENTRED) dbeta[v][i] += part.dy[i];
        }
      }
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[t * kSums + k] = found[k];
    }
    over_rows.begin<Sum>(sums);
    fetch_statistics(base + step);
    fetch(base + STAGES * step, slots);
    over_rows.end<Sum>(sums);
#pragma unroll
    for (int t = 0; t < BATCH; ++t) {
      const A product = sums[t * kSums] * share;
      const A value = CENTRED ? sums[t * kSums + kSums - 1] * share : A(0);
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = Row::first_column(v, rank);
        const bool valid = (BATCH == 1 || base + t < rows) && Row::in_row(column, columns);
        if (kBranches && !valid) continue;
        store_where<kBranches>(Row::place(dx + (base + t) * columns, v, rank),
                               parts[t][v].dx(scale[t], product, value, added[t][v]), valid);
      }
    }
  }

  release_dependents();
  wait_copies<0>();
  A* target = partial + static_cast<long long>(group) * columns;
  write_sums(dgamma, target, rank, columns);
  if constexpr (CENTRED) {
    write_sums(dbeta, target + static_cast<long long>(groups) * columns, rank, columns);
  }
}

#endif  // KERNEL_backward_registers

#ifdef KERNEL_backward_pairs

// As `backward_registers` for layer norms, one row at a time. The next row's copy starts as soon as
// a row is in registers, from addresses that are advanced from row to row. At the end the two
// blocks of a cluster add up their gradients of gamma and beta, each half of a thread's vectors,
// and write one partial sum: one for each block would be twice as much to write and to read again.
extern "C" __global__ void __launch_bounds__(LANES, BLOCKS)
    backward_pairs(const TDY* __restrict__ dy, const TX* __restrict__ x,
                   const TADD* __restrict__, const A* __restrict__ mu,
                   const A* __restrict__ rsigma, const TW* __restrict__ gamma,
                   TX* __restrict__ dx, A* __restrict__ partial, long long all_rows,
                   long long dy_stride, long long x_stride, long long, int columns, A share) {
  static_assert(ROWS == 1 && CLUSTER == 1, "all threads of a block share each row");
  static_assert(CENTRED && !ADDED, "only for layer norms without an added gradient");
  using Kept = Operands<false>;
  constexpr int kStageBytes = Kept::kBytes;
  extern __shared__ __align__(16) unsigned char ring[];
  constexpr int rank = 0;
  const int block = blockIdx.x;
  const int blocks = gridDim.x;
  const int rows = static_cast<int>(all_rows);  // rows so wide are never more
  RowReduction<LANES, 1, kSums, A> over_row;

  // This thread's address in the next row to copy.
  const int first_column = Row::first_column(0, rank);
  const TX* next_x = x + block * x_stride + first_column;
  const TDY* next_dy = dy + block * dy_stride + first_column;
  auto fetch = [&](int row, unsigned char* slots) {
    const bool exists = row < rows;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      Slots<TX>::fill<kOnce>(slots, v, next_x, exists, column, columns);
      Slots<TDY>::fill<kOnce>(slots + Kept::kGradientAt, v, next_dy, exists, column,
                              columns);
    }
    commit_copies();
    next_x += blocks * x_stride;
    next_dy += blocks * dy_stride;
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch(block + stage * blocks, ring + stage * kStageBytes);
  }

  A own_gamma[VECS][VEC];
  read_gamma(gamma, own_gamma, rank, columns);
  A dgamma[VECS][VEC] = {};
  A dbeta[VECS][VEC] = {};
  A next_scale, next_mean;
  auto fetch_statistics = [&](int row) {
    next_scale = row < rows ? rsigma[row] : A(0);
    next_mean = row < rows ? mu[row] : A(0);
  };
  fetch_statistics(block);

  int stage = 0;
  TX* target = dx + static_cast<long long>(block) * columns + first_column;
#pragma unroll 1
  for (int row = block; row < rows; row += blocks) {
    unsigned char* slots = ring + stage * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    wait_copies<STAGES - 1>();
    const A scale = next_scale;
    Vec<TX, VEC> own_x[VECS];
    Vec<TDY, VEC> own_dy[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      own_x[v] = Slots<TX>::read(slots, v);
      own_dy[v] = Slots<TDY>::read(slots + Kept::kGradientAt, v);
    }
    fetch(row + STAGES * blocks, slots);
    Terms parts[VECS];
    A sums[kSums] = {};
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const Terms part(own_x[v], own_dy[v], next_mean, scale, own_gamma[v]);
      parts[v] = part;
      part.add_to(sums);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        dgamma[v][i] += part.dy[i] * part.xhat[i];
        dbeta[v][i] += part.dy[i];
      }
    }
    over_row.begin<Sum>(sums);
    fetch_statistics(row + blocks);
    over_row.end<Sum>(sums);
    const A product = sums[0] * share;
    const A value = sums[1] * share;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const bool valid = Row::in_row(Row::first_column(v, rank), columns);
      if (kBranches && !valid) continue;
      store_where<kBranches>(target + v * Row::kVectorStride,
                             parts[v].dx(scale, product, value, zeros<TADD, VEC>()), valid);
    }
    target += static_cast<long long>(blocks) * columns;
  }

  release_dependents();
  wait_copies<0>();
  // Each block of the pair gets every other one of a thread's 2 * VECS vectors, gamma's first.
  using Received = A[2][VECS][VEC][LANES];  // the first index: from which block
  static_assert(sizeof(Received) <= STAGES * kStageBytes, "the ring is too small for the parts");
  Received& received = *reinterpret_cast<Received*>(ring);
  const int own = cluster_rank();
  cluster_arrive();
  cluster_wait();  // until neither block uses its ring any more
#pragma unroll
  for (int p = 0; p < 2 * VECS; ++p) {
    const A(&part)[VEC] = p < VECS ? dgamma[p] : dbeta[p - VECS];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      store_remote(&received[own][p / 2][i][threadIdx.x], p % 2, part[i]);
    }
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int p = 2 * k + own;
    const int column = Row::first_column(p % VECS, rank);
    if (!Row::in_row(column, columns)) continue;
    A total[VEC] = {};
#pragma unroll
    for (int other = 0; other < 2; ++other) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) total[i] += received[other][k][i][threadIdx.x];
    }
    const long long at = p / VECS * (blocks / 2) + block / 2;
    store(partial + at * columns + column, encode<A>(total));
  }
}

#endif  // KERNEL_backward_pairs

#ifdef KERNEL_backward_rows

// dx of rows of any width, with one block per row.
extern "C" __global__ void __launch_bounds__(LANES)
    backward_rows(const TDY* __restrict__ dy, const TX* __restrict__ x,
                  const TADD* __restrict__ add, const A* __restrict__ mu,
                  const A* __restrict__ rsigma, const TW* __restrict__ gamma,
                  TX* __restrict__ dx, long long rows, long long dy_stride, long long x_stride,
                  long long add_stride, int columns, A share) {
  const int first = threadIdx.x * VEC;
  RowReduction<LANES, 1, kSums, A> over_row;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const A scale = rsigma[row];
    const A mean = CENTRED ? mu[row] : A(0);
    auto terms = [&](int column) {
      A g[VEC];
      decode_gamma(load<ACCESS, VEC>(gamma + column), g);
      return Terms(load<ACCESS, VEC>(x + row * x_stride + column),
                   load<ACCESS, VEC>(dy + row * dy_stride + column), mean, scale, g);
    };
    A sums[kSums] = {};
#pragma unroll 2
    for (int column = first; column < columns; column += LANES * VEC) terms(column).add_to(sums);
    over_row.sum(sums);
    const A product = sums[0] * share;
    const A value = CENTRED ? sums[kSums - 1] * share : A(0);
    for (int column = first; column < columns; column += LANES * VEC) {
      Vec<TADD, VEC> added = zeros<TADD, VEC>();
      if constexpr (ADDED) added = load<ACCESS, VEC>(add + row * add_stride + column);
      store(dx + row * columns + column, terms(column).dx(scale, product, value, added));
    }
  }
}

#endif  // KERNEL_backward_rows

#ifdef KERNEL_backward_columns

// Partial gradients of gamma and beta for rows of any width: blockIdx.x selects the columns,
// blockIdx.y the group of rows.
extern "C" __global__ void __launch_bounds__(LANES)
    backward_columns(const TDY* __restrict__ dy, const TX* __restrict__ x,
                     const A* __restrict__ mu, const A* __restrict__ rsigma,
                     A* __restrict__ partial, long long rows, long long dy_stride,
                     long long x_stride, int columns) {
  const int column = (blockIdx.x * LANES + threadIdx.x) * VEC;
  if (column >= columns) return;
  A dgamma[VEC] = {};
  A dbeta[VEC] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    A values[VEC], gradients[VEC];
    decode(load<ACCESS, VEC>(x + row * x_stride + column), values);
    decode(load<ACCESS, VEC>(dy + row * dy_stride + column), gradients);
    const A scale = rsigma[row];
    const A mean = CENTRED ? mu[row] : A(0);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      dgamma[i] += gradients[i] * ((values[i] - mean) * scale);
      dbeta[i] += gradients[i];
    }
  }
  A* target = partial + static_cast<long long>(blockIdx.y) * columns + column;
  store(target, encode<A>(dgamma));
  if constexpr (CENTRED) {
    store(target + static_cast<long long>(gridDim.y) * columns, encode<A>(dbeta));
  }
}

#endif  // KERNEL_backward_columns
