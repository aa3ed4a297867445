// Scaled softmax over rows, forward and backward: plain, masked, and causal. A forward with LOSS
// writes cross entropy instead, and the gradients of its logits: the softmax minus one at the
// target, times a factor for each row.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (softmax.py) defines
// KERNEL_<name> and those of the macros below that the kernel needs.
//
//   TX, TDY      storage types of the scores (backward: the output), and of the output's gradient
//   TY           storage type of the result; forward of rows that are read once
//   CAUSAL       1 if query i sees the keys up to i + ahead - 1
//   MASKED       1 if there is a mask: bytes, not 0 where a key is hidden
//   MASK_STEP    bytes between the mask's columns, 0 or 1
//   MASK_ACCESS  1 if VEC bytes of the mask may be read at once
//   LOSS         1 if there are targets; forward, without a mask, not causal
//   VEC, ACCESS  elements per vector, and in one access
//   VECS, LANES, ROWS, CLUSTER, FULL, STRIPED  how a row is spread over threads: see rows.cuh
//   LOOPED       1 if a group of threads loops over rows; forward
//   IN_SHARED_MEMORY  1 if a row is in shared memory until its sum is complete, not in registers;
//                forward
//   IN_REGISTERS 1 if a thread keeps its last vectors in registers; backward
//   STAGES       rows in flight to shared memory, where a group of threads or of blocks loops over
//                rows
//   BLOCKS       blocks that must fit on a multiprocessor (bounds the registers)
//
// `forward` and `backward` read a row once, and so do `forward_pieces` and `backward_pieces`, whose
// blocks exchange sums through memory. Rows that do not fit go to `forward_wide` and
// `backward_wide`, which read them twice. Scores that a causal form hides are not read.
//
// Row r is query r % queries, with a mask of head (r / queries) % heads. A row's result
// depends on its values, its width and the types alone, never on the number of rows.

#include "cluster_exchange.cuh"
#include "cross_entropy.cuh"
#include "memory.cuh"
#include "memory_exchange.cuh"
#include "numeric.cuh"
#include "row_reduction.cuh"
#include "rows.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

#if defined(KERNEL_forward_pieces) || defined(KERNEL_backward_pieces)
#define IN_PIECES
#endif

#if defined(KERNEL_forward) || defined(KERNEL_backward) || defined(IN_PIECES)

#ifdef IN_PIECES
constexpr int kTogether = 1;  // a block's columns are contiguous
#else
constexpr int kTogether = CLUSTER;
#endif
using Row = RowTile<VEC, VECS, ACCESS, LANES, ROWS, kTogether, FULL, STRIPED>;
template <typename T>
using Slots = Row::Slots<T>;
constexpr int kStep = Row::kStep;  // columns between the elements of a vector

#else

constexpr int kStep = 1;

#endif

// How many keys a row's query sees by the causal rule.
__device__ __forceinline__ int bound_of(long long row, int columns, int queries, int ahead) {
  if constexpr (!CAUSAL) return columns;
  const int query = static_cast<int>(static_cast<unsigned>(row) % static_cast<unsigned>(queries));
  return least(query + ahead, columns);
}

#if defined(KERNEL_forward) || defined(KERNEL_backward)

// How many columns of a row are copied. Of a causal row each thread copies only vectors that begin
// before its bound; a striped row is copied by whole warps, so it ends at the bound.
__device__ __forceinline__ int needed_columns(int bound, int columns) {
  return CAUSAL && STRIPED ? bound : columns;
}

#endif

#ifdef IN_PIECES

// What a block has of plain rows of half precision, of which CLUSTER blocks have each. They are no
// cluster but exchange what they know of a row through memory, in slots as
// memory_exchange.cuh has them.
static_assert(ROWS == 1 && !CAUSAL && !STRIPED && sizeof(TX) == 2, "unsupported in pieces");
using Piece = RowPiece<Row, CLUSTER, VECS>;

// Fetches a thread's part of a row, if that exists.
template <typename T>
__device__ __forceinline__ void fetch_row(const Piece& piece, unsigned char* slots, const T* row,
                                          bool exists) {
#pragma unroll
  for (int v = 0; v < VECS; ++v) piece.fill<kOnce>(slots, v, row, exists);
}

#endif

#if defined(KERNEL_forward) || defined(KERNEL_forward_pieces) || defined(KERNEL_forward_wide)

