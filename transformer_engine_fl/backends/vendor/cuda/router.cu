// Choosing the experts of each token, and the load-balancing loss.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (router.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   TX        storage type of the logits, of the probs, or of their gradient
//   TS        type of the saved scores
//   TB        type of the bias; BIASED is 1 if there is one
//   TC, TA    types of the experts' counts, and of the loss's constant
//   FUNCTION  the score function: SOFTMAX, SIGMOID or SQRTSOFTPLUS
//   ALL       1 for the probs of all experts, 0 for those of the chosen ones
//   AFTERWARDS  1 if logits are compared, and the softmax is over the chosen experts
//   NORMALIZED  1 if probs are divided by their sum
//   GROUPED   1 if experts are in groups; SHARE threads search a group
//   ROUTED    1 if there is a routing map, 0 if all experts are chosen
//   LANES     threads that share a row; in `sum_loads` and `loss_backward`, along the columns
//   TEAMS     rows of a block, more than one only if LANES is at most 32
//   VEC, VECS elements of a vector, and vectors of a thread
//   ACCESS    elements that one access may cover, up to VEC
//
// The scores of a token stay in registers from the logits to the probs. Experts are chosen one by
// one, by integer keys in the order of the scores. One key, the lowest, belongs to no score: it
// marks an expert that is chosen already or not available.

#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "row_reduction.cuh"

#define SOFTMAX 0
#define SIGMOID 1
#define SQRTSOFTPLUS 2

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

#if defined(KERNEL_choose) || defined(KERNEL_choose_backward)

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kValues = VEC * VECS;
constexpr float kEpsilon = 1e-20f;

__device__ __forceinline__ int member() { return static_cast<int>(threadIdx.x) % LANES; }
__device__ __forceinline__ int team() { return static_cast<int>(threadIdx.x) / LANES; }

// The expert of this thread's value `i`.
__device__ __forceinline__ int expert_of(int i) {
  return (i / VEC * LANES + member()) * VEC + i % VEC;
}

__device__ __forceinline__ float exact_exp(float x) { return expf(x); }
__device__ __forceinline__ double exact_exp(double x) { return exp(x); }

// A row's values, zeros beyond its end.
template <typename T>
__device__ __forceinline__ void load_row(const T* row, int experts, A (&values)[kValues]) {
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int expert = expert_of(v * VEC);
    A part[VEC];
    decode(expert < experts ? load<ACCESS, VEC>(row + expert) : zeros<T, VEC>(), part);
#pragma unroll
    for (int j = 0; j < VEC; ++j) values[v * VEC + j] = part[j];
  }
}

template <typename T>
__device__ __forceinline__ void store_row(T* row, int experts, const A (&values)[kValues]) {
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int expert = expert_of(v * VEC);
    A part[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) part[j] = values[v * VEC + j];
    if (expert < experts) store(row + expert, encode<T>(part));
  }
}

using OverRow = RowReduction<LANES, 1, 1, A>;

__device__ __forceinline__ A sum_of(OverRow& over_row, const A (&values)[kValues]) {
  A total[1] = {0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) total[0] += values[i];
  over_row.sum(total);
  return total[0];
}

#endif

#ifdef KERNEL_choose

constexpr int kWarps = LANES / 32;
static_assert(LANES % 32 == 0 && (TEAMS == 1 || LANES == 32), "a row needs whole warps");

