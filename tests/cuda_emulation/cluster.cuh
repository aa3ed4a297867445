// The CPU's version of the set's cluster.cuh.

#pragma once

namespace te_fl {

inline int cluster_rank() { return static_cast<int>(emulation::place->rank); }
inline void cluster_join() { emulation::arrive_at_cluster(); }
inline void cluster_arrive() { emulation::arrive_at_cluster(); }
inline void cluster_wait() { emulation::wait_for_cluster(); }

template <typename T>
inline void store_remote(T* own, int rank, T value) {
  *reinterpret_cast<T*>(emulation::in_block(own, rank)) = value;
}

inline void prepare_arrivals(unsigned long long* counters, int count) {
  for (int i = 0; i < count; ++i) emulation::prepare_counter(counters + i);
}

inline void expect_bytes(unsigned long long* counter, int bytes) {
  emulation::expect(counter, bytes);
}

template <typename T>
inline void send(T* own, int rank, T value, unsigned long long* counter) {
  emulation::send_later(own, rank, &value, sizeof value, counter);
}

inline void wait_for(unsigned long long* counter, unsigned phase) {
  emulation::wait_for_phase(counter, phase);
}

using FlaggedSlot = unsigned long long;

inline unsigned reread_block_index() { return blockIdx.x; }

inline void prefetch_slot(const FlaggedSlot*) {}

inline void post_slot(FlaggedSlot* to, unsigned epoch, unsigned bits) {
  emulation::check_aligned(to, sizeof *to);
  *to = FlaggedSlot(epoch) << 32 | bits;
}

template <int N, int K>
inline void wait_for_slots(const FlaggedSlot* slots, const int (&places)[N], unsigned epoch,
                           unsigned (&found)[N][K]) {
  for (int at : places) {
    emulation::check_aligned(slots + at, K * sizeof *slots);
    for (int k = 0; k < K; ++k) {
      emulation::wait_for_slot(reinterpret_cast<const unsigned*>(slots + at + k) + 1, epoch);
    }
  }
  // The device looks at all of them until all are there at once.
  for (int i = 0; i < N; ++i) {
    for (int k = 0; k < K; ++k) {
      const FlaggedSlot slot = slots[places[i] + k];
      if (slot >> 32 != epoch) {
        emulation::fail("a slot of epoch %u is written again too early", epoch);
      }
      found[i][k] = static_cast<unsigned>(slot);
    }
  }
}

inline void release_dependents() {}
inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }

}  // namespace te_fl