// Whether rows may have no visible score.
constexpr bool kHiding = CAUSAL || MASKED || LOSS;

// A mask over the scores: its bytes, and its strides over batches, heads and queries.
struct Mask {
  const unsigned char* bytes;
  long long batch, head, query;

  __device__ __forceinline__ const unsigned char* row_of(long long row, int queries,
                                                         int heads) const {
    if constexpr (!MASKED) return nullptr;
    const unsigned at = static_cast<unsigned>(row);
    const unsigned group = at / static_cast<unsigned>(queries);
    const unsigned of = group / static_cast<unsigned>(heads);
    return bytes + of * batch + (group - of * heads) * head +
           (at - group * static_cast<unsigned>(queries)) * query;
  }
};

constexpr int kMaskBytes = VEC > 1 ? VEC : 2;  // a Vec has at least two
using Hidden = Vec<unsigned char, kMaskBytes>;

// The mask's bytes of one vector.
__device__ __forceinline__ Hidden hidden_at(const unsigned char* mask_row, int column,
                                            int columns) {
  Hidden result = zeros<unsigned char, kMaskBytes>();
  if constexpr (MASKED) {
    if constexpr (MASK_ACCESS && VEC > 1 && kStep == 1) {
      result = load<kMaskBytes, kMaskBytes>(mask_row + column);
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const int at = kStep > 1 ? least(column + i * kStep, columns - 1) : column + i;
        const unsigned byte = __ldg(mask_row + at * MASK_STEP);
        result.words[i / 4] |= static_cast<Hidden::Word>(byte << i % 4 * 8);
      }
    }
  }
  return result;
}

// The scores of one vector; lowest() where hidden.
__device__ __forceinline__ void scores_of(const Vec<TX, VEC>& stored, const Hidden& hidden,
                                          int column, int bound, A scale, A (&scores)[VEC]) {
  decode(stored, scores);
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    // If it were fused with the subtraction that follows, the largest would not give exactly 0.
    scores[i] = product(scores[i], scale);
    if constexpr (CAUSAL || kStep > 1) {
      scores[i] = column + i * kStep < bound ? scores[i] : lowest<A>();
    }
    if constexpr (MASKED) {
      scores[i] = hidden.words[i / 4] >> i % 4 * 8 & 0xff ? lowest<A>() : scores[i];
    }
  }
}

__device__ __forceinline__ A largest(const A (&values)[VEC], A so_far) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) so_far = Max::combine(so_far, values[i]);
  return so_far;
}

// Adds the weights of scores to `total` (online softmax): `before` is the maximum that was
// subtracted so far, `above` the maximum of all scores.
__device__ __forceinline__ void add_up(const A (&scores)[VEC], A before, A above, A& total) {
  const A shift = softmax_shift(above);
  total *= exponential(before - shift);
#pragma unroll
  for (int i = 0; i < VEC; ++i) total += exponential(scores[i] - shift);
}

// The value to subtract from the scores; 0 if none is visible.
__device__ __forceinline__ A row_shift(A highest) {
  return kHiding ? softmax_shift(highest) : highest;
}

__device__ __forceinline__ A share_of(A total) {
  return reciprocal(kHiding && total == A(0) ? A(1) : total);
}

// Merges the parts of a row's softmax that Lanes lanes hold, each (highest score, sum of
// exponentials with that subtracted). Gives the sum of all and returns the value subtracted in it.
template <int Lanes, int N>
__device__ __forceinline__ A merge_softmax_parts(const A (&parts)[N][2], A (&total)[1]) {
  A highest[1] = {lowest<A>()};
#pragma unroll
  for (const auto& one : parts) highest[0] = Max::combine(highest[0], one[0]);
  halve<Max, Lanes>(highest);
  const A shift = softmax_shift(highest[0]);
  total[0] = 0;
#pragma unroll
  for (const auto& one : parts) total[0] += one[1] * exponential(one[0] - shift);
  halve<Sum, Lanes>(total);
  return shift;
}

// The factor with which the weights of a row enter its gradients; `shift` was subtracted from their
// scores. `column` is that of the target, or -1.
__device__ __forceinline__ A share_of_gradients(A grad_loss, A total, A shift, int column,
                                                double z_loss) {
  const A z = static_cast<A>(2 * z_loss);
  if (z != A(0)) grad_loss += z * (shift + log(total)) * grad_loss;
  return (column < 0 ? quiet_nan<A>() : grad_loss) / total;
}

