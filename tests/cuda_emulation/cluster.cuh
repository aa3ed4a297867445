// The twin of the set's cluster.cuh on the CPU.

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

template <typename Word>
inline void post_word(Word* to, Word word) {
  emulation::check_aligned(to, sizeof word);
  *to = word;
}
// A word's lower half is never 0 once the word is there.
template <int N, typename Word>
inline void wait_for_words(const Word* words, const int (&places)[N], Word (&found)[N]) {
  for (int i = 0; i < N; ++i) {
    const Word* from = words + places[i];
    emulation::check_aligned(from, sizeof *from);
    emulation::wait_for_word(reinterpret_cast<const unsigned*>(from));
    found[i] = *from;
  }
}

inline void release_dependents() {}
inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }

}  // namespace te_fl
