// Counting the pairs of tokens and experts, from which a row id map follows: see row_maps.cuh.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (moe.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   TI     type of the experts' indices
//   LANES  experts that a block of `count_mask` processes in parallel, a power of two
//
// A block counts a group. There are no atomic additions, and sums of integers are exact in any
// order. The dependent kernel, which places pairs, may start at once: it waits itself.

#include "cluster.cuh"
#include "numeric.cuh"
#include "row_maps.cuh"

using namespace te_fl;

namespace {

// Exclusive prefix sum of the threads' values, and their total; called by the whole block.
template <int Warps>
__device__ __forceinline__ int sum_before(int value, int (&sums)[Warps], int& total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int upto = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    before += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  __syncthreads();  // before `sums` is written again
  return before + upto - value;
}

#ifdef KERNEL_count_indices

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The lowest and the highest expert index in a bucket.
struct Range {
  long long lowest, highest;

  __device__ __forceinline__ void add(long long low, long long high) {
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
  }
  __device__ __forceinline__ void over_warp() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const long long low = __shfl_xor_sync(kWholeWarp, lowest, offset);
      const long long high = __shfl_xor_sync(kWholeWarp, highest, offset);
      add(low, high);
    }
  }
};

constexpr Range kNothing{kLargest, -kLargest - 1};

#endif

}  // namespace

#ifdef KERNEL_count_indices

// A warp has a part of the group and a line of `held`: first how many pairs of each bucket are in
// its part, then how many are before its part.
extern "C" __global__ void __launch_bounds__(kThreads)
    count_indices(const TI* __restrict__ experts, Place* __restrict__ places,
                  Count* __restrict__ counts, long long* __restrict__ extremes, int pairs,
                  int topk, int each, long long token_step, long long slot_step) {
  __shared__ int held[kWarps][kBuckets];
  __shared__ int sums[kWarps];
  __shared__ Range ranges[2][kWarps];
  release_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = blockIdx.x;
  const int groups = gridDim.x;
  const int part = each / kWarps;
  const int first = group * each + warp * part;
  const int last = first + part < pairs ? first + part : pairs;
  const Indices<TI> indices{experts, topk, token_step, slot_step};

  for (int bucket = lane; bucket < kBuckets; bucket += 32) held[warp][bucket] = 0;
  __syncwarp();
  Range negative = kNothing;
  Range large = kNothing;
  for (int at = first; at < last; at += 32) {
    const int pair = at + lane;
    const bool exists = pair < last;
    const long long expert = exists ? indices.of_pair(pair) : 0;
    const int bucket = exists ? bucket_of(expert) : -1;
    const unsigned same = __match_any_sync(kWholeWarp, bucket);
    if (exists && lane == __ffs(same) - 1) held[warp][bucket] += __popc(same);
    if (bucket == 0) negative.add(expert, expert);
    if (bucket == kBuckets - 1) large.add(expert, expert);
    __syncwarp();
  }
  negative.over_warp();
  large.over_warp();
  if (lane == 0) {
    ranges[0][warp] = negative;
    ranges[1][warp] = large;
  }
  __syncthreads();

  constexpr int kEach = kBuckets / kThreads;
  int count[kEach];
  int own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int bucket = threadIdx.x * kEach + i;
    count[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int warp_count = held[w][bucket];
      held[w][bucket] = count[i];
      count[i] += warp_count;
    }
    own += count[i];
  }
  int total;
  int lower = sum_before<kWarps>(own, sums, total);  // its barriers also order `held`
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const long long bucket = threadIdx.x * kEach + i;
    counts[bucket * groups + group] = make_int2(lower, count[i]);
    lower += count[i];
  }
  if (threadIdx.x < 2) {
    Range all = ranges[threadIdx.x][0];
    for (int w = 1; w < kWarps; ++w) {
      all.add(ranges[threadIdx.x][w].lowest, ranges[threadIdx.x][w].highest);
    }
    long long* to = extremes + 2 * threadIdx.x * groups + group;
    to[0] = all.lowest;
    to[groups] = all.highest;
  }

  for (int at = first; at < last; at += 32) {
    const int pair = at + lane;
    const bool exists = pair < last;
    const int bucket = exists ? bucket_of(indices.of_pair(pair)) : -1;
    const unsigned same = __match_any_sync(kWholeWarp, bucket);
    const int before = exists ? held[warp][bucket] : 0;
    __syncwarp();
    if (exists) {
      places[pair] = make_int2(bucket, before + __popc(same & ((1u << lane) - 1)));
      if (lane == __ffs(same) - 1) held[warp][bucket] = before + __popc(same);
    }
    __syncwarp();
  }
}

#endif  // KERNEL_count_indices

#ifdef KERNEL_count_mask

// `ranks` [T, E]: how many pairs of the same expert and group are before a pair. The counts have
// one line more than there are experts: how many pairs each group has, as Count::x.
extern "C" __global__ void __launch_bounds__(1024)
    count_mask(const unsigned char* __restrict__ routed, int* __restrict__ ranks,
               Count* __restrict__ counts, int tokens, int experts, int each,
               long long token_step, long long expert_step) {
  constexpr int kParts = 1024 / LANES;
  __shared__ int parts[kParts][LANES];
  __shared__ int sums[32];
  release_dependents();
  const int lane = threadIdx.x % LANES;
  const int part = threadIdx.x / LANES;
  const int group = blockIdx.x;
  const long long groups = gridDim.x;
  const int end = (group + 1) * each < tokens ? (group + 1) * each : tokens;
  const int share = (each + kParts - 1) / kParts;
  const int first = group * each + part * share;
  const int last = first + share < end ? first + share : end;
  const Routing routing{routed, token_step, expert_step};

  int lower = 0;
  for (int start = 0; start < experts; start += LANES) {
    const int expert = start + lane;
    const bool known = expert < experts;
    int found = 0;
    if (known) {
#pragma unroll 8
      for (int token = first; token < last; ++token) found += routing.goes(token, expert);
    }
    parts[part][lane] = found;
    __syncthreads();
    int rank = 0;
    int own = 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      rank += p < part ? parts[p][lane] : 0;
      own += parts[p][lane];
    }
    int total;
    const int before = sum_before<32>(part == 0 ? own : 0, sums, total);
    if (known) {
      if (part == 0) counts[expert * groups + group] = make_int2(lower + before, own);
#pragma unroll 8
      for (int token = first; token < last; ++token) {
        if (routing.goes(token, expert)) {
          ranks[static_cast<long long>(token) * experts + expert] = rank++;
        }
      }
    }
    lower += total;
  }
  if (threadIdx.x == 0) counts[experts * groups + group] = make_int2(lower, 0);
}

#endif  // KERNEL_count_mask
