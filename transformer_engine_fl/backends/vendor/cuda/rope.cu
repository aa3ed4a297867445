// Rotary position embedding, of one tensor or of packed queries, keys and values.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (rope.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   TX           storage type of the tokens
//   INTERLEAVED  1 if the features of a pair are neighbours, 0 if half the rotated features apart
//   BACK         1 for the gradient, which applies the transposed rotation
//   WIDTH        features of a head (of queries and keys)
//   ROTATED      features that are rotated, of the queries or of the only tensor
//   K_ROTATED    features that are rotated, of the keys
//   V_WIDTH      features of a head of the values
//   PER_GROUP    heads of queries for each head of keys and values
//   VEC          elements per vector; divides all widths and all halves of rotated features
//   ACCESS, TABLE_ACCESS   elements that one access to tokens, and to freqs, may cover
//   THREADS      threads of a block
//   HEADS        heads of a thread
//   BLOCKS       blocks that must fit on a multiprocessor; bounds the registers
//
// A thread has the same pairs, or copied features, of HEADS heads of one token. It loads them, and
// computes the cosines and sines once while the loads are in flight.

#include "angles.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sequences.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

// How positions follow from tokens. Formats other than `thd` have no offsets.
struct Places {
  const int* starts;
  const int* offsets;
  long long tokens, inner, length;
  int sequences, sequence_first, cp_size, cp_rank;
};

// The angles of a part, a row for each position.
struct Table {
  const float* angles;
  long long rows, stride;
};

// A token's indices in memory and its position; `in_sequence` is false for one without a sequence.
struct Token {
  long long outer, inner, position;
  bool in_sequence;
};

__device__ __forceinline__ Token token_of(long long token, const Places& places) {
  const unsigned inner = static_cast<unsigned>(places.inner);
  const unsigned outer = static_cast<unsigned>(token) / inner;
  return {outer, static_cast<unsigned>(token) - outer * inner, 0, true};
}

// Each context-parallel rank holds two of the equally long chunks that a full sequence is cut into.
__device__ __forceinline__ void find_position(Token* token, const Places& places) {
  long long place, length = places.length;
  int sequence;
  if (places.offsets != nullptr) {
    const Place found = place_of(token->outer, places.offsets, places.sequences, places.cp_size);
    token->in_sequence = found.exists;
    place = found.place;
    length = found.length;
    sequence = found.sequence;
  } else {
    place = places.sequence_first ? token->outer : token->inner;
    sequence = static_cast<int>(places.sequence_first ? token->inner : token->outer);
  }
  token->position = place;
  if (places.cp_size > 1) {
    const long long chunk = length / 2;
    const long long ahead =
        place < chunk ? places.cp_rank : 2LL * places.cp_size - 2 - places.cp_rank;
    token->position += ahead * chunk;
  }
  if (places.starts != nullptr) token->position += places.starts[sequence];
}

// The heads of a token: groups are `group` apart, the PerGroup heads of a group `head` apart.
template <int PerGroup, typename T>
struct Heads {
  T* first;
  long long group, head;

  __device__ __forceinline__ T* at(int number) const {
    if constexpr (PerGroup == 1) return first + number * group;
    return first + number / PerGroup * group + number % PerGroup * head;
  }
};

// What a thread processes: every `step`th head of a token from `head` on.
struct Share {
  long long token;
  int head, step;
  bool exists;
};

// Whether a vector holds whole pairs. A thread has two vectors in either case.
constexpr bool kWithin = INTERLEAVED && VEC > 1;

// A part: a tensor with heads of Width features, of which Rotated are rotated.
template <int Width, int Rotated>
struct Part {
  static constexpr int kHalf = Rotated / 2;
  static constexpr int kChunks = kHalf / VEC;
  static constexpr int kRest = (Width - Rotated) / VEC;  // vectors that are copied
  // A lane has two vectors of a head: pairs, or two that are copied.
  static constexpr int kCopying = (kRest + 1) / 2;
  static constexpr int kAll = kChunks + kCopying;
  static constexpr int kLanes = least(THREADS, kAll);
  static constexpr int kSlots = THREADS / kLanes;
  static constexpr int kPairStride = INTERLEAVED && VEC == 1 ? 1 : kHalf;

  // Tokens are taken in units of `unit`; `block` is the index among the blocks of this part that
  // have the same unit. Each of their slots, of kLanes threads, takes a portion of a token's heads.
  static __device__ __forceinline__ Share share(long long unit_number, int unit, int block,
                                                int heads, const Places& places) {
    const unsigned portions = (static_cast<unsigned>(heads) + HEADS - 1) / HEADS;
    const unsigned slot = threadIdx.x / kLanes;
    const unsigned item = static_cast<unsigned>(block) * kSlots + slot;
    const unsigned within = item / portions;
    const long long number = unit_number * unit + within;
    return {number, static_cast<int>(item - within * portions), static_cast<int>(portions),
            slot < kSlots && within < static_cast<unsigned>(unit) && number < places.tokens};
  }

