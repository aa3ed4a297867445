// An exchange of values among the warps of all blocks of a cluster, without a cluster barrier.
//
// A cluster barrier waits until all stores of its threads are visible, also those to global memory.
// Here values are sent by st.async, which counts the bytes on an mbarrier of the receiving block,
// so a row's result may still be in flight while the next row's values are exchanged.

#pragma once

#include "cluster.cuh"

namespace te_fl {

// Call from all threads of all blocks, with one object for all exchanges of a kernel. Each of a
// block's Warps, or with Warps = 1 its first warp, posts K values at a time. Each lane gets kOwn of
// the Warps * Cluster posts, the same ones in every warp; of fewer than 32 posts several lanes get
// the same one.
template <int Warps, int Cluster, int K, typename A>
class ClusterExchange {
  static constexpr int kSlots = Warps * Cluster;
  static_assert(Cluster == 1 || (kSlots < 32 ? 32 % kSlots == 0 : kSlots % 32 == 0),
                "the slots must divide evenly among the lanes");

 public:
  static constexpr int kOwn = kSlots < 32 ? 1 : kSlots / 32;

  // Blocks may be written to only once they run. The wait for that is left to the first exchange,
  // behind the first loads.
  __device__ __forceinline__ ClusterExchange() {
    if constexpr (Cluster > 1) {
      if (threadIdx.x == 0) prepare_arrivals(arrivals(), 2);
      __syncwarp();
      cluster_join();
    }
  }

  // One exchange, or with post and wait its two halves, between which other work can be done. A
  // thread that has posted must wait before it posts again, and before it returns.
  __device__ __forceinline__ void operator()(const A (&value)[K], A (&parts)[kOwn][K]) {
    post(value);
    wait(parts);
  }

  // Two sets of slots alternate. A warp that writes a set again has waited for the other set from
  // every warp, and each of those posted it only after it had read this set.
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
