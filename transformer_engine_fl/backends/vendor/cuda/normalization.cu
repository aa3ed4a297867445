// Root mean square and layer normalization, forward and backward.
//
// Compiled at run time, one kernel and one specialisation at a time: the host defines
// KERNEL_<name>, the types and the numbers below, and chooses them in normalization.py.
//
//   TX, TY, TW, TB, TDY  storage types of input, output, gamma, beta, output gradient
//   CENTRED              1 for layer normalization, 0 for root mean square
//   VEC                  elements per vector; divides the number of columns
//   ACCESS               elements that the addresses allow in one access, up to VEC
//   VECS                 vectors of a row that one thread holds
//   LANES                threads of a block that share a row (a power of two)
//   ROWS                 rows that a block works on at once; 1 if LANES is above 32
//   CLUSTER              blocks that share a row
//   STAGES               rows under way from global to shared memory (backward)
//   BLOCKS               blocks that must fit on a multiprocessor (backward)
//
// `forward` and `backward` hold a row in registers. Rows that do not fit are served by
// `forward_wide`, and by `backward_rows` with `backward_columns`, which read them again
// from the L2 cache. `parameters` adds up the partial gradients of gamma and beta.
//
// A row's result depends on its values, H and the types alone, never on the number of
// rows. Nothing is added atomically, so the same call gives the same bits.

#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "row_sum.cuh"

using namespace te_fl;

namespace {

using bfloat16 = __nv_bfloat16;
using float16 = __half;
using float32 = float;
using float64 = double;

#if defined(KERNEL_forward) || defined(KERNEL_backward)

constexpr int kThreads = LANES * ROWS;

// The first column of this thread's vector `v`; columns go round the lanes and then
// round the blocks of the cluster, so that a narrow row leaves all of them equally idle.
__device__ __forceinline__ int first_column(int v, int rank) {
  return ((v * CLUSTER + rank) * LANES + static_cast<int>(threadIdx.x) % LANES) * VEC;
}

// Makes the compiler forget that it has converted these values before. Converting
// again is cheaper than the registers that the converted values would occupy.
template <typename T, int N>
__device__ __forceinline__ void forget(Vec<T, N>& value) {
  if constexpr (sizeof(value) % 4 == 0) {
    unsigned* words = reinterpret_cast<unsigned*>(&value);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(value)) / 4; ++i) asm volatile("" : "+r"(words[i]));
  }
}

#endif

}  // namespace

#ifdef KERNEL_forward

using A = Accumulator<TX>::type;

extern "C" __global__ void __launch_bounds__(kThreads)
    forward(const TX* __restrict__ x, const TW* __restrict__ gamma, const TB* __restrict__ beta,
            TY* __restrict__ y, A* __restrict__ mu, A* __restrict__ rsigma, long long rows,
            long long x_stride, int columns, int zero_centred, double eps) {
  // gamma and beta are asked for before the sums, unless they would crowd out blocks.
  constexpr bool kAhead =
      VECS * VEC * static_cast<int>(sizeof(TW)) <= 64 &&
      (!CENTRED || VECS * VEC * static_cast<int>(sizeof(TB)) <= 64) && LANES <= 512;

  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long step = static_cast<long long>(gridDim.x / CLUSTER) * ROWS;
  const A offset = zero_centred ? 1 : 0;
  RowSum<LANES, CLUSTER, 1, A> sum;

  Vec<TW, VEC> gamma_ahead[kAhead ? VECS : 1];
  Vec<TB, VEC> beta_ahead[kAhead && CENTRED ? VECS : 1];
  bool asked = false;

  for (long long base = static_cast<long long>(blockIdx.x / CLUSTER) * ROWS; base < rows;
       base += step) {
    const long long row = base + threadIdx.x / LANES;
    const bool active = row < rows;
    const TX* source = x + row * x_stride;

    Vec<TX, VEC> held[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first_column(v, rank);
      held[v] = zeros<TX, VEC>();
      if (active && column < columns) held[v] = load_once<ACCESS, VEC>(source + column);
    }
    if constexpr (kAhead) {
      if (!asked) {
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
          const int column = first_column(v, rank);
          if (column < columns) {
            gamma_ahead[v] = load_shared_data<ACCESS, VEC>(gamma + column);
            if constexpr (CENTRED) {
              if (beta) beta_ahead[v] = load_shared_data<ACCESS, VEC>(beta + column);
            }
          }
        }
        asked = true;
      }
    }

    A mean = 0;
    if constexpr (CENTRED) {
      A total[1] = {0};
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        A part = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) part += widen(held[v].at[i]);
        total[0] += part;
      }
      sum(total);
      mean = total[0] / static_cast<A>(columns);
    }

    A squares[1] = {0};
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      if (CENTRED && first_column(v, rank) >= columns) continue;
      A part = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A value = widen(held[v].at[i]) - mean;
        part += value * value;
      }
      squares[0] += part;
    }
    sum(squares);
    const A scale = inverse_sqrt(squares[0] / static_cast<A>(columns) + static_cast<A>(eps));

    if (active && rank == 0 && threadIdx.x % LANES == 0) {
      if constexpr (CENTRED) mu[row] = mean;
      rsigma[row] = scale;
    }
    TY* target = y + row * columns;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first_column(v, rank);
      if (!active || column >= columns) continue;
      Vec<TW, VEC> g;
      Vec<TB, VEC> b;
      if constexpr (kAhead) {
        g = gamma_ahead[v];
        if constexpr (CENTRED) b = beta_ahead[v];
      } else {
        g = load_shared_data<ACCESS, VEC>(gamma + column);
        if constexpr (CENTRED) {
          if (beta) b = load_shared_data<ACCESS, VEC>(beta + column);
        }
      }
      A result[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        result[i] = (static_cast<A>(widen(held[v].at[i])) - mean) * scale *
                    (static_cast<A>(widen(g.at[i])) + offset);
        if constexpr (CENTRED) {
          if (beta) result[i] += static_cast<A>(widen(b.at[i]));
        }
      }
      store(target + column, narrow<TY, VEC>(result));
    }
  }
}

