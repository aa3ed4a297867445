// What the warps of all blocks of a cluster exchange, without a barrier of the cluster.
//
// That barrier waits until all that its threads have stored, also to global memory, can be
// seen. Here values say themselves when they are there, so that a row's result is still on its
// way while the next row's values are exchanged.

#pragma once

#include "cluster.cuh"

namespace te_fl {

// Call from all threads of all blocks, one object for all that a kernel tells, of K values at
// a time of each of a block's Warps, or with Warps = 1 of its first one. Each lane gets kOwn of
// what all of them posted, the same ones whichever warp it is in; of fewer than 32 several lanes
// get the same.
template <int Warps, int Cluster, int K, typename A>
class ClusterExchange {
  static constexpr int kSlots = Warps * Cluster;
  static_assert(Cluster == 1 || (kSlots < 32 ? 32 % kSlots == 0 : kSlots % 32 == 0),
                "every lane gets as many");

 public:
  static constexpr int kOwn = kSlots < 32 ? 1 : kSlots / 32;

  // The other blocks may only be written to once they run; the wait for that is left to the
  // first exchange, behind the first loads.
  __device__ __forceinline__ ClusterExchange() {
    if constexpr (Cluster > 1) {
      if (threadIdx.x == 0) prepare_arrivals(arrivals(), 2);
      __syncwarp();
      cluster_join();
    }
  }

  // One exchange. All of it at once, or in two halves, so that something can be done meanwhile:
  // who posts must wait before it posts again, and before it returns.
  __device__ __forceinline__ void operator()(const A (&value)[K], A (&parts)[kOwn][K]) {
    post(value);
    wait(parts);
  }

  // Two sets of slots in alternation: who writes a set again has waited for the other set from every
  // warp, which posted it only after it had read this one.
  __device__ __forceinline__ void post(const A (&value)[K]) {
    if (!joined_) cluster_wait();
    joined_ = true;
    const unsigned set = phase_ & 1;
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

  __device__ __forceinline__ void wait(A (&parts)[kOwn][K]) {
    const unsigned set = phase_ & 1;
    wait_for(arrivals() + set, phase_ >> 1 & 1);
    ++phase_;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) parts[i][k] = slots()[set][k][i * 32 + lane % kSlots];
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
    __shared__ Slots posted;
    return posted;
  }

  unsigned phase_ = 0;
  bool joined_ = false;
};

}  // namespace te_fl