#else

// One vector of dx = scale * y * (dy - along), with -0 turned into 0.
__device__ __forceinline__ Vec<TX, VEC> gradient(const Vec<TX, VEC>& output,
                                                 const Vec<TDY, VEC>& output_grad, A along,
                                                 A scale) {
  A y[VEC], dy[VEC];
  decode(output, y);
  decode(output_grad, dy);
#pragma unroll
  for (int i = 0; i < VEC; ++i) y[i] = y[i] * (dy[i] - along) * scale + A(0);
  return encode<TX>(y);
}

__device__ __forceinline__ A products_of(const Vec<TX, VEC>& output,
                                         const Vec<TDY, VEC>& output_grad) {
  A y[VEC], dy[VEC];
  decode(output, y);
  decode(output_grad, dy);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum += y[i] * dy[i];
  return sum;
}

#endif

}  // namespace

#ifdef KERNEL_forward

extern "C" __global__ void __launch_bounds__(Row::kThreads, BLOCKS)
    forward(const TX* __restrict__ x, const unsigned char* __restrict__ mask,
            TY* __restrict__ y, long long rows, long long x_stride, int columns, int queries,
            int heads, int ahead, long long mask_batch, long long mask_head,
            long long mask_query, double factor
#if LOSS
            ,
            const long long* __restrict__ targets, const A* __restrict__ grad_losses,
            A* __restrict__ loss, A* __restrict__ lse, long long ignore, double z_loss
#endif
    ) {
  extern __shared__ __align__(16) unsigned char kept[];
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const unsigned count = static_cast<unsigned>(rows);
  const unsigned step = gridDim.x / CLUSTER * ROWS;
  const A scale = static_cast<A>(factor);
  const Mask hiding = {mask, mask_batch, mask_head, mask_query};
  // Over the threads that subtract the same maximum: those of a row, or in a cluster of a warp.
  RowReduction<(CLUSTER > 1 ? 32 : LANES), 1, 1, A> over_near;
  constexpr int kWarps = LANES > 32 ? LANES / 32 : 1;
  ClusterExchange<kWarps, CLUSTER, 2, A> exchange;
  static_assert(!IN_SHARED_MEMORY || !LOOPED, "slots are in use until the row is written");

  const unsigned first_last = Row::first_last(count, x_stride);
  auto fetch_row = [&](unsigned row, unsigned char* slots) {
    const bool exists = row < count;
    const int bound = bound_of(row, columns, queries, ahead);
    const TX* source = x + (row * x_stride + Row::first_column(0, rank));
    const int copied_columns = Row::in_pieces(needed_columns(bound, columns), row >= first_last);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      Slots<TX>::fill<kOnce>(slots, v, source, exists, column, copied_columns,
                             !CAUSAL || column < bound);
    }
    commit_copies();
  };
  // All threads of a block take the same path, also those without a row.
  unsigned first = blockIdx.x / CLUSTER * ROWS;
  const unsigned own = threadIdx.x / LANES;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch_row(first + own + stage * step, kept + stage * Slots<TX>::kBytes);
  }
  int stage = 0;
