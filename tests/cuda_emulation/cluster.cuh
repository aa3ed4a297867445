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

// Where the set counts bytes, the blocks of a cluster wait for each other.
inline void prepare_arrivals(unsigned long long*, int) {}
inline void expect_bytes(unsigned long long*, int) {}

template <typename T>
inline void send(T* own, int rank, T value, unsigned long long*) {
  store_remote(own, rank, value);
}

inline void wait_for(unsigned long long*, unsigned) {
  emulation::arrive_at_cluster();
  emulation::wait_for_cluster();
}

inline void release_dependents() {}
inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }

}  // namespace te_fl
