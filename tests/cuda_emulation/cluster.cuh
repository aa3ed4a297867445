// The twin of the set's cluster.cuh on the CPU.

#pragma once

namespace te_fl {

inline int cluster_rank() { return static_cast<int>(emulation::place->rank); }
inline void cluster_arrive() { emulation::arrive_at_cluster(); }
inline void cluster_wait() { emulation::wait_for_cluster(); }

template <typename T>
inline void store_remote(T* own, int rank, T value) {
  *reinterpret_cast<T*>(emulation::in_block(own, rank)) = value;
}

inline void release_dependents() {}
inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }

}  // namespace te_fl
