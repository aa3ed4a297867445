// Cross entropy of logits over rows, forward and backward, and of shards of a vocabulary.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (loss.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   TX, TO        storage types of the logits, of their gradients
//   TB, BIASED    storage type of the bias that is added to every row, and 1 if there is one
//   TS            type of the statistics: float32 or float64
//   CAPPED        1 if scores are soft-capped logits
//   SUMMED        1 if the sum of a row's scores is needed
//   STATISTICS    1 to write the four statistics of each row instead of loss and lse
//   OWNED         1 if the logits are temporary memory, which the gradients may overwrite
//   EDGES         1 if rows of the gradients may start inside a vector
//   VEC, ACCESS   elements per vector, and in one access
//   DEPTH         vectors that a thread has in flight at once
//   LANES, ROWS   threads that share a row, rows of a block
//   BLOCKS        blocks that must fit on a multiprocessor; bounds the registers
//
// Words are indices in the whole vocabulary. Columns are indices in the logits that the kernel has,
// the first of which is word `start`; `last` is one behind the last word. A row's result depends
// only on its values, its width and the types, not on the number of rows nor on addresses.

#include "cross_entropy.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "row_reduction.cuh"

using namespace te_fl;

namespace {

#if defined(KERNEL_forward) || defined(KERNEL_merge)

#ifdef KERNEL_forward
using A = Accumulator<TX>::type;
#else
using A = TS;
#endif

#else

using A = Accumulator<TX>::type;

#endif

#if defined(KERNEL_forward) || defined(KERNEL_backward)

template <int N>
__device__ __forceinline__ Vec<TX, N> read_logits(const TX* from) {
  return load<least(ACCESS, N), N>(from);
}

struct Cap {
  A bound, inverse;
};

struct Capped {
  A score, slope;
};

// The soft-capped score of a logit, cap * tanh(x / cap), and its slope.
__device__ __forceinline__ Capped capped(A x, const Cap& cap) {
  const A u = x * cap.inverse;
  const A size = fabs(u);
  const A below = exponential(A(-2) * size);
  const A share = reciprocal(A(1) + below);
  A bent;
  if constexpr (sizeof(A) == 8) {
    bent = tanh(u);
  } else {
    bent = copysign(A(1) - A(2) * below * share, u);  // cancels too much for small u
    const A square = u * u;
    // tanh(u) = u + u**3 * P(u**2), fitted with a relative error of 1e-8
    const A series =
        -0.3333328068256378f +
        square * (0.13331441581249237f +
                  square * (-0.05373971164226532f +
                            square * (0.020639078691601753f + square * -0.005704978480935097f)));
    bent = size < A(0.625) ? u + u * square * series : bent;
  }
  // Computed as 1 - tanh**2 the slope would cancel where tanh is near 1.
  return {cap.bound * bent, A(4) * below * share * share};
}

// Logits, with the bias added.
template <int N>
__device__ __forceinline__ void decode_logits(const Vec<TX, N>& stored, const TB* bias, int column,
                                              A (&x)[N]) {
  decode(stored, x);
  if constexpr (BIASED) {
    A offset[N];
    decode(load<least(ACCESS, N), N>(bias + column), offset);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += offset[i];
  }
}

#endif

}  // namespace

#ifdef KERNEL_forward

namespace {

template <int N>
__device__ __forceinline__ void scores_of(const Vec<TX, N>& stored, const TB* bias, int column,
                                          const Cap& cap, A* scores) {
  A x[N];
  decode_logits(stored, bias, column, x);
#pragma unroll
  for (int i = 0; i < N; ++i) scores[i] = CAPPED ? capped(x[i], cap).score : x[i];
}

// Adds scores to the statistics; missing scores are lowest<A>().
template <int N>
__device__ __forceinline__ void take_in(Statistics<A>& found, const A (&scores)[N]) {
  A above = found.highest;
#pragma unroll
  for (int i = 0; i < N; ++i) above = Max::combine(above, scores[i]);
  const A shift = softmax_shift(above);
  A sum = found.total * exponential(found.highest - shift);
#pragma unroll
  for (int i = 0; i < N; ++i) sum += exponential(scores[i] - shift);
  found.total = sum;
  found.highest = above;
}

}  // namespace

