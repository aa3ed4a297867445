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

inline void wait_for(unsigned long long* counter, unsigned turn) {
  emulation::wait_for_turn(counter, turn);
}

using TurnWord = unsigned long long;

inline unsigned block_again() { return blockIdx.x; }

inline void prefetch_word(const TurnWord*) {}

inline void post_word(TurnWord* to, unsigned turn, unsigned bits) {
  emulation::check_aligned(to, sizeof *to);
  *to = TurnWord(turn) << 32 | bits;
}

template <int N, int K>
inline void wait_for_words(const TurnWord* words, const int (&places)[N], unsigned turn,
                           unsigned (&found)[N][K]) {
  for (int at : places) {
    emulation::check_aligned(words + at, K * sizeof *words);
    for (int k = 0; k < K; ++k) {
      emulation::wait_for_word(reinterpret_cast<const unsigned*>(words + at + k) + 1, turn);
    }
  }
  // The device looks at all of them until all are there at once.
  for (int i = 0; i < N; ++i) {
    for (int k = 0; k < K; ++k) {
      const TurnWord word = words[places[i] + k];
      if (word >> 32 != turn) emulation::fail("a word of turn %u is written again too early", turn);
      found[i][k] = static_cast<unsigned>(word);
    }
  }
}

inline void release_dependents() {}
inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }

}  // namespace te_fl