__device__ __forceinline__ void sync_team() {
  if constexpr (LANES == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------- keys

template <typename T>
struct KeyOf {
  using type = int;
};
template <>
struct KeyOf<double> {
  using type = long long;
};
using Key = KeyOf<A>::type;

constexpr Key kHighest = sizeof(Key) == 8 ? static_cast<Key>(0x7fffffffffffffffll)
                                          : static_cast<Key>(0x7fffffff);
constexpr Key kLowest = -kHighest - 1;  // belongs to no number
constexpr int kNoIndex = 0x7fffffff;

__device__ __forceinline__ int bits_of(float x) { return __float_as_int(x); }
__device__ __forceinline__ long long bits_of(double x) { return __double_as_longlong(x); }
__device__ __forceinline__ float of_bits(int bits) { return __int_as_float(bits); }
__device__ __forceinline__ double of_bits(long long bits) { return __longlong_as_double(bits); }

// From the bits of a number to an integer of the same order, and back.
__device__ __forceinline__ Key sortable_bits(Key bits) {
  return bits < 0 ? bits ^ kHighest : bits;
}

// Both zeros have the same key, and NaN has the highest.
__device__ __forceinline__ Key key_of(A x) {
  const Key key = x == A(0) ? Key(0) : sortable_bits(bits_of(x));
  return x != x ? kHighest : key;
}

struct Best {
  Key key;
  int at;

  __device__ __forceinline__ void merge(Key other, int place) {
    if (other > key || (other == key && place < at)) {
      key = other;
      at = place;
    }
  }
};

// The highest key among Width neighbouring threads; of equal keys the first.
template <int Width>
__device__ __forceinline__ Best best_of(Best own) {
  if constexpr (Width == 32 && sizeof(Key) == 4) {
    const int key = __reduce_max_sync(kWholeWarp, static_cast<int>(own.key));
    return {key, __reduce_min_sync(kWholeWarp, own.key == key ? own.at : kNoIndex)};
  } else {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
      const Key key = __shfl_xor_sync(kWholeWarp, own.key, offset);
      own.merge(key, __shfl_xor_sync(kWholeWarp, own.at, offset));
    }
    return own;
  }
}

// As best_of, among the threads of a row. Shared memory is double-buffered: a thread that writes to
// a buffer again has passed the barrier of the other buffer, so all threads have read this one.
class BestOfRow {
 public:
  __device__ __forceinline__ Best operator()(Best own) {
    own = best_of<32>(own);
    if constexpr (kWarps > 1) {
      __shared__ Key keys[2][kWarps];
      __shared__ int places[2][kWarps];
      const int lane = threadIdx.x % 32;
      if (lane == 0) {
        keys[buffer_][threadIdx.x / 32] = own.key;
        places[buffer_][threadIdx.x / 32] = own.at;
      }
      __syncthreads();
      own = best_of<32>({keys[buffer_][lane % kWarps], places[buffer_][lane % kWarps]});
      buffer_ ^= 1;
    }
    return own;
  }

 private:
  int buffer_ = 0;
};

// ----------------------------------------------------------------------------- groups

// Experts in consecutive groups. The `chosen` groups are those with the highest sums of their
// `counted` highest scores; leave_best sets the keys of all other experts to kLowest.
struct Groups {
  int number, size, chosen, counted;

  // The group of an expert. Both numbers are below 2**14, so that the product with the rounded-up
  // reciprocal gives the exact quotient.
  __device__ __forceinline__ int of(int expert, unsigned reciprocal) const {
    if (size == 1) return expert;
    return static_cast<int>(static_cast<unsigned long long>(expert) * reciprocal >> 32);
  }

  __device__ __forceinline__ void leave_best(Key (&keys)[kValues], int experts,
                                             unsigned char* memory) const {
    // Groups are padded by SHARE, so that the threads that search them use different banks.
    const int room = experts + number * SHARE;
    Key* staged = reinterpret_cast<Key*>(memory) + team() * (room + number);
    Key* sums = staged + room;
    const unsigned reciprocal = 0xffffffffu / static_cast<unsigned>(size) + 1;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int expert = expert_of(i);
      if (expert < experts) staged[expert + of(expert, reciprocal) * SHARE] = keys[i];
    }
    sync_team();
    for (int first = 0; first < number; first += LANES / SHARE) {
      const int group = first + member() / SHARE;
      const Key* own = staged + group * (size + SHARE);
      Best last = {kHighest, -1};
      A sum = 0;
      for (int n = 0; n < counted; ++n) {
        Best best = {kLowest, kNoIndex};
        if (group < number) {
          for (int at = member() % SHARE; at < size; at += SHARE) {
            const Key key = own[at];
            if (key < last.key || (key == last.key && at > last.at)) best.merge(key, at);
          }
        }
        last = best_of<SHARE>(best);
        sum += of_bits(sortable_bits(last.key));
      }
      if (group < number && member() % SHARE == 0) sums[group] = key_of(sum);
    }
    sync_team();
    for (int group = member(); group < number; group += LANES) {
      int better = 0;
      for (int other = 0; other < number; ++other) {
        better += sums[other] > sums[group] || (sums[other] == sums[group] && other < group);
      }
      staged[group] = better < chosen;  // `staged` is not read as keys any more
    }
    sync_team();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int expert = expert_of(i);
      if (expert < experts && !staged[of(expert, reciprocal)]) keys[i] = kLowest;
    }
  }
};