// Each thread keeps the statistics of the logits that it has read. It does not prefetch its next
// vectors, which would cost registers and so threads: other threads have enough vectors in flight.
extern "C" __global__ void __launch_bounds__(LANES* ROWS, BLOCKS)
    forward(const TX* __restrict__ x, const TB* __restrict__ bias,
            const long long* __restrict__ targets, A* __restrict__ first, A* __restrict__ second,
            long long rows, long long step, int columns, long long start, long long ignore,
            long long last, double words, double label_smoothing, double z_loss, double bound) {
  const int lane = threadIdx.x % LANES;
  const long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const bool exists = ROWS == 1 || row < rows;
  const long long target = exists ? __ldg(targets + row) : ignore;
  const bool read = target != ignore;
  const bool writes = exists && lane == 0;
  const TX* source = x + row * step;
  const Cap cap = {static_cast<A>(bound), A(1) / static_cast<A>(bound)};
  RowReduction<LANES, 1, SUMMED ? 2 : 1, A> over_row;

  Statistics<A> found = {lowest<A>(), A(0), A(0), A(0)};
  const unsigned long long word =
      static_cast<unsigned long long>(target) - static_cast<unsigned long long>(start);
  if (writes && read && target >= start && word < static_cast<unsigned long long>(columns)) {
    const int column = static_cast<int>(word);
    scores_of(read_logits<1>(source + column), bias, column, cap, &found.at_target);
  }

  // The first score is subtracted from all that are summed: a large offset in common would round
  // off their differences.
  A center[1] = {A(0)};
  if constexpr (SUMMED && !STATISTICS) {
    if (read) scores_of(read_logits<1>(source), bias, 0, cap, center);
    center[0] = softmax_shift(center[0]);
  }

  const int vectors = columns / VEC;
  const int chunks = read ? (vectors + LANES * DEPTH - 1) / (LANES * DEPTH) : 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    Vec<TX, VEC> stored[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      // Beyond the end the last vector is loaded again, unused: a branch would split the loads.
      const int vector = least((chunk * DEPTH + d) * LANES + lane, vectors - 1);
      stored[d] = read_logits<VEC>(source + vector * VEC);
    }
    A scores[DEPTH * VEC];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int vector = (chunk * DEPTH + d) * LANES + lane;
      const bool inside = vector < vectors;
      scores_of(stored[d], bias, least(vector, vectors - 1) * VEC, cap, scores + d * VEC);
      A sum = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        A& score = scores[d * VEC + i];
        if constexpr (SUMMED) sum += score - center[0];
        score = inside ? score : lowest<A>();
      }
      if constexpr (SUMMED) found.summed += inside ? sum : A(0);
    }
    take_in(found, scores);
  }
  const int rest = vectors * VEC + lane;  // columns behind the last whole vector, one for each lane
  if (read && rest < columns) {
    A score[1];
    scores_of(read_logits<1>(source + rest), bias, rest, cap, score);
    if constexpr (SUMMED) found.summed += score[0] - center[0];
    take_in(found, score);
  }

  A highest[SUMMED ? 2 : 1], sums[SUMMED ? 2 : 1];
  for (A& value : highest) value = found.highest;
  over_row.max(highest);
  sums[0] = found.total * exponential(found.highest - softmax_shift(highest[0]));
  if constexpr (SUMMED) sums[1] = found.summed;
  over_row.sum(sums);
  if (!writes) return;
  found = {highest[0], sums[0], found.at_target, SUMMED ? sums[SUMMED ? 1 : 0] : A(0)};
  if constexpr (STATISTICS) {
    A* stats = first + row * 4;
    stats[0] = read ? found.highest : A(0);
    stats[1] = found.total;
    stats[2] = found.at_target;
    stats[3] = found.summed;
  } else {
    store_loss<SUMMED>(first + row, second + row, target, !read, found, last, words,
                       label_smoothing, z_loss, center[0]);
  }
}

#endif  // KERNEL_forward

#ifdef KERNEL_merge

// Loss and lse of a row, by one thread, from the statistics[shard][row][4] of all its shards.
extern "C" __global__ void __launch_bounds__(LANES)
    merge(const TS* __restrict__ statistics, const long long* __restrict__ targets,
          A* __restrict__ loss, A* __restrict__ lse, long long rows, int shards, long long ignore,
          long long last, double words, double label_smoothing, double z_loss) {
  const long long row = static_cast<long long>(blockIdx.x) * LANES + threadIdx.x;
  if (row >= rows) return;
  const long long target = __ldg(targets + row);
  auto values_of = [&](int shard, A(&values)[4]) {
    decode(load<ACCESS, 4>(statistics + (shard * rows + row) * 4), values);
  };
  Statistics<A> found = {lowest<A>(), A(0), A(0), A(0)};
  A values[4];
#pragma unroll 4
  for (int shard = 0; shard < shards; ++shard) {
    values_of(shard, values);
    found.highest = Max::combine(found.highest, values[0]);
  }
  const A shift = softmax_shift(found.highest);
#pragma unroll 4
  for (int shard = 0; shard < shards; ++shard) {
    values_of(shard, values);
    found.total += values[1] * exponential(values[0] - shift);
    found.at_target += values[2];
    if constexpr (SUMMED) found.summed += values[3];
  }
  store_loss<SUMMED>(loss + row, lse + row, target, target == ignore, found, last, words,
                     label_smoothing, z_loss);
}