#endif  // KERNEL_forward

#ifdef KERNEL_forward_wide

using A = Accumulator<TX>::type;

// One block per row, any number of columns; the row is read two or three times, all
// but the first from the L2 cache.
extern "C" __global__ void __launch_bounds__(LANES)
    forward_wide(const TX* __restrict__ x, const TW* __restrict__ gamma,
                 const TB* __restrict__ beta, TY* __restrict__ y, A* __restrict__ mu,
                 A* __restrict__ rsigma, long long rows, long long x_stride, int columns,
                 int zero_centred, double eps) {
  const A offset = zero_centred ? 1 : 0;
  const int first = threadIdx.x * VEC;
  RowSum<LANES, 1, 1, A> sum;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const TX* source = x + row * x_stride;
    A mean = 0;
    if constexpr (CENTRED) {
      A total[1] = {0};
#pragma unroll 4
      for (int column = first; column < columns; column += LANES * VEC) {
        const Vec<TX, VEC> value = load_shared_data<ACCESS, VEC>(source + column);
        A part = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) part += widen(value.at[i]);
        total[0] += part;
      }
      sum(total);
      mean = total[0] / static_cast<A>(columns);
    }
    A squares[1] = {0};
#pragma unroll 4
    for (int column = first; column < columns; column += LANES * VEC) {
      const Vec<TX, VEC> value = load_shared_data<ACCESS, VEC>(source + column);
      A part = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A centred = widen(value.at[i]) - mean;
        part += centred * centred;
      }
      squares[0] += part;
    }
    sum(squares);
    const A scale = inverse_sqrt(squares[0] / static_cast<A>(columns) + static_cast<A>(eps));
    if (threadIdx.x == 0) {
      if constexpr (CENTRED) mu[row] = mean;
      rsigma[row] = scale;
    }
    TY* target = y + row * columns;
#pragma unroll 2
    for (int column = first; column < columns; column += LANES * VEC) {
      const Vec<TX, VEC> value = load_shared_data<ACCESS, VEC>(source + column);
      const Vec<TW, VEC> g = load_shared_data<ACCESS, VEC>(gamma + column);
      Vec<TB, VEC> b = zeros<TB, VEC>();
      if (CENTRED && beta) b = load_shared_data<ACCESS, VEC>(beta + column);
      A result[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        result[i] = (static_cast<A>(widen(value.at[i])) - mean) * scale *
                    (static_cast<A>(widen(g.at[i])) + offset);
        if constexpr (CENTRED) result[i] += static_cast<A>(widen(b.at[i]));
      }
      store(target + column, narrow<TY, VEC>(result));
    }
  }
}

