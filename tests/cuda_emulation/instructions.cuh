// The CPU's version of the set's instructions.cuh.

#pragma once

namespace te_fl {

inline float without_subnormals(float x) {
  return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x;
}

inline float power_of_two(float x) { return without_subnormals(exp2f(without_subnormals(x))); }
inline float reciprocal(float x) { return without_subnormals(1.0f / without_subnormals(x)); }
inline unsigned long long wide_product(unsigned a, unsigned b) {
  return static_cast<unsigned long long>(a) * b;
}
template <bool BFloat, bool Least>
inline unsigned extreme_halves(unsigned a, unsigned b) {
  constexpr unsigned infinite = BFloat ? 0x7f80u : 0x7c00u;
  unsigned found = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned first = a >> shift & 0xffffu, second = b >> shift & 0xffffu;
    // An integer in the order of the numbers: that of negative ones is reversed.
    const auto place = [](unsigned half) { return half & 0x8000u ? 0x8000 - int(half) : int(half); };
    unsigned half = place(first) > place(second) != Least ? first : second;
    if ((first & 0x7fffu) > infinite) half = second;
    if ((second & 0x7fffu) > infinite) half = first;
    found |= half << shift;
  }
  return found;
}
template <bool BFloat>
inline unsigned larger_halves(unsigned a, unsigned b) {
  return extreme_halves<BFloat, false>(a & 0x7fff7fffu, b & 0x7fff7fffu);
}
inline float least_or_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }

template <int Bytes, typename Word>
inline void read_piece(Word* to, const void* from) {
  emulation::check_read(from, Bytes);
  memcpy(to, from, Bytes);
}

template <int Bytes, typename Word>
inline void read_plain_piece(Word* to, const void* from) {
  read_piece<Bytes>(to, from);
}

template <int Bytes, typename Word>
inline void read_written_piece(Word* to, const void* from) {
  read_piece<Bytes>(to, from);
}

inline unsigned short read_where(const void* from, bool valid) {
  unsigned short word = 0;
  if (valid) read_piece<2>(&word, from);
  return word;
}

inline void write_where(void* to, const unsigned* words, bool valid) {
  if (!valid) return;
  emulation::check_aligned(to, 16);
  memcpy(to, words, 16);
}

inline void read_shared(unsigned* to, const void* from) {
  emulation::check_aligned(from, 16);
  memcpy(to, from, 16);
}

enum Reading { kReused, kOnce, kPlain };

template <int Bytes, Reading How>
inline void copy_async_piece(void* to, int at, const void* from, int bytes) {
  emulation::copy_later(static_cast<char*>(to) + at, from, Bytes, bytes);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int Pending>
inline void wait_copies() { emulation::wait_copies(Pending); }

}  // namespace te_fl