  struct Pairs {
    Vec<TX, VEC> vectors[2];
  };

  static __device__ __forceinline__ int first_feature(int chunk) {
    return chunk * VEC * (INTERLEAVED && VEC == 1 ? 2 : 1);
  }

  // Which of the thread's two vectors holds feature `which` of pair p, and at which element.
  static __device__ __forceinline__ constexpr int side(int p, int which) {
    return kWithin ? p / (VEC / 2) : which;
  }
  static __device__ __forceinline__ constexpr int element(int p, int which) {
    return kWithin ? p % (VEC / 2) * 2 + which : p;
  }

  struct Rotation {
    A cos_a[VEC], sin_a[VEC], cos_b[VEC], sin_b[VEC];

    // Most tables hold each angle twice, once for each feature of a pair.
    __device__ __forceinline__ void find(const Token& token, int chunk, const Table& table) {
      A angle[2][VEC];
      if (token.position >= 0 && token.position < table.rows) {
        const float* from = table.angles + token.position * table.stride + first_feature(chunk);
        decode(load<TABLE_ACCESS, VEC>(from), angle[0]);
        decode(load<TABLE_ACCESS, VEC>(from + kPairStride), angle[1]);
      } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i) angle[0][i] = angle[1][i] = A(__int_as_float(0x7fffffff));
      }
      A a[VEC], b[VEC];
      bool same = true;
#pragma unroll
      for (int p = 0; p < VEC; ++p) {
        a[p] = angle[side(p, 0)][element(p, 0)];
        b[p] = angle[side(p, 1)][element(p, 1)];
        same &= a[p] == b[p];
      }
      cos_sin(a, cos_a, sin_a);
      if (same) {
#pragma unroll
        for (int p = 0; p < VEC; ++p) cos_b[p] = cos_a[p], sin_b[p] = sin_a[p];
      } else {
        cos_sin(b, cos_b, sin_b);
      }
      if constexpr (BACK) {
#pragma unroll
        for (int p = 0; p < VEC; ++p) {
          const A forth = sin_a[p];
          sin_a[p] = -sin_b[p];
          sin_b[p] = -forth;
        }
      }
    }

    __device__ __forceinline__ Pairs of(const Pairs& pairs) const {
      A x[2][VEC], y[2][VEC];
      decode(pairs.vectors[0], x[0]);
      decode(pairs.vectors[1], x[1]);
#pragma unroll
      for (int p = 0; p < VEC; ++p) {
        const A u = x[side(p, 0)][element(p, 0)], v = x[side(p, 1)][element(p, 1)];
        y[side(p, 0)][element(p, 0)] = u * cos_a[p] - v * sin_a[p];
        y[side(p, 1)][element(p, 1)] = v * cos_b[p] + u * sin_b[p];
      }
      return {encode<TX>(y[0]), encode<TX>(y[1])};
    }
  };

  // Rotates, and copies the other features of, the heads of the share.
  template <typename From, typename To>
  static __device__ __forceinline__ void run(const Share& share, Token token, const From& from,
                                             const To& to, int heads, const Table& table,
                                             const Places& places) {
    const int lane = static_cast<int>(blockIdx.y) * kLanes + static_cast<int>(threadIdx.x) % kLanes;
    if (!share.exists || lane >= kAll) return;
    int feature = first_feature(lane), stride = kPairStride;
    if (lane >= kChunks) {
      const int copied = lane - kChunks;
      feature = Rotated + copied * VEC;
      // The last of an odd number of vectors is copied twice.
      stride = copied + kCopying < kRest ? kCopying * VEC : 0;
    }
    Pairs pairs[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      // Beyond the end the last head is loaded again, unused: a branch would split the loads.
      const int wanted = share.head + i * share.step;
      const TX* row = from.at(wanted < heads ? wanted : heads - 1) + feature;
      pairs[i].vectors[0] = load<ACCESS, VEC>(row);
      pairs[i].vectors[1] = load<ACCESS, VEC>(row + stride);
    }
    find_position(&token, places);
    const bool rotated = token.in_sequence && lane < kChunks;
    Rotation rotation;
    if (rotated) rotation.find(token, lane, table);
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      const int number = share.head + i * share.step;
      if (number >= heads) continue;
      const Pairs result = rotated ? rotation.of(pairs[i]) : pairs[i];
      TX* row = to.at(number) + feature;
      store(row, result.vectors[0]);
      store(row + stride, result.vectors[1]);
    }
  }
};

}  // namespace

#ifdef KERNEL_rope