#endif  // KERNEL_forward_wide

#ifdef KERNEL_backward

using A = Accumulator<TX>::type;

// This thread's slots for one tensor in the ring of rows under way. A slot is read by
// the thread that filled it, so the ring needs no barrier. Chunks of one vector lie a
// block apart, so that neighbouring threads use neighbouring banks.
template <typename T>
struct Slots {
  static constexpr int kChunk = least(16, VEC * static_cast<int>(sizeof(T)));
  static constexpr int kChunks = VEC * static_cast<int>(sizeof(T)) / kChunk;
  static constexpr int kPiece = least(16, ACCESS * static_cast<int>(sizeof(T)));
  static constexpr int kStageBytes = VECS * kChunks * kChunk * kThreads;

  static __device__ __forceinline__ unsigned char* chunk(unsigned char* stage, int v, int c) {
    return stage + ((v * kChunks + c) * kThreads + static_cast<int>(threadIdx.x)) * kChunk;
  }

  static __device__ __forceinline__ void fill(unsigned char* stage, int v, const T* from,
                                              bool valid) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int at = 0; at < kChunk; at += kPiece) {
        copy_async<kPiece>(chunk(stage, v, c) + at,
                           reinterpret_cast<const char*>(from) + c * kChunk + at, valid);
      }
    }
  }

  static __device__ __forceinline__ Vec<T, VEC> read(unsigned char* stage, int v) {
    struct alignas(kChunk) Chunk {
      char at[kChunk];
    };
    Vec<T, VEC> result;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      reinterpret_cast<Chunk*>(&result)[c] = *reinterpret_cast<const Chunk*>(chunk(stage, v, c));
    }
    return result;
  }
};

