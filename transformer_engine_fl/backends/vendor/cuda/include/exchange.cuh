// What the warps of all blocks of a cluster tell each other, without a barrier of the cluster.
//
// That barrier waits until all that its threads have stored, also to global memory, can be
// seen. Here values say themselves when they are there, so that a row's result is still on its
// way while the next row's values are exchanged.

#pragma once

#include "cluster.cuh"

namespace te_fl {

// Call from all threads of all blocks, one object for all that a kernel tells, of K values at
// a time of each of a block's Warps, or with Warps = 1 of its first one. Each lane gets kOwn of
// what all of them told, the same ones whichever warp it is in; of fewer than 32 several lanes
// get the same.
template <int Warps, int Cluster, int K, typename A>
class Exchange {
  static constexpr int kSlots = Warps * Cluster;
  static_assert(Cluster == 1 || (kSlots < 32 ? 32 % kSlots == 0 : kSlots % 32 == 0),
                "every lane gets as many");

 public:
  static constexpr int kOwn = kSlots < 32 ? 1 : kSlots / 32;

  // The other blocks may only be written to once they run; the wait for that is left to the
  // first turn, behind the first loads.
  __device__ __forceinline__ Exchange() {
    if constexpr (Cluster > 1) {
      if (threadIdx.x == 0) prepare_arrivals(arrivals(), 2);
      __syncwarp();
      cluster_join();
    }
  }

  // One turn. All of it at once, or in two halves, so that something can be done meanwhile:
  // who tells must hear before it tells again, and before it returns.
  __device__ __forceinline__ void operator()(const A (&value)[K], A (&heard)[kOwn][K]) {
    tell(value);
    hear(heard);
  }

  // Two sets of slots in turn: who writes a set again has heard the other set from every
  // warp, which told it only after it had read this one.
  __device__ __forceinline__ void tell(const A (&value)[K]) {
    if (!joined_) cluster_wait();
    joined_ = true;
    const unsigned set = turn_ & 1;
    const int lane = threadIdx.x % 32;
    const int own = cluster_rank() * Warps + static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) expect_bytes(arrivals() + set, kSlots * K * sizeof(A));
    if (lane < Cluster && (Warps > 1 || threadIdx.x < 32)) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        send(&slots()[set][k][own], lane, value[k], arrivals() + set);
      }
    }
  }

  __device__ __forceinline__ void hear(A (&heard)[kOwn][K]) {
    const unsigned set = turn_ & 1;
    wait_for(arrivals() + set, turn_ >> 1 & 1);
    ++turn_;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) heard[i][k] = slots()[set][k][i * 32 + lane % kSlots];
    }
  }

 private:
  using Counter = unsigned long long;
  using Slots = A[2][K][kSlots];
  static __device__ __forceinline__ Counter* arrivals() {
    __shared__ Counter counts[2];
    return counts;
  }
  static __device__ __forceinline__ Slots& slots() {
    __shared__ Slots told;
    return told;
  }

  unsigned turn_ = 0;
  bool joined_ = false;
};

}  // namespace te_fl
