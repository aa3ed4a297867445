// Thread block clusters and dependent launches (sm_90 and later).
//
// On older chips the functions compile to nothing; the host never asks for a cluster
// or a dependent launch there.

#pragma once

namespace te_fl {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes `value` where `own` lies, but in the shared memory of block `rank`.
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

// Lets the next kernel of the stream start, if it was launched as a dependent one.
__device__ __forceinline__ void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has finished and its writes can be seen.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <typename A>
__device__ __forceinline__ void store_remote(A*, int, A) {}
__device__ __forceinline__ void release_dependents() {}
__device__ __forceinline__ void wait_for_predecessor() {}

#endif

}  // namespace te_fl