// ----------------------------------------------------------------------------- scores

__device__ __forceinline__ float log_of_one_and(float x) { return log1pf(x); }
__device__ __forceinline__ double log_of_one_and(double x) { return log1p(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ A infinity() { return static_cast<A>(__int_as_float(0x7f800000)); }

// Softmax over the values whose bit in `some` is set; 0 for the others.
__device__ __forceinline__ void softmax(OverRow& over_row, unsigned some, A (&values)[kValues]) {
  A highest[1] = {-infinity()};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (some >> i & 1) highest[0] = Max::combine(highest[0], values[i]);
  }
  over_row.max(highest);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const A weight = exact_exp(values[i] - highest[0]);
    values[i] = some >> i & 1 ? weight : A(0);
  }
  const A share = A(1) / sum_of(over_row, values);
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] *= share;
}

__device__ __forceinline__ A score_of(A x) {
  if constexpr (FUNCTION == SIGMOID) return A(1) / (A(1) + exact_exp(-x));
  // log(1 + exp(x)), computed so that it is as accurate where it is tiny.
  const A small = exact_exp(x < A(0) ? x : -x);
  return root((x > A(0) ? x : x != x ? x : A(0)) + log_of_one_and(small));
}

// Stores a byte for each of N bits.
template <int N>
__device__ __forceinline__ void store_bits(unsigned char* to, unsigned bits) {
  if constexpr (N >= 4) {
    Vec<unsigned char, N> bytes = zeros<unsigned char, N>();
#pragma unroll
    for (int i = 0; i < N; ++i) bytes.words[i / 4] |= (bits >> i & 1) << i % 4 * 8;
    store(to, bytes);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = bits >> i & 1;
  }
}

#endif  // KERNEL_choose

#ifdef KERNEL_choose_backward

__device__ __forceinline__ float exp_less_one(float x) { return expm1f(x); }
__device__ __forceinline__ double exp_less_one(double x) { return expm1(x); }

// The derivative of a score by its logit, from the score.
__device__ __forceinline__ A slope_of(A score) {
  if constexpr (FUNCTION == SIGMOID) return score * (A(1) - score);
  const A square = score * score;
  const A tiny = sizeof(A) == 8 ? A(0x1p-54) : A(0x1p-25);
  return square < tiny ? score / A(2) : -exp_less_one(-square) / (A(2) * score);
}

// Loads a bit for each of N bytes.
template <int N>
__device__ __forceinline__ unsigned load_bits(const unsigned char* from) {
  unsigned bits = 0;
  if constexpr (ACCESS == N && N >= 4) {
    const Vec<unsigned char, N> bytes = load<N, N>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= (bytes.words[i / 4] >> i % 4 * 8 & 0xff ? 1u : 0u) << i;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= (from[i] ? 1u : 0u) << i;
  }
  return bits;
}

// The thread's experts that are chosen, as a bit for each value.
__device__ __forceinline__ unsigned routed_of(const unsigned char* row, int experts) {
  unsigned chosen = 0;
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int expert = expert_of(v * VEC);
    if (expert < experts) chosen |= load_bits<VEC>(row + expert) << v * VEC;
  }
  return chosen;
}

#endif  // KERNEL_choose_backward

#if defined(KERNEL_sum_loads) || defined(KERNEL_loss_backward)

constexpr int kThreads = 256;
constexpr int kRows = kThreads / LANES;