#pragma unroll 1
  for (; first < count; first = LOOPED ? first + step : count) {
    const unsigned row = first + own;
    const bool active = ROWS == 1 || row < count;
    const int bound = bound_of(row, columns, queries, ahead);
    unsigned char* slots = kept + stage * Slots<TX>::kBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    const unsigned char* mask_row = hiding.row_of(row, queries, heads);
    Hidden hidden[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      hidden[v] = zeros<unsigned char, kMaskBytes>();
      if (MASKED && active && Row::in_row(column, columns)) {
        hidden[v] = hidden_at(mask_row, column, columns);
      }
    }
#if LOSS
    const long long target = active ? __ldg(targets + row) : ignore;
    const A grad_loss = active ? __ldg(grad_losses + row) : A(0);
    const int word = target >= 0 && target < columns ? static_cast<int>(target) : -1;
#endif
    Row::wait<STAGES - 1>();
    unsigned char* own_slots = slots + Slots<TX>::begin(x + row * x_stride);
#if STRIPED
    if (row >= first_last && row < count) {
      const int rest = Row::rest_of(needed_columns(bound, columns), rank);
      Slots<TX>::fill_rest(slots, x + row * x_stride, rest);
      Row::release();
    }
#endif

    A weights[IN_SHARED_MEMORY ? 1 : VECS][VEC];
    A highest[1] = {lowest<A>()};
    A total[1] = {0};
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      if (!Row::in_row(column, columns)) continue;
      A(&scores)[VEC] = weights[IN_SHARED_MEMORY ? 0 : v];
      scores_of(Slots<TX>::read(own_slots, v), hidden[v], column, bound, scale, scores);
      const A above = largest(scores, highest[0]);
      // Each thread subtracts the largest of its own scores so far.
      if constexpr (IN_SHARED_MEMORY) add_up(scores, highest[0], above, total[0]);
      highest[0] = above;
    }
    // The row is in registers: its slots are free.
    if constexpr (LOOPED) {
      Row::release();
      fetch_row(row + STAGES * step, slots);
    }
    const A own_highest = highest[0];
    over_near.max(highest);
    // A warp of a cluster may have no visible score of its row.
    const A shift = CLUSTER > 1 ? softmax_shift(highest[0]) : row_shift(highest[0]);

    if constexpr (IN_SHARED_MEMORY) {
      total[0] *= exponential(own_highest - shift);
    } else {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = Row::first_column(v, rank);
        if (!Row::in_row(column, columns)) continue;
        const bool visible = !CAUSAL || column < bound;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          weights[v][i] = visible ? exponential(weights[v][i] - shift) : A(0);
          total[0] += weights[v][i];
        }
      }
    }
    over_near.sum(total);
    A share = 1;
    A shift_of_row = shift;
    if constexpr (CLUSTER > 1) {
      A all[decltype(exchange)::kOwn][2];
      exchange({highest[0], total[0]}, all);
      // With fewer than 32 warps several lanes have the same part, which must count once.
      shift_of_row = merge_softmax_parts<least(32, kWarps * CLUSTER)>(all, total);
      share = exponential(highest[0] - shift_of_row);
    }
#if LOSS
    share *= share_of_gradients(grad_loss, total[0], shift_of_row, word, z_loss);
#else
    share *= share_of(total[0]);
#endif

    if (!active) continue;
    TY* out = y + (static_cast<long long>(row) * columns + Row::first_column(0, rank));
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = Row::first_column(v, rank);
      if (!Row::in_row(column, columns)) continue;
      A(&scores)[VEC] = weights[IN_SHARED_MEMORY ? 0 : v];
      if constexpr (IN_SHARED_MEMORY) {
        scores_of(Slots<TX>::read(own_slots, v), hidden[v], column, bound, scale, scores);
#pragma unroll
        for (int i = 0; i < VEC; ++i) scores[i] = exponential(scores[i] - shift);
      }
#pragma unroll
      for (int i = 0; i < VEC; ++i) scores[i] *= share;
      Row::put(out + v * Row::kVectorStride, encode<TY>(scores), columns - column);
    }
#if LOSS
    // The target's gradient, or an ignored row, is corrected by a second store of the same thread,
    // so that other threads need not compare their columns.
    const bool ignored = target == ignore;
    if (ignored) {  // 0 whatever its logits are
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = Row::first_column(v, rank);
        if (Row::in_row(column, columns)) {
          Row::put(out + v * Row::kVectorStride, zeros<TY, VEC>(), columns - column);
        }
      }
    }
    const int from = word - Row::first_column(0, rank);
    const bool owns = word >= 0 && from >= 0 && from % Row::kVectorStride < VEC * kStep &&
                      (kStep == 1 || from % Row::kVectorStride % kStep == 0);
    if (word >= 0 ? owns : rank == 0 && threadIdx.x % LANES == 0) {
      A score[1] = {A(0)};
      if (word >= 0) {
        decode(load<1, 1>(x + (row * x_stride + word)), score);
        score[0] = product(score[0], scale);
        if (!ignored) {
          const A own_gradient[1] = {exponential(score[0] - shift) * share - grad_loss};
          store(out + from, encode<TY>(own_gradient));
        }
      }
      store_loss<false>(loss + row, lse + row, target, ignored,
                        Statistics<A>{shift_of_row, total[0], score[0], A(0)}, columns, 0.0, 0.0,
                        z_loss);
    }