#endif  // KERNEL_merge

#ifdef KERNEL_backward

namespace {

// Values that all gradients of a row share.
struct Common {
  A lse, factor, pull, uniform;
  Cap cap;
  int word;
  bool read;
};

template <int N>
__device__ __forceinline__ Vec<TX, N> logits_at(const TX* from) {
  if constexpr (OWNED) return load_written<N>(from);
  return read_logits<N>(from);
}

// The gradients of N neighbouring logits.
template <int N>
__device__ __forceinline__ void finish(TO* out, const Vec<TX, N>& stored, const TB* bias,
                                       int column, const Common& row) {
  A d[N];
  decode_logits(stored, bias, column, d);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    // In an ignored row the bias is still added, and its exponential times 0 could be NaN.
    if constexpr (BIASED) d[i] = row.read ? d[i] : A(0);
    Capped of = {d[i], A(1)};
    if constexpr (CAPPED) of = capped(d[i], row.cap);
    const A shift = column + i == row.word ? row.pull : row.uniform;
    d[i] = fma(row.factor, exponential(of.score - row.lse), -shift);
    if constexpr (CAPPED) d[i] *= of.slope;
  }
  store(out, encode<TO>(d));
}

}  // namespace

// A tile of ROWS rows by DEPTH * LANES vectors. Vectors are aligned in `out`: the first and the
// last vector of a row may lie partly outside of it.
extern "C" __global__ void __launch_bounds__(LANES* ROWS)
    backward(const TX* x, const TB* __restrict__ bias, const long long* __restrict__ targets,
             const A* __restrict__ grad_loss, const A* __restrict__ lse,
             const A* __restrict__ grad_lse, const A* __restrict__ scale, TO* out, long long rows,
             int columns, long long step, long long out_step, int tiles, long long start,
             long long ignore, long long last, double label_smoothing, double share,
             double z_loss, double bound) {
  // Starts at the end: data that the forward read last is the likeliest to be in L2 still.
  const unsigned place = gridDim.x - 1 - blockIdx.x;
  const unsigned group = place / static_cast<unsigned>(tiles);
  const int tile = static_cast<int>(place - group * static_cast<unsigned>(tiles));
  const long long row = static_cast<long long>(group) * ROWS + threadIdx.x / LANES;
  if (ROWS > 1 && row >= rows) return;
  const int before = EDGES ? static_cast<int>(row * out_step % VEC) : 0;
  const int first = (tile * DEPTH * LANES + static_cast<int>(threadIdx.x) % LANES) * VEC - before;
  const TX* source = x + row * step;
  TO* target_row = out + row * out_step;
  const long long target = __ldg(targets + row);
  const bool read = target != ignore;

  auto whole = [&](int column) { return column >= 0 && column + VEC <= columns; };
  Vec<TX, VEC> stored[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int column = first + d * LANES * VEC;
    stored[d] = zeros<TX, VEC>();
    if (read && whole(column)) stored[d] = logits_at<VEC>(source + column);
  }
  // These give an ignored row gradients of zero.
  Common common = {A(0), A(0), A(0), A(0), {}, -1, read};
  if constexpr (CAPPED) common.cap = {static_cast<A>(bound), A(1) / static_cast<A>(bound)};
  if (read) {
    const A grad = __ldg(grad_loss + row);
    const A z = static_cast<A>(2 * z_loss);
    const A scaled = scale ? __ldg(scale) : A(1);
    common.lse = __ldg(lse + row);
    common.factor = grad + (grad_lse ? __ldg(grad_lse + row) : A(0));
    if (z != A(0)) common.factor += z * common.lse * grad;
    if (label_smoothing != 0) common.uniform = static_cast<A>(share) * grad;
    common.pull = (static_cast<A>(1 - label_smoothing) * grad + common.uniform) * scaled;
    common.uniform *= scaled;
    common.factor *= scaled;
    if (target < 0 || target >= last) common.factor = quiet_nan<A>();
    const unsigned long long word =
        static_cast<unsigned long long>(target) - static_cast<unsigned long long>(start);
    if (target >= start && word < static_cast<unsigned long long>(columns)) {
      common.word = static_cast<int>(word);
    }
  }
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int column = first + d * LANES * VEC;
    if (whole(column)) {
      finish(target_row + column, stored[d], bias, column, common);
      continue;
    }
#pragma unroll 1
    for (int at = column < 0 ? 0 : column; at < least(column + VEC, columns); ++at) {
      const Vec<TX, 1> one = read ? logits_at<1>(source + at) : zeros<TX, 1>();
      finish(target_row + at, one, bias, at, common);
    }
  }
}

#endif  // KERNEL_backward