// One tensor; the output is dense. Each unit of `unit` tokens has `blocks` blocks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rope(const TX* __restrict__ x, TX* __restrict__ y, const float* __restrict__ freqs,
         const int* __restrict__ starts, const int* __restrict__ offsets, long long tokens,
         long long inner, long long length, int sequences, int sequence_first, int cp_size,
         int cp_rank, long long table_rows, long long table_stride, int heads, int unit, int blocks,
         long long x_outer, long long x_inner, long long x_head) {
  using Only = Part<WIDTH, ROTATED>;
  const Places places{starts, offsets,   tokens,         inner,   length,
                      sequences, sequence_first, cp_size, cp_rank};
  const Table table{freqs, table_rows, table_stride};
  const unsigned number = blockIdx.x / static_cast<unsigned>(blocks);
  const int block = static_cast<int>(blockIdx.x - number * blocks);
  const Share share = Only::share(number, unit, block, heads, places);
  const Token token = token_of(share.token, places);
  const Heads<1, const TX> from{x + token.outer * x_outer + token.inner * x_inner, x_head, 0};
  const Heads<1, TX> to{y + share.token * heads * WIDTH, WIDTH, 0};
  Only::run(share, token, from, to, heads, table, places);
}

#endif  // KERNEL_rope

#ifdef KERNEL_rope_packed

namespace {

// One of the tensors, packed or not, and its strides between tokens and heads.
template <int PerGroup>
struct Side {
  TX* first;
  long long outer, inner, group, head;

  template <typename T>
  __device__ __forceinline__ Heads<PerGroup, T> heads(const Token& token) const {
    return {first + token.outer * outer + token.inner * inner, group, head};
  }
};

// Processes a block's share of a part, from the packed tensor or, for the gradient, back to it.
template <typename Kind, int PerGroup>
__device__ __forceinline__ void pack(long long number, int unit, int block, int heads,
                                     const Side<PerGroup>& packed, const Side<1>& own,
                                     const Table& table, const Places& places) {
  const Share share = Kind::share(number, unit, block, heads, places);
  const Token token = token_of(share.token, places);
  if constexpr (BACK) {
    Kind::run(share, token, own.template heads<const TX>(token),
              packed.template heads<TX>(token), heads, table, places);
  } else {
    Kind::run(share, token, packed.template heads<const TX>(token),
              own.template heads<TX>(token), heads, table, places);
  }
}

}  // namespace

// Packed queries, keys and values on one side, three tensors on the other. Each unit of `unit`
// tokens has `blocks` blocks: q_blocks for the queries, k_blocks for the keys and the others for
// the values, so that blocks that run at the same time access neighbouring memory.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rope_packed(TX* __restrict__ packed, TX* __restrict__ q, TX* __restrict__ k,
                TX* __restrict__ v, const float* __restrict__ q_freqs,
                const float* __restrict__ k_freqs, const int* __restrict__ starts,
                const int* __restrict__ offsets, long long tokens, long long inner,
                long long length, int sequences, int sequence_first, int cp_size, int cp_rank,
                long long q_rows, long long q_stride, long long k_rows, long long k_stride,
                int groups, int unit, int blocks, int q_blocks, int k_blocks, long long p_outer,
                long long p_inner, long long p_group, long long q_outer, long long q_inner,
                long long q_head, long long k_outer, long long k_inner, long long k_head,
                long long v_outer, long long v_inner, long long v_head) {
  const Places places{starts, offsets,   tokens,         inner,   length,
                      sequences, sequence_first, cp_size, cp_rank};
  const unsigned number = blockIdx.x / static_cast<unsigned>(blocks);
  const int block = static_cast<int>(blockIdx.x - number * blocks);
  if (block < q_blocks) {
    const Side<PER_GROUP> there{packed, p_outer, p_inner, p_group, WIDTH};
    const Side<1> own{q, q_outer, q_inner, q_head, 0};
    pack<Part<WIDTH, ROTATED>>(number, unit, block, groups * PER_GROUP, there, own,
                               Table{q_freqs, q_rows, q_stride}, places);
  } else if (block < q_blocks + k_blocks) {
    const Side<1> there{packed + PER_GROUP * WIDTH, p_outer, p_inner, p_group, 0};
    const Side<1> own{k, k_outer, k_inner, k_head, 0};
    pack<Part<WIDTH, K_ROTATED>>(number, unit, block - q_blocks, groups, there, own,
                                 Table{k_freqs, k_rows, k_stride}, places);
  } else {
    const Side<1> there{packed + (PER_GROUP + 1) * WIDTH, p_outer, p_inner, p_group, 0};
    const Side<1> own{v, v_outer, v_inner, v_head, 0};
    pack<Part<V_WIDTH, 0>>(number, unit, block - q_blocks - k_blocks, groups, there, own,
                           Table{nullptr, 0, 0}, places);
  }
}

#endif  // KERNEL_rope_packed