#endif
  }
  wait_copies<0>();
}

#endif  // KERNEL_forward

#ifdef KERNEL_forward_pieces

// The largest, or the least, of a thread's values of a row.
template <bool Least>
__device__ __forceinline__ A extreme_of(const Vec<TX, VEC> (&row)[VECS], const Piece& piece) {
  constexpr unsigned kInfinite = kIsBFloat<TX> ? 0x7f807f80u : 0x7c007c00u;
  constexpr unsigned kNone = Least ? kInfinite : kInfinite | 0x80008000u;
  Vec<TX, 2> found;
  found.words[0] = kNone;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const bool inside = piece.has(v);
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) {
      const unsigned pair = inside ? row[v].words[i] : kNone;
      found.words[0] = extreme_halves<kIsBFloat<TX>, Least>(found.words[0], pair);
    }
  }
  A both[2];
  decode(found, both);
  return Least ? fminf(both[0], both[1]) : fmaxf(both[0], both[1]);
}

// The exponentials of a row are kept until the slots of the other blocks have arrived.
extern "C" __global__ void __launch_bounds__(LANES, BLOCKS)
    forward_pieces(const TX* __restrict__ x, const unsigned char* __restrict__,
                   TY* __restrict__ y, long long rows, long long x_stride, int columns, int, int,
                   int, long long, long long, long long, double factor,
                   unsigned long long first_epoch, FlaggedSlot* exchange_slots) {
  static_assert(!kHiding, "only for plain rows");
  const A scale = static_cast<A>(factor);
  using Exchange = MemoryExchange<CLUSTER, 2>;
  Exchange exchange(exchange_slots, static_cast<unsigned>(first_epoch), Piece::group());
  RowReduction<LANES, 1, 1, A> over_block;
  extern __shared__ __align__(16) unsigned char ring[];
  const Piece piece(columns);
  const unsigned count = static_cast<unsigned>(rows);
  struct Held {
    A weights[VECS][VEC];
    A highest;  // of the block's scores; subtracted in the weights
  };
  auto fetch = [&](unsigned row, unsigned char* slots) {
    fetch_row(piece, slots, x + row * x_stride, row < count);
  };
  auto take = [&](unsigned, unsigned char* slots, Held& held) {
    Vec<TX, VEC> stored[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) stored[v] = Slots<TX>::read(slots, v);
    // Rounding keeps the order of products: that of the largest number is the largest.
    const A extreme =
        scale < A(0) ? extreme_of<true>(stored, piece) : extreme_of<false>(stored, piece);
    A highest[1] = {Max::combine(lowest<A>(), product(extreme, scale))};
    over_block.max(highest);
    held.highest = highest[0];
    const A shift = softmax_shift(highest[0]);
    A total[1] = {0};
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      A scores[VEC];
      decode(stored[v], scores);
      const A off = piece.has(v) ? shift : -lowest<A>();
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        held.weights[v][i] = exponential(product(scores[i], scale) - off);
        total[0] += held.weights[v][i];
      }
    }
    over_block.sum(total);
    exchange.post({highest[0], total[0]});
  };
  auto write = [&](unsigned row, const Held& held) {
    A parts[Exchange::kPerLane][2];
    exchange.wait({lowest<A>(), A(0)}, parts);
    A total[1];
    const A shift = merge_softmax_parts<Exchange::kReducedLanes>(parts, total);
    const A share = exponential(held.highest - shift) * share_of(total[0]);
    TY* out = y + static_cast<long long>(row) * columns;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      if (!piece.has(v)) continue;
      A values[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) values[i] = held.weights[v][i] * share;
      store(piece.place(out, v), encode<TY>(values));
    }
  };
  for_each_row<CLUSTER, STAGES, Slots<TX>::kBytes, Held>(ring, count, fetch, take, write);
}

#endif  // KERNEL_forward_pieces

#ifdef KERNEL_forward_wide

