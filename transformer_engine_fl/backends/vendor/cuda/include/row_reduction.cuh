// Sums, maxima and moments over all threads that share a row.
//
// A row belongs to Lanes threads of each of Cluster blocks. Up to 32 lanes exchange by shuffles
// alone; more lanes exchange through shared memory behind one barrier. In a cluster each warp's
// result is written to every block, behind a cluster barrier (kBehindBarrier) or asynchronously as
// in cluster_exchange.cuh (kByWarps); or each block's result is (kByBlocks). The barrier is faster
// as long as a kernel has stored nothing. kByBlocks takes a block barrier more, and leaves each
// warp fewer results to merge. The order of operations depends on Lanes, Cluster, Mode and OfWarps
// only, and every thread gets the same bits.

#pragma once

#include "cluster.cuh"
#include "cluster_exchange.cuh"
#include "numeric.cuh"

namespace te_fl {

struct Sum {
  template <typename A>
  static __device__ __forceinline__ A nothing() {
    return A(0);
  }

  template <typename A, int K>
  static __device__ __forceinline__ void merge(A (&own)[K], const A (&other)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k) own[k] += other[k];
  }
};

// As fmax, the maximum of a NaN and a number is the number.
struct Max {
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ double combine(double a, double b) { return fmax(a, b); }

  template <typename A>
  static __device__ __forceinline__ A nothing() {
    return lowest<A>();
  }

  template <typename A, int K>
  static __device__ __forceinline__ void merge(A (&own)[K], const A (&other)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k) own[k] = combine(own[k], other[k]);
  }
};

// Mean and variance in one reduction, without the cancellation of a mean of squares: merging two
// parts adds a term for the distance of their means. Two values are (mean, variance) of parts of
// equal size, three are (count, sum, sum of squared deviations) of parts of any size. Symmetric in
// its arguments, so that both sides of a shuffle compute the same bits.
struct Moments {
  template <typename A>
  static __device__ __forceinline__ A nothing() {  // a part of no values
    return A(0);
  }

  template <typename A>
  static __device__ __forceinline__ void merge(A (&own)[2], const A (&other)[2]) {
    const A distance = own[0] - other[0];
    own[0] = A(0.5) * (own[0] + other[0]);
    own[1] = A(0.5) * (own[1] + other[1]) + A(0.25) * (distance * distance);
  }

  template <typename A>
  static __device__ __forceinline__ void merge(A (&own)[3], const A (&other)[3]) {
    // The distance of the means times both counts: exactly 0 if the means are equal.
    const A distance = product(own[1], other[0]) - product(other[1], own[0]);
    const A counts = own[0] * other[0];
    const A count = own[0] + other[0];
    const A weight = reciprocal(counts > 0 ? counts * count : A(1));
    own[2] = (own[2] + other[2]) + distance * (distance * weight);
    own[1] += other[1];
    own[0] = count;
  }
};

// Whether merging K values with nothing() leaves them as they are.
template <typename Operation, int K>
constexpr bool kKeeps = true;
template <>
constexpr bool kKeeps<Moments, 2> = false;

constexpr __host__ __device__ int next_power_of_two(int least_one) {
  int found = 1;
  while (found < least_one) found *= 2;
  return found;
}

// Butterfly reduction over Width consecutive lanes of a warp; each lane gets the result.
template <typename Operation, int Width, typename A, int K>
__device__ __forceinline__ void halve(A (&value)[K]) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) {
    A other[K];
#pragma unroll
    for (int k = 0; k < K; ++k) other[k] = __shfl_xor_sync(0xffffffffu, value[k], offset);
    Operation::merge(value, other);
  }
}

