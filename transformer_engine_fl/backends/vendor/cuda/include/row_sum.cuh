// The sum over all threads that share a row.
//
// A row belongs to Lanes threads of each of Cluster blocks. Up to 32 lanes exchange by
// shuffles alone; more meet in shared memory behind one barrier; with a cluster each
// warp's sum is written to every block of it, behind one barrier of the cluster. The
// order of additions depends on Lanes and Cluster only, and every thread gets the same
// bits.

#pragma once

#include "cluster.cuh"

namespace te_fl {

// Call from all threads of the block. K sums travel together.
template <int Lanes, int Cluster, int K, typename A>
class RowSum {
  static_assert((Lanes & (Lanes - 1)) == 0, "lanes are halved");
  static_assert((Cluster & (Cluster - 1)) == 0, "slots are halved");
  static_assert(Cluster == 1 || Lanes >= 32, "a cluster shares whole warps");
  static constexpr int kWarps = Lanes > 32 ? Lanes / 32 : 1;
  static constexpr int kSlots = kWarps * Cluster;

 public:
  // The other blocks may only be written to once they run; the wait for that is left
  // to the first sum, behind the first loads.
  __device__ __forceinline__ RowSum() {
    if constexpr (Cluster > 1) cluster_arrive();
  }

  __device__ __forceinline__ void operator()(A (&value)[K]) {
    halve<(Lanes < 32 ? Lanes : 32)>(value);
    if constexpr (kSlots > 1) {
      // Two sets of slots in turn: who writes a set again has passed the barrier of
      // the other set, so everyone has read this one.
      __shared__ A slots[2][K][kSlots];
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      if constexpr (Cluster > 1) {
        if (!joined_) cluster_wait();
        joined_ = true;
        const int own = cluster_rank() * kWarps + warp;
        if (lane < Cluster) {
#pragma unroll
          for (int k = 0; k < K; ++k) store_remote(&slots[turn_][k][own], lane, value[k]);
        }
        __syncwarp();
        cluster_arrive();
        cluster_wait();
      } else {
        if (lane == 0) {
#pragma unroll
          for (int k = 0; k < K; ++k) slots[turn_][k][warp] = value[k];
        }
        __syncthreads();
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        value[k] = slots[turn_][k][lane % kSlots];
#pragma unroll
        for (int at = 32; at < kSlots; at += 32) value[k] += slots[turn_][k][at + lane];
      }
      halve<(kSlots < 32 ? kSlots : 32)>(value);
      turn_ ^= 1;
    }
  }

 private:
  template <int Width>
  static __device__ __forceinline__ void halve(A (&value)[K]) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) value[k] += __shfl_xor_sync(0xffffffffu, value[k], offset);
    }
  }

  int turn_ = 0;
  bool joined_ = false;
};

}  // namespace te_fl