// One block per row, with any number of columns.
extern "C" __global__ void __launch_bounds__(LANES)
    forward_wide(const TX* __restrict__ x, const unsigned char* __restrict__ mask,
                 TX* __restrict__ y, long long rows, long long x_stride, int columns,
                 int queries, int heads, int ahead, long long mask_batch, long long mask_head,
                 long long mask_query, double factor) {
  const long long row = blockIdx.x;
  const int first = threadIdx.x * VEC;
  const int bound = bound_of(row, columns, queries, ahead);
  const A scale = static_cast<A>(factor);
  const TX* source = x + row * x_stride;
  const unsigned char* mask_row =
      Mask{mask, mask_batch, mask_head, mask_query}.row_of(row, queries, heads);
  RowReduction<LANES, 1, 1, A> over_row;

  auto scores_at = [&](int column, A(&scores)[VEC]) {
    scores_of(load<ACCESS, VEC>(source + column), hidden_at(mask_row, column, columns), column,
              bound, scale, scores);
  };
  // Each thread subtracts the largest of its own scores so far.
  A own = lowest<A>();
  A total[1] = {0};
#pragma unroll 4
  for (int column = first; column < bound; column += LANES * VEC) {
    A scores[VEC];
    scores_at(column, scores);
    const A above = largest(scores, own);
    add_up(scores, own, above, total[0]);
    own = above;
  }
  A highest[1] = {own};
  over_row.max(highest);
  const A shift = softmax_shift(highest[0]);
  total[0] *= exponential(own - shift);
  over_row.sum(total);
  const A share = share_of(total[0]);

  TX* target = y + row * columns;
#pragma unroll 2
  for (int column = first; column < columns; column += LANES * VEC) {
    A scores[VEC] = {};
    if (column < bound) {
      scores_at(column, scores);
#pragma unroll
      for (int i = 0; i < VEC; ++i) scores[i] = exponential(scores[i] - shift) * share;
    }
    store(target + column, encode<TX>(scores));
  }
}

#endif  // KERNEL_forward_wide

#ifdef KERNEL_backward

extern "C" __global__ void __launch_bounds__(Row::kThreads, BLOCKS)
    backward(const TDY* __restrict__ dy, const TX* __restrict__ y, TX* __restrict__ dx,
             long long rows, long long dy_stride, long long y_stride, int columns, int queries,
             int ahead, double factor) {
  extern __shared__ __align__(16) unsigned char kept[];
  static_assert(!STRIPED || !IN_REGISTERS, "STRIPED excludes IN_REGISTERS");
  constexpr int kShared = VECS - IN_REGISTERS;  // of a thread's vectors, the first
  unsigned char* kept_dy = kept + Slots<TX>::kBytes / VECS * kShared;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const long long row =
      static_cast<long long>(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
  const bool active = Row::in_rows(row, rows);
  const int bound = bound_of(row, columns, queries, ahead);
  RowReduction<LANES, CLUSTER, 1, A> over_row;
  Vec<TX, VEC> last_y = zeros<TX, VEC>();
  Vec<TDY, VEC> last_dy = zeros<TDY, VEC>();

  const int first = Row::first_column(0, rank);
  const TX* from_y = y + row * y_stride;
  const TDY* from_dy = dy + row * dy_stride;
  TX* target = dx + (row * columns + first);  // computed here: later there are no registers for it
  const bool last = row >= Row::first_last(rows, min(y_stride, dy_stride));
  const int copied_columns = Row::in_pieces(needed_columns(bound, columns), last);

  // Where three or more blocks of clusters share a multiprocessor the L2 policy costs 2%.
  constexpr Reading kReading = CLUSTER > 1 && BLOCKS > 2 ? kPlain : kOnce;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    const bool wanted = !CAUSAL || column < bound;
    if (v < kShared) {
      Slots<TX>::fill<kReading>(kept, v, from_y + first, active, column, copied_columns, wanted);
      Slots<TDY>::fill<kReading>(kept_dy, v, from_dy + first, active, column, copied_columns,
                                 wanted);
    } else if (active && Row::in_row(column, columns) && wanted) {
      last_y = load<ACCESS, VEC>(from_y + column);
      last_dy = load<ACCESS, VEC>(from_dy + column);
    }
  }
  commit_copies();
  Row::wait<0>();
  unsigned char* own_y = kept + Slots<TX>::begin(from_y);
  unsigned char* own_dy = kept_dy + Slots<TDY>::begin(from_dy);
#if STRIPED
  if (last && active) {
    const int rest = Row::rest_of(needed_columns(bound, columns), rank);
    Slots<TX>::fill_rest(kept, from_y, rest);
    Slots<TDY>::fill_rest(kept_dy, from_dy, rest);
    Row::release();
  }
#endif
  auto y_of = [&](int v) { return v < kShared ? Slots<TX>::read(own_y, v) : last_y; };
  auto dy_of = [&](int v) { return v < kShared ? Slots<TDY>::read(own_dy, v) : last_dy; };

  A along[1] = {0};
#pragma unroll
  for (int v = 0; v < VECS; ++v) along[0] += products_of(y_of(v), dy_of(v));
  over_row.sum(along);

  if (!active) return;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int column = Row::first_column(v, rank);
    if (!Row::in_row(column, columns)) continue;
    Row::put(target + v * Row::kVectorStride,
             gradient(y_of(v), dy_of(v), along[0], static_cast<A>(factor)), columns - column);
  }
}