// Pairwise reduction over a thread's N parts: if N is a power of two, merged parts are equally
// large.
template <typename Operation, int N, typename A, int K>
__device__ __forceinline__ void merge_parts(A (&parts)[N][K], A (&value)[K]) {
#pragma unroll
  for (int apart = 1; apart < N; apart *= 2) {
#pragma unroll
    for (int i = 0; i + apart < N; i += 2 * apart) Operation::merge(parts[i], parts[i + apart]);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = parts[0][k];
}

// How the blocks that share a row exchange results. kThroughMemory is for blocks that form no
// cluster: see memory_exchange.cuh.
enum ExchangeMode { kBehindBarrier, kByWarps, kByBlocks, kThroughMemory };

// Call from all threads of the block, with one object for all reductions of a kernel. K values are
// reduced together.
template <int Lanes, int Cluster, int K, typename A, ExchangeMode Mode = kBehindBarrier>
class RowReduction {
  static_assert(Cluster == 1 && Lanes % 32 == 0 || (Lanes & (Lanes - 1)) == 0,
                "Lanes must be a power of two, or whole warps without a cluster");
  static_assert((Cluster & (Cluster - 1)) == 0, "Cluster must be a power of two");
  static_assert(Cluster == 1 || Lanes >= 32, "a cluster needs whole warps");
  static constexpr int kWarps = Lanes > 32 ? Lanes / 32 : 1;
  static constexpr bool kAsync = Mode != kBehindBarrier && Cluster > 1;
  static constexpr bool kOfBlocks = kAsync && Mode == kByBlocks;
  static constexpr int kSenders = kOfBlocks ? 1 : kWarps;  // warps of a block that post
  static constexpr int kSlots = kSenders * Cluster;
  static constexpr int kOwn = kSlots < 32 ? 1 : kSlots / 32;
  static constexpr int kReducedLanes = next_power_of_two(least(kSlots, 32));

 public:
  // Blocks may be written to only once they run. The wait for that is left to the first reduction,
  // behind the first loads.
  __device__ __forceinline__ RowReduction() {
    if constexpr (Cluster > 1 && !kAsync) cluster_join();
  }

  __device__ __forceinline__ void sum(A (&value)[K]) { reduce<Sum>(value); }
  __device__ __forceinline__ void max(A (&value)[K]) { reduce<Max>(value); }
  __device__ __forceinline__ void moments(A (&value)[K]) { reduce<Moments>(value); }

  // OfWarps: the values are already reduced over the lanes of a warp that share a row.
  template <typename Operation, bool OfWarps = false>
  __device__ __forceinline__ void reduce(A (&value)[K]) {
    begin<Operation, OfWarps>(value);
    end<Operation>(value);
  }

  // The two halves of a reduction, between which other work can be done while the blocks of a
  // cluster wait for each other. Each begin needs its end, with the same values, before the next.
  template <typename Operation, bool OfWarps = false>
  __device__ __forceinline__ void begin(A (&value)[K]) {
    if constexpr (!OfWarps) halve<Operation, (Lanes < 32 ? Lanes : 32)>(value);
    if constexpr (kOfBlocks && kWarps > 1) merge_in_block<Operation>(value);
    if constexpr (kAsync) {
      exchange_.post(value);
    } else if constexpr (kSlots > 1) {
      A(&slots)[2][K][kSlots] = exchanged<Operation>();
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      if constexpr (Cluster > 1) {
        if (!joined_) cluster_wait();
        joined_ = true;
        const int own = cluster_rank() * kWarps + warp;
        if (lane < Cluster) {
#pragma unroll
          for (int k = 0; k < K; ++k) store_remote(&slots[set_][k][own], lane, value[k]);
        }
        __syncwarp();
        cluster_arrive();
      } else if (lane == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) slots[set_][k][warp] = value[k];
      }
    }
  }

  template <typename Operation>
  __device__ __forceinline__ void end(A (&value)[K]) {
    static_assert(kSlots % kReducedLanes == 0 || kKeeps<Operation, K>,
                  "padding slots would change the result");
    if constexpr (kSlots > 1) {
      A parts[kOwn][K];
      if constexpr (kAsync) {
        exchange_.wait(parts);
      } else {
        if constexpr (Cluster > 1) cluster_wait();
        else __syncthreads();
        const A(&slots)[K][kSlots] = exchanged<Operation>()[set_];
        set_ ^= 1;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int k = 0; k < K; ++k) {
            if constexpr (kSlots % kReducedLanes == 0) {
              parts[i][k] = slots[k][i * 32 + threadIdx.x % 32 % kSlots];
            } else {
              const int slot = threadIdx.x % kReducedLanes;
              parts[i][k] = slot < kSlots ? slots[k][slot] : Operation::template nothing<A>();
            }
          }
        }
      }
      merge_parts<Operation>(parts, value);
      halve<Operation, kReducedLanes>(value);
    }
  }

 private:
  // Reduces over a block; only the first warp gets the result. Two sets of slots alternate: a warp
  // that writes a set again has passed the barrier of the other set, which the first warp reached
  // only after it had read this one.
  template <typename Operation>
  __device__ __forceinline__ void merge_in_block(A (&value)[K]) {
    __shared__ A slots[2][K][kWarps];
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) slots[set_][k][threadIdx.x / 32] = value[k];
    }
    __syncthreads();
    if (threadIdx.x < 32) {
#pragma unroll
      for (int k = 0; k < K; ++k) value[k] = slots[set_][k][lane % kWarps];
      halve<Operation, kWarps>(value);
    }
    set_ ^= 1;
  }

  // Two sets of slots alternate: a warp that writes a set again has passed the barrier of the other
  // set, so all warps have read this one.
  template <typename Operation>
  static __device__ __forceinline__ A (&exchanged())[2][K][kSlots] {
    __shared__ A slots[2][K][kSlots];
    return slots;
  }

  int set_ = 0;
  bool joined_ = false;
  ClusterExchange<(kAsync ? kSenders : 1), (kAsync ? Cluster : 1), K, A> exchange_;
};

}  // namespace te_fl