// A persistent grid: each group of blocks takes every so-many-th row, keeps the
// gradients of gamma and beta of its rows in registers and writes them once, to
// partial[gamma or beta][group][column]. STAGES rows are under way at any time.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    backward(const TDY* __restrict__ dy, const TX* __restrict__ x, const A* __restrict__ mu,
             const A* __restrict__ rsigma, const TW* __restrict__ gamma, TX* __restrict__ dx,
             A* __restrict__ partial, long long rows, long long dy_stride, long long x_stride,
             int columns, int zero_centred) {
  constexpr int kSums = CENTRED ? 2 : 1;
  constexpr bool kHoldGamma =
      VECS * VEC * static_cast<int>(sizeof(TW)) <= (LANES <= 32 ? 128 : 64) && LANES <= 512;
  constexpr int kStageBytes = Slots<TX>::kStageBytes + Slots<TDY>::kStageBytes;
  extern __shared__ __align__(16) unsigned char ring[];

  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int group = blockIdx.x / CLUSTER;
  const int groups = gridDim.x / CLUSTER;
  const long long step = static_cast<long long>(groups) * ROWS;
  const A offset = zero_centred ? 1 : 0;
  RowSum<LANES, CLUSTER, kSums, A> sum;

  auto ask = [&](long long row, int stage) {
    unsigned char* slots = ring + stage * kStageBytes;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first_column(v, rank);
      const bool valid = row < rows && column < columns;
      const long long at = valid ? row : 0;
      const int from = valid ? column : 0;
      Slots<TX>::fill(slots, v, x + at * x_stride + from, valid);
      Slots<TDY>::fill(slots + Slots<TX>::kStageBytes, v, dy + at * dy_stride + from, valid);
    }
    commit_copies();
  };

  long long row = static_cast<long long>(group) * ROWS + threadIdx.x / LANES;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) ask(row + stage * step, stage);

  Vec<TW, VEC> held_gamma[kHoldGamma ? VECS : 1];
  if constexpr (kHoldGamma) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first_column(v, rank);
      held_gamma[v] = zeros<TW, VEC>();
      if (column < columns) held_gamma[v] = load_shared_data<ACCESS, VEC>(gamma + column);
    }
  }
  A dgamma[VECS][VEC] = {};
  A dbeta[CENTRED ? VECS : 1][VEC] = {};
  A next_scale = row < rows ? rsigma[row] : A(0);
  A next_mean = CENTRED && row < rows ? mu[row] : A(0);

  int stage = 0;
  for (long long base = static_cast<long long>(group) * ROWS; base < rows; base += step) {
    const A scale = next_scale;
    const A mean = next_mean;
    const long long next = row + step;
    next_scale = next < rows ? rsigma[next] : A(0);
    if constexpr (CENTRED) next_mean = next < rows ? mu[next] : A(0);

    wait_copies<STAGES - 1>();
    unsigned char* slots = ring + stage * kStageBytes;
    Vec<TX, VEC> held_x[VECS];
    Vec<TDY, VEC> held_dy[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      held_x[v] = Slots<TX>::read(slots, v);
      held_dy[v] = Slots<TDY>::read(slots + Slots<TX>::kStageBytes, v);
    }

    A sums[kSums] = {};
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      Vec<TW, VEC> g = zeros<TW, VEC>();
      if constexpr (kHoldGamma) {
        g = held_gamma[v];
      } else {
        const int column = first_column(v, rank);
        if (column < columns) g = load_shared_data<ACCESS, VEC>(gamma + column);
      }
      A products = 0;
      A values = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A d = static_cast<A>(widen(held_dy[v].at[i]));
        const A xhat = (static_cast<A>(widen(held_x[v].at[i])) - mean) * scale;
        const A u = d * (static_cast<A>(widen(g.at[i])) + offset);
        products += u * xhat;
        dgamma[v][i] += d * xhat;
        if constexpr (CENTRED) {
          values += u;
          dbeta[v][i] += d;
        }
      }
      sums[0] += products;
      if constexpr (CENTRED) sums[1] += values;
    }
    // The slots have been read: their values are in the sums.
    ask(row + STAGES * step, stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    sum(sums);

    const A product = sums[0] / static_cast<A>(columns);
    const A value = CENTRED ? sums[kSums - 1] / static_cast<A>(columns) : A(0);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first_column(v, rank);
      if (row >= rows || column >= columns) continue;
      forget(held_x[v]);
      forget(held_dy[v]);
      Vec<TW, VEC> g;
      if constexpr (kHoldGamma) {
        g = held_gamma[v];
      } else {
        g = load_shared_data<ACCESS, VEC>(gamma + column);
      }
      A result[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A xhat = (static_cast<A>(widen(held_x[v].at[i])) - mean) * scale;
        const A u = static_cast<A>(widen(held_dy[v].at[i])) *
                    (static_cast<A>(widen(g.at[i])) + offset);
        result[i] = scale * (u - value - xhat * product);
      }
      store(dx + row * columns + column, narrow<TX, VEC>(result));
    }
    row = next;
  }

  release_dependents();
  auto write = [&](const A(&sums)[VECS][VEC], int which) {
    A* target = partial + (static_cast<long long>(which) * groups + group) * columns;
    if constexpr (ROWS == 1) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = first_column(v, rank);
        if (column >= columns) continue;
        Vec<A, VEC> piece;
#pragma unroll
        for (int i = 0; i < VEC; ++i) piece.at[i] = sums[v][i];
        store(target + column, piece);
      }
    } else {
      // Each of the ROWS teams has sums for the same columns; the ring is free by now,
      // and one stage of it is never smaller than these sums.
      constexpr int kColumns = VECS * LANES * VEC;
      static_assert(ROWS * kColumns * static_cast<int>(sizeof(A)) <= kStageBytes, "ring");
      A* teams = reinterpret_cast<A*>(ring);
      __syncthreads();
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          teams[threadIdx.x / LANES * kColumns + first_column(v, 0) + i] = sums[v][i];
        }
      }
      __syncthreads();
      for (int column = threadIdx.x; column < least(columns, kColumns); column += kThreads) {
        A total = 0;
#pragma unroll
        for (int team = 0; team < ROWS; ++team) total += teams[team * kColumns + column];
        target[column] = total;
      }
    }
  };
  wait_copies<0>();
  write(dgamma, 0);
  if constexpr (CENTRED) write(dbeta, 1);
}

#endif  // KERNEL_backward

#ifdef KERNEL_backward_rows

using A = Accumulator<TX>::type;

