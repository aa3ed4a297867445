// Row id maps: counting pairs of a token and an expert, and the row that each pair gets.
//
// Pairs are counted in consecutive groups (row_maps.cu); the kernel that moves a token computes
// the rows of its pairs from the counts (moe.cu). There is a Count for each expert and group. The
// group's pairs of an expert begin at a row that is the sum of Count::x (pairs of lower experts)
// over all groups and of Count::y (pairs of this expert) over the groups before. Counts are laid
// out [expert][group], so that a warp reads the counts of an expert coalesced.
//
// Expert indices may be any integers. Each index from 0 on has a bucket of its own; all negative
// indices share the first bucket, and all that are too large share the last. This gives the right
// rows if a shared bucket has only one distinct index; otherwise each of its pairs is compared
// with all other pairs.

#pragma once

namespace te_fl {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kBuckets = 1024;
constexpr int kMostGroups = 64;
constexpr long long kLargest = 0x7fffffffffffffffll;

// x: how many pairs of a group go to lower experts; y: how many go to this expert.
using Count = int2;

// x: the bucket of a pair; y: how many pairs of the group are before it in that bucket.
using Place = int2;

__device__ __forceinline__ int bucket_of(long long expert) {
  if (expert < 0) return 0;
  return expert < kBuckets - 2 ? static_cast<int>(expert) + 1 : kBuckets - 1;
}

// Experts given by index, [T, topk] with any strides.
template <typename T>
struct Indices {
  const T* experts;
  int topk;
  long long token_step, slot_step;

  __device__ __forceinline__ long long of_pair(int pair) const {
    const unsigned token = static_cast<unsigned>(pair) / static_cast<unsigned>(topk);
    const int slot = pair - static_cast<int>(token) * topk;
    return experts[token * token_step + slot * slot_step];
  }
};

// Experts given by a mask, [T, E] with any strides.
struct Routing {
  const unsigned char* bytes;
  long long token_step, expert_step;

  __device__ __forceinline__ bool goes(int token, int expert) const {
    return bytes[token * token_step + expert * expert_step] != 0;
  }
};

__device__ __forceinline__ int over_warp(int value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, offset);
  }
  return value;
}

// The row at which the group's pairs of an expert begin; called by a whole warp. The reads bypass
// L1, because the previous kernel wrote the counts, possibly while this one was starting.
__device__ __forceinline__ int begin_of(const Count* counts, int expert, int group, int groups) {
  int row = 0;
#pragma unroll
  for (int first = 0; first < kMostGroups; first += 32) {
    const int at = first + static_cast<int>(threadIdx.x) % 32;
    if (at < groups) {
      const Count count = __ldcg(counts + static_cast<long long>(expert) * groups + at);
      row += count.x + (at < group ? count.y : 0);
    }
  }
  return over_warp(row);
}

// Whether a shared bucket has more than one distinct index; called by a whole warp. `extremes`
// are each group's lowest and highest index in the first bucket, then those in the last bucket.
__device__ __forceinline__ bool is_mixed(const long long* extremes, bool last, int groups) {
  extremes += last ? 2 * groups : 0;
  long long lowest = kLargest;
  long long highest = -kLargest - 1;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % 32; at < groups; at += 32) {
    const long long low = __ldcg(extremes + at);
    const long long high = __ldcg(extremes + groups + at);
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const long long low = __shfl_xor_sync(kWholeWarp, lowest, offset);
    const long long high = __shfl_xor_sync(kWholeWarp, highest, offset);
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
  }
  return lowest < highest;
}

// The row of a pair, by comparison with all others; called by a whole warp.
template <typename T>
__device__ int row_by_comparison(const Indices<T>& indices, int pair, int pairs) {
  const long long expert = indices.of_pair(pair);
  int row = 0;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % 32; at < pairs; at += 32) {
    const long long other = indices.of_pair(at);
    row += other < expert || (other == expert && at < pair);
  }
  return over_warp(row);
}

}  // namespace te_fl
