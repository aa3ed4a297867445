// Thread block clusters and programmatic dependent launches (sm_90 and later), and flagged slots in
// global memory through which blocks exchange values.
//
// Before sm_90 the functions for clusters and dependent launches compile to nothing; the host never
// asks for either there.

#pragma once

namespace te_fl {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Signals that this block runs. Relaxed: a release would wait until the threads' earlier stores are
// visible to the whole device.
__device__ __forceinline__ void cluster_join() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes `value` to the address of `own` in the shared memory of block `rank`.
__device__ __forceinline__ void store_remote(float* own, int rank, float value) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "  st.shared::cluster.f32 [there], %2; }" ::"r"(address),
      "r"(rank), "f"(value)
      : "memory");
}

__device__ __forceinline__ void store_remote(double* own, int rank, double value) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "  st.shared::cluster.f64 [there], %2; }" ::"r"(address),
      "r"(rank), "d"(value)
      : "memory");
}

// Initialises counters (mbarriers) of the bytes that other blocks send. Call from one thread; the
// other threads may use them after the next cluster barrier, for which cluster_join is enough.
__device__ __forceinline__ void prepare_arrivals(unsigned long long* counters, int count) {
  for (int i = 0; i < count; ++i) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(counters + i));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Sets how many bytes a phase has. Call from one thread, before or after bytes have arrived.
__device__ __forceinline__ void expect_bytes(unsigned long long* counter, int bytes) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(counter));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}

// Writes `value` to the address of `own` in the shared memory of block `rank`, asynchronously, and
// counts its bytes on `counter` of that block.
__device__ __forceinline__ void send(float* own, int rank, float value,
                                     unsigned long long* counter) {
  asm volatile(
      "{ .reg .u32 there, count; mapa.shared::cluster.u32 there, %0, %2;\n"
      "  mapa.shared::cluster.u32 count, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [count]; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(own))),
      "r"(static_cast<unsigned>(__cvta_generic_to_shared(counter))), "r"(rank), "f"(value)
      : "memory");
}

__device__ __forceinline__ void send(double* own, int rank, double value,
                                     unsigned long long* counter) {
  asm volatile(
      "{ .reg .u32 there, count; mapa.shared::cluster.u32 there, %0, %2;\n"
      "  mapa.shared::cluster.u32 count, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [there], %3, [count]; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(own))),
      "r"(static_cast<unsigned>(__cvta_generic_to_shared(counter))), "r"(rank), "d"(value)
      : "memory");
}

// Waits until all bytes of a phase have arrived. `phase` is its parity: 0 and 1 alternate.
__device__ __forceinline__ void wait_for(unsigned long long* counter, unsigned phase) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(counter));
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred done;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(address), "r"(phase)
        : "memory");
  } while (!done);
}

// Lets the next kernel of the stream start, if it is a dependent launch.
__device__ __forceinline__ void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has finished and its writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_join() {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <typename A>
__device__ __forceinline__ void store_remote(A*, int, A) {}
__device__ __forceinline__ void prepare_arrivals(unsigned long long*, int) {}
__device__ __forceinline__ void expect_bytes(unsigned long long*, int) {}
template <typename A>
__device__ __forceinline__ void send(A*, int, A, unsigned long long*) {}
__device__ __forceinline__ void wait_for(unsigned long long*, unsigned) {}
__device__ __forceinline__ void release_dependents() {}
__device__ __forceinline__ void wait_for_predecessor() {}

#endif

// 32 bits of value, and in the upper half the epoch in which they were posted. The reader sees from
// the slot itself that it has been written, so no memory ordering is needed. All blocks that wait
// for each other's slots must be resident at once. Slots are posted by an atomic exchange whose
// result is unused: it becomes visible sooner than a store.
using FlaggedSlot = unsigned long long;

__device__ __forceinline__ void post_slot(FlaggedSlot* to, unsigned epoch, unsigned bits) {
  FlaggedSlot before;
  asm volatile(
      "{ .reg .b64 slot;\n"
      "  mov.b64 slot, {%2, %3};\n"
      "  atom.relaxed.gpu.global.exch.b64 %0, [%1], slot; }"
      : "=l"(before)
      : "l"(to), "r"(bits), "r"(epoch)
      : "memory");
}

// blockIdx.x, read anew at each call: so neither it nor a value derived from it occupies a register
// between calls.
__device__ __forceinline__ unsigned reread_block_index() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

__device__ __forceinline__ void prefetch_slot(const FlaggedSlot* slot) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(slot));
}

// Reads K neighbouring slots in one access, whatever their epochs.
template <int K>
__device__ __forceinline__ void read_slots(const FlaggedSlot* from, unsigned (&bits)[K],
                                              unsigned (&epochs)[K]) {
  if constexpr (K == 1) {
    asm volatile(
        "{ .reg .b64 slot;\n"
        "  ld.relaxed.gpu.global.b64 slot, [%2];\n"
        "  mov.b64 {%0, %1}, slot; }"
        : "=r"(bits[0]), "=r"(epochs[0])
        : "l"(from));
  } else {
    static_assert(K == 2, "K must be 1 or 2");
    asm volatile(
        "{ .reg .b64 one, other;\n"
        "  ld.relaxed.gpu.global.v2.b64 {one, other}, [%4];\n"
        "  mov.b64 {%0, %1}, one;\n"
        "  mov.b64 {%2, %3}, other; }"
        : "=r"(bits[0]), "=r"(epochs[0]), "=r"(bits[1]), "=r"(epochs[1])
        : "l"(from));
  }
}

// Waits for K slots at each of N places per lane. Call from whole warps: all lanes of a warp leave
// the loop together, or they would run the code behind it diverged.
template <int N, int K>
__device__ __forceinline__ void wait_for_slots(const FlaggedSlot* slots, const int (&places)[N],
                                               unsigned epoch, unsigned (&found)[N][K]) {
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      unsigned epochs[K];
      read_slots(slots + places[i], found[i], epochs);
#pragma unroll
      for (int k = 0; k < K; ++k) there = there && epochs[k] == epoch;
    }
  } while (!__all_sync(0xffffffffu, there));
}

}  // namespace te_fl