// dx of rows of any width, one block per row.
extern "C" __global__ void __launch_bounds__(LANES)
    backward_rows(const TDY* __restrict__ dy, const TX* __restrict__ x,
                  const A* __restrict__ mu, const A* __restrict__ rsigma,
                  const TW* __restrict__ gamma, TX* __restrict__ dx, long long rows,
                  long long dy_stride, long long x_stride, int columns, int zero_centred) {
  constexpr int kSums = CENTRED ? 2 : 1;
  const A offset = zero_centred ? 1 : 0;
  const int first = threadIdx.x * VEC;
  RowSum<LANES, 1, kSums, A> sum;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const A scale = rsigma[row];
    const A mean = CENTRED ? mu[row] : A(0);
    auto terms = [&](int column, A(&xhat)[VEC], A(&u)[VEC]) {
      const Vec<TX, VEC> xs = load_shared_data<ACCESS, VEC>(x + row * x_stride + column);
      const Vec<TDY, VEC> ds = load_shared_data<ACCESS, VEC>(dy + row * dy_stride + column);
      const Vec<TW, VEC> gs = load_shared_data<ACCESS, VEC>(gamma + column);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        xhat[i] = (static_cast<A>(widen(xs.at[i])) - mean) * scale;
        u[i] = static_cast<A>(widen(ds.at[i])) * (static_cast<A>(widen(gs.at[i])) + offset);
      }
    };
    A sums[kSums] = {};
#pragma unroll 2
    for (int column = first; column < columns; column += LANES * VEC) {
      A xhat[VEC], u[VEC];
      terms(column, xhat, u);
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
    sum(sums);
    const A product = sums[0] / static_cast<A>(columns);
    const A value = CENTRED ? sums[kSums - 1] / static_cast<A>(columns) : A(0);
    for (int column = first; column < columns; column += LANES * VEC) {
      A xhat[VEC], u[VEC], result[VEC];
      terms(column, xhat, u);
#pragma unroll
      for (int i = 0; i < VEC; ++i) result[i] = scale * (u[i] - value - xhat[i] * product);
      store(dx + row * columns + column, narrow<TX, VEC>(result));
    }
  }
}

#endif  // KERNEL_backward_rows

#ifdef KERNEL_backward_columns

using A = Accumulator<TX>::type;

// Partial gradients of gamma and beta for rows of any width: blockIdx.x chooses the
// columns, blockIdx.y the group of rows.
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
    const Vec<TX, VEC> xs = load_once<ACCESS, VEC>(x + row * x_stride + column);
    const Vec<TDY, VEC> ds = load_once<ACCESS, VEC>(dy + row * dy_stride + column);
    const A scale = rsigma[row];
    const A mean = CENTRED ? mu[row] : A(0);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const A d = static_cast<A>(widen(ds.at[i]));
      dgamma[i] += d * ((static_cast<A>(widen(xs.at[i])) - mean) * scale);
      dbeta[i] += d;
    }
  }
  Vec<A, VEC> piece;
#pragma unroll
  for (int i = 0; i < VEC; ++i) piece.at[i] = dgamma[i];
  store(partial + static_cast<long long>(blockIdx.y) * columns + column, piece);
  if constexpr (CENTRED) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) piece.at[i] = dbeta[i];
    store(partial + (static_cast<long long>(gridDim.y) + blockIdx.y) * columns + column, piece);
  }
}

#endif  // KERNEL_backward_columns

#ifdef KERNEL_parameters

// Here TX only says what the partial sums are, and LANES counts the block's threads.
using A = Accumulator<TX>::type;

// Adds partial[blockIdx.y][group][column] up over the groups. A warp owns 32 * VEC
// columns at a time; the block's warps take turns at the groups.
extern "C" __global__ void __launch_bounds__(LANES)
    parameters(const A* partial, TW* __restrict__ dgamma, TW* __restrict__ dbeta, int groups,
               int columns) {
  constexpr int kWarps = LANES / 32;
  __shared__ Vec<A, VEC> sums[kWarps][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int column = (blockIdx.x * 32 + lane) * VEC;
  const A* source = partial + static_cast<long long>(blockIdx.y) * groups * columns + column;

  Vec<A, VEC> total = zeros<A, VEC>();
  wait_for_predecessor();
  if (column < columns) {
#pragma unroll 8
    for (int group = warp; group < groups; group += kWarps) {
      const Vec<A, VEC> value = load_written<VEC>(source + static_cast<long long>(group) * columns);
#pragma unroll
      for (int i = 0; i < VEC; ++i) total.at[i] += value.at[i];
    }
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) total.at[i] += sums[other][lane].at[i];
  }
  TW* target = blockIdx.y == 0 ? dgamma : dbeta;
  store(target + column, narrow<TW, VEC>(total.at));
}

#endif  // KERNEL_parameters
