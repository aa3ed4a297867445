// The twins of the set's instructions.cuh on the CPU.

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
inline float least_or_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }

template <int Bytes, bool Once, typename Word>
inline void read_piece(Word* to, const void* from) {
  emulation::check_aligned(from, Bytes);
  memcpy(to, from, Bytes);
}

inline void read_shared(unsigned* to, const void* from) {
  emulation::check_aligned(from, 16);
  memcpy(to, from, 16);
}

template <int Bytes, bool Once>
inline void copy_async_piece(void* to, const void* from, bool valid) {
  emulation::copy_later(to, from, Bytes, valid ? Bytes : 0);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int Pending>
inline void wait_copies() { emulation::wait_copies(Pending); }

}  // namespace te_fl
