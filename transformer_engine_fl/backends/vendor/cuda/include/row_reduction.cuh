// Sums, and largest values, over all threads that share a row.
//
// A row belongs to Lanes threads of each of Cluster blocks. Up to 32 lanes exchange by
// shuffles alone; more meet in shared memory behind one barrier; with a cluster each
// warp's result is written to every block of it, behind one barrier of the cluster. The
// order of operations depends on Lanes and Cluster only, and every thread gets the same
// bits.

#pragma once

#include "cluster.cuh"

namespace te_fl {

struct Sum {
  template <typename A>
  static __device__ __forceinline__ A combine(A a, A b) {
    return a + b;
  }
};

// Of a NaN and a number the number, as fmax has it.
struct Max {
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ double combine(double a, double b) { return fmax(a, b); }
};

// Call from all threads of the block, one object for all reductions of a kernel. K values
// travel together.
template <int Lanes, int Cluster, int K, typename A>
class RowReduction {
  static_assert((Lanes & (Lanes - 1)) == 0, "lanes are halved");
  static_assert((Cluster & (Cluster - 1)) == 0, "slots are halved");
  static_assert(Cluster == 1 || Lanes >= 32, "a cluster shares whole warps");
  static constexpr int kWarps = Lanes > 32 ? Lanes / 32 : 1;
  static constexpr int kSlots = kWarps * Cluster;

 public:
  // The other blocks may only be written to once they run; the wait for that is left
  // to the first reduction, behind the first loads.
  __device__ __forceinline__ RowReduction() {
    if constexpr (Cluster > 1) cluster_arrive();
  }

  __device__ __forceinline__ void sum(A (&value)[K]) { reduce<Sum>(value); }
  __device__ __forceinline__ void max(A (&value)[K]) { reduce<Max>(value); }

 private:
  template <typename Operation>
  __device__ __forceinline__ void reduce(A (&value)[K]) {
    halve<Operation, (Lanes < 32 ? Lanes : 32)>(value);
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
        for (int at = 32; at < kSlots; at += 32) {
          value[k] = Operation::combine(value[k], slots[turn_][k][at + lane]);
        }
      }
      halve<Operation, (kSlots < 32 ? kSlots : 32)>(value);
      turn_ ^= 1;
    }
  }

  template <typename Operation, int Width>
  static __device__ __forceinline__ void halve(A (&value)[K]) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        value[k] = Operation::combine(value[k], __shfl_xor_sync(0xffffffffu, value[k], offset));
      }
    }
  }

  int turn_ = 0;
  bool joined_ = false;
};

}  // namespace te_fl
