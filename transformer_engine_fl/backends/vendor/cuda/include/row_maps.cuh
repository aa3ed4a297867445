// Row id maps: how pairs of a token and an expert are counted, and which row that gives each.
//
// Pairs are counted in groups that follow one another (row_maps.cu); whoever moves a token
// then works out the rows of its pairs (moe.cu). For each expert and group there is a Count.
// A group's pairs of an expert begin at the row that is the sum of `lower` over all groups
// and of `own` over those before. Counts are [expert][group], so that a warp reads those of
// an expert side by side.
//
// Experts given by index are numbers of any size. Those from 0 on are their own buckets; all
// that are negative share the first bucket, and all that are too large share the last. That
// is right if a bucket that is shared has one number in it; else its pairs are compared with
// all others.

#pragma once

namespace te_fl {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kBuckets = 1024;
constexpr int kMostGroups = 64;
constexpr long long kLargest = 0x7fffffffffffffffll;

// How many pairs of a group go to lower experts, and to this one: x and y of an int2.
using Count = int2;

// The bucket of a pair, and how many pairs of the group it has before it there.
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

// Where a mask says which experts a token goes to, [T, E] with any strides.
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

// The row at which the group's pairs of an expert begin; by a whole warp. What is counted
// was written by the kernel before, possibly while this one was starting: past L1.
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

// Whether a bucket that is shared has two numbers in it; by a whole warp. `extremes` are
// the lowest and highest number of the first bucket and those of the last, for each group.
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

// The row of a pair from all others; by a whole warp.
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