#endif  // KERNEL_backward

#ifdef KERNEL_backward_pieces

// A row and its gradient are kept in their storage types until the other blocks' slots have
// arrived.
extern "C" __global__ void __launch_bounds__(LANES, BLOCKS)
    backward_pieces(const TDY* __restrict__ dy, const TX* __restrict__ y, TX* __restrict__ dx,
                    long long rows, long long dy_stride, long long y_stride, int columns, int,
                    int, double factor, unsigned long long first_epoch,
                    FlaggedSlot* exchange_slots) {
  RowReduction<LANES, CLUSTER, 1, A, kThroughMemory> over_row(
      exchange_slots, static_cast<unsigned>(first_epoch), Piece::group());
  extern __shared__ __align__(16) unsigned char ring[];
  const Piece piece(columns);
  const unsigned count = static_cast<unsigned>(rows);
  struct Held {
    Vec<TX, VEC> y[VECS];
    Vec<TDY, VEC> dy[VECS];
  };
  A along[1];
  auto fetch = [&](unsigned row, unsigned char* slots) {
    fetch_row(piece, slots, y + row * y_stride, row < count);
    fetch_row(piece, slots + Slots<TX>::kBytes, dy + row * dy_stride, row < count);
  };
  auto take = [&](unsigned, unsigned char* slots, Held& held) {
    along[0] = 0;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      held.y[v] = Slots<TX>::read(slots, v);
      held.dy[v] = Slots<TDY>::read(slots + Slots<TX>::kBytes, v);
      along[0] += products_of(held.y[v], held.dy[v]);
    }
    over_row.begin<Sum>(along);
  };
  auto write = [&](unsigned row, const Held& held) {
    over_row.end<Sum>(along);
    TX* out = dx + static_cast<long long>(row) * columns;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      if (!piece.has(v)) continue;
      store(piece.place(out, v),
            gradient(held.y[v], held.dy[v], along[0], static_cast<A>(factor)));
    }
  };
  constexpr int kBytes = Slots<TX>::kBytes + Slots<TDY>::kBytes;
  for_each_row<CLUSTER, STAGES, kBytes, Held>(ring, count, fetch, take, write);
}

#endif  // KERNEL_backward_pieces

#ifdef KERNEL_backward_wide

// One block per row, with any number of columns.
extern "C" __global__ void __launch_bounds__(LANES)
    backward_wide(const TDY* __restrict__ dy, const TX* __restrict__ y, TX* __restrict__ dx,
                  long long rows, long long dy_stride, long long y_stride, int columns,
                  int queries, int ahead, double factor) {
  const long long row = blockIdx.x;
  const int first = threadIdx.x * VEC;
  const int bound = bound_of(row, columns, queries, ahead);
  const TX* outputs = y + row * y_stride;
  const TDY* gradients = dy + row * dy_stride;
  RowReduction<LANES, 1, 1, A> over_row;

  A along[1] = {0};
#pragma unroll 4
  for (int column = first; column < bound; column += LANES * VEC) {
    along[0] += products_of(load<ACCESS, VEC>(outputs + column),
                            load<ACCESS, VEC>(gradients + column));
  }
  over_row.sum(along);

  TX* target = dx + row * columns;
#pragma unroll 2
  for (int column = first; column < columns; column += LANES * VEC) {
    Vec<TX, VEC> result = zeros<TX, VEC>();
    if (column < bound) {
      result = gradient(load<ACCESS, VEC>(outputs + column),
                        load<ACCESS, VEC>(gradients + column), along[0],
                        static_cast<A>(factor));
    }
    store(target + column, result);
  }
}

#endif  // KERNEL_backward_wide