__device__ __forceinline__ A number(int x) { return static_cast<A>(x); }
__device__ __forceinline__ A number(long long x) { return static_cast<A>(x); }
__device__ __forceinline__ A number(float x) { return static_cast<A>(x); }
__device__ __forceinline__ A number(double x) { return static_cast<A>(x); }
__device__ __forceinline__ A number(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ A number(__half x) { return __half2float(x); }

#endif

}  // namespace

#ifdef KERNEL_choose

extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    choose(const TX* __restrict__ logits, const TB* __restrict__ bias, TX* __restrict__ probs,
           unsigned char* __restrict__ routing, A* __restrict__ scores, int rows, int experts,
           long long row_step, int topk, int groups, int group_size, int groups_chosen,
           int counted, double factor) {
  extern __shared__ __align__(16) unsigned char memory[];
  const long long row = static_cast<long long>(blockIdx.x) * TEAMS + team();
  if (row >= rows) return;  // whole warps return, or the whole block if it has barriers
  OverRow over_row;
  A values[kValues];
  load_row(logits + row * row_step, experts, values);
  unsigned known = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) known |= (expert_of(i) < experts ? 1u : 0u) << i;

  if constexpr (!AFTERWARDS && FUNCTION == SOFTMAX) softmax(over_row, known, values);
  if constexpr (FUNCTION != SOFTMAX) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = score_of(values[i]);
  }
  Key keys[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    A compared = values[i];
    if constexpr (BIASED) {
      if (known >> i & 1) {
        A added[1];
        decode(load<1, 1>(bias + expert_of(i)), added);
        compared += added[0];
      }
    }
    keys[i] = known >> i & 1 ? key_of(compared) : kLowest;
  }
  if constexpr (GROUPED) {
    const Groups in_groups{groups, group_size, groups_chosen, counted};
    in_groups.leave_best(keys, experts, memory);
  }

  unsigned chosen = 0;
  BestOfRow best_of_row;
  for (int n = 0; n < topk; ++n) {
    Best own = {kLowest, kNoIndex};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (keys[i] > own.key) own = {keys[i], expert_of(i)};
    }
    const int best = best_of_row(own).at;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (expert_of(i) == best) {
        keys[i] = kLowest;
        chosen |= 1u << i;
      }
    }
  }

  if constexpr (AFTERWARDS) softmax(over_row, chosen, values);
  store_row(scores + row * experts, experts, values);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (!((ALL ? known : chosen) >> i & 1)) values[i] = 0;
  }
  if constexpr (NORMALIZED) {
    const A share = A(1) / (sum_of(over_row, values) + static_cast<A>(kEpsilon));
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] *= share;
  }
  if constexpr (!ALL) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] *= static_cast<A>(factor);
  }
  store_row(probs + row * experts, experts, values);
#pragma unroll
  for (int v = 0; v < VECS; ++v) {
    const int expert = expert_of(v * VEC);
    if (expert < experts) store_bits<VEC>(routing + row * experts + expert, chosen >> v * VEC);
  }
}

#endif  // KERNEL_choose

#ifdef KERNEL_choose_backward

extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    choose_backward(const TX* __restrict__ grad_probs, const unsigned char* __restrict__ routing,
                    const TS* __restrict__ scores, TX* __restrict__ grad_logits, int rows,
                    int experts, long long grad_step, long long routing_step,
                    long long scores_step, double factor) {
  const long long row = static_cast<long long>(blockIdx.x) * TEAMS + team();
  if (row >= rows) return;  // whole warps return, or the whole block if it has barriers
  A grad[kValues], score[kValues];
  load_row(grad_probs + row * grad_step, experts, grad);
  load_row(scores + row * scores_step, experts, score);
  unsigned chosen = 0xffffffffu;
  if constexpr (ROUTED) chosen = routed_of(routing + row * routing_step, experts);
  A sums[2] = {0, 0};  // sums of the gradient times the scores, and of the scores
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    grad[i] = chosen >> i & 1 ? grad[i] * static_cast<A>(factor) : A(0);
    if (chosen >> i & 1) {
      sums[0] += grad[i] * score[i];
      sums[1] += score[i];
    }
  }
  RowReduction<LANES, 1, 2, A> over_row;
  over_row.sum(sums);
  const A share = A(1) / (sums[1] + static_cast<A>(kEpsilon));
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if constexpr (FUNCTION == SOFTMAX) {
      grad[i] = score[i] * (grad[i] - sums[0]);
    } else {
      if constexpr (NORMALIZED) grad[i] = (grad[i] - sums[0] * share) * share;
      grad[i] = chosen >> i & 1 ? grad[i] * slope_of(score[i]) : A(0);
    }
  }
  store_row(grad_logits + row * experts, experts, grad);
}

#endif  // KERNEL_choose_backward

#ifdef KERNEL_sum_loads

// A partial sum from each block: the probs of its rows, times the counts.
extern "C" __global__ void __launch_bounds__(kThreads)
    sum_loads(const TX* __restrict__ probs, const TC* __restrict__ counts,
              A* __restrict__ partial, int rows, int experts, long long row_step) {
  constexpr int kAhead = 4;
  const int first_row = blockIdx.x * kRows + static_cast<int>(threadIdx.x) / LANES;
  const long long step = static_cast<long long>(gridDim.x) * kRows;
  A weighted[1] = {0};
  for (int expert = static_cast<int>(threadIdx.x) % LANES * VEC; expert < experts;
       expert += LANES * VEC) {
    A total[VEC] = {};
    for (long long row = first_row; row < rows; row += kAhead * step) {
      Vec<TX, VEC> held[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const long long at = row + n * step;
        held[n] = at < rows ? load<ACCESS, VEC>(probs + at * row_step + expert)
                            : zeros<TX, VEC>();
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        A values[VEC];
        decode(held[n], values);
#pragma unroll
        for (int j = 0; j < VEC; ++j) total[j] += values[j];
      }
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) weighted[0] += total[j] * number(counts[expert + j]);
  }
  RowReduction<kThreads, 1, 1, A> over_block;
  over_block.sum(weighted);
  if (threadIdx.x == 0) partial[blockIdx.x] = weighted[0];
  release_dependents();
}

#endif  // KERNEL_sum_loads

#ifdef KERNEL_finish_loss

// Writes the sum of the blocks' partial sums times a factor, and the factor.
extern "C" __global__ void __launch_bounds__(LANES)
    finish_loss(const A* partial, TX* __restrict__ loss, A* __restrict__ constant, int count,
                double factor) {
  wait_for_predecessor();
  A total[1] = {0};
  for (int at = threadIdx.x; at < count; at += LANES) total[0] += __ldcg(partial + at);
  RowReduction<LANES, 1, 1, A> over_block;
  over_block.sum(total);
  if (threadIdx.x > 0) return;
  *constant = static_cast<A>(factor);
  const A result[1] = {total[0] * static_cast<A>(factor)};
  store(loss, encode<TX>(result));
}

#endif  // KERNEL_finish_loss

#ifdef KERNEL_loss_backward

// Writes the same row for every token.
extern "C" __global__ void __launch_bounds__(kThreads)
    loss_backward(const TX* __restrict__ grad_loss, const TA* __restrict__ constant,
                  const TC* __restrict__ counts, TX* __restrict__ grad_probs, int rows,
                  int experts) {
  const int first_row = blockIdx.x * kRows + static_cast<int>(threadIdx.x) / LANES;
  const long long step = static_cast<long long>(gridDim.x) * kRows;
  for (int expert = static_cast<int>(threadIdx.x) % LANES * VEC; expert < experts;
       expert += LANES * VEC) {
    A values[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      values[j] = number(*constant) * number(counts[expert + j]) * number(*grad_loss);
    }
    const Vec<TX, VEC> row_of_all = encode<TX>(values);
    for (long long row = first_row; row < rows; row += step) {
      store(grad_probs + row * experts + expert, row_of_all);
    }
  }
}

#endif  // KERNEL_loss_backward
