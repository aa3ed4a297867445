// Cosines and sines of float32 angles of any size, without local memory.
//
// An angle is k * pi / 2 plus a remainder r (W. J. Cody and W. Waite, Software Manual for the
// Elementary Functions, 1980). k is the integer nearest to the angle times 2 / pi, which a fused
// multiply-add with 1.5 * 2 ** 23 leaves in the low bits of its result. pi / 2 is the sum of two
// float32, less 1.8e-15. Up to kLargestAngle, 2 ** 21:
//
// - the rounding of 2 / pi changes the quotient by at most 0.054, so that |r| <= 0.8701;
// - the angle minus k times the first float32 is exact; subtracting k times the second rounds
//   once; the rest of pi / 2 contributes less than 2.4e-9.
//
// The polynomials are minimax on that range, with errors below 4.7e-9 for the sine and 2.8e-10
// for the cosine; with all roundings both are within 1e-7 of the exact values. Larger angles are
// reduced exactly, in integers: CUDA's own functions use local memory for that, and are slower
// for small angles too.

#pragma once

namespace te_fl {

constexpr float kLargestAngle = 2097152.0f;
constexpr float kHalfPi = 1.5707963705062866f;
constexpr float kRestOfHalfPi = -4.371138828673793e-08f;

struct Reduced {
  float rest;
  int quarter;  // how many times pi / 2, modulo 4
};

// Reduces angles up to kLargestAngle.
__device__ __forceinline__ Reduced reduced(float angle) {
  constexpr float to_integer = 12582912.0f;
  const float shifted = __fmaf_rn(angle, 0.6366197466850281f, to_integer);
  const float k = shifted - to_integer;
  const float rest = __fmaf_rn(k, -kRestOfHalfPi, __fmaf_rn(k, -kHalfPi, angle));
  return {rest, __float_as_int(shifted)};
}

// Word Place + `further` of 2 / pi, shifted right by four bits, in words of 32 bits: enough for the
// largest float32. Comparisons select it, since an indexed array would be in local memory.
template <int Place>
__device__ __forceinline__ unsigned long long word_of_two_over_pi(int further) {
  constexpr unsigned words[] = {0x0A2F9836u, 0xE4E44152u, 0x9FC2757Du, 0x1F534DDCu,
                                0x0DB62959u, 0x93C43904u, 0x1FE5163Au};
  constexpr unsigned a = words[Place], b = words[Place + 1], c = words[Place + 2],
                     d = words[Place + 3];
  return further == 0 ? a : further == 1 ? b : further == 2 ? c : d;
}

// Reduces angles above kLargestAngle; infinity and NaN give NaN.
//
// An angle is an integer m of 24 bits times 2 ** s. The bits of 2 ** s * 2 / pi from the one worth
// 4 up do not matter: times m they are multiples of 4. m times the 96 bits below them is k and, in
// its last 94 bits, the fraction, too small by less than 2 ** -70.
__device__ __forceinline__ Reduced reduced_exactly(float angle) {
  using Wide = unsigned long long;
  const int bits = __float_as_int(angle);
  const int exponent = bits >> 23 & 255;
  const Wide m = (bits & 0x7fffff) | 0x800000;
  const int by = exponent - 148 & 31;
  const int first = exponent - 148 >> 5;
  const Wide a = word_of_two_over_pi<0>(first), b = word_of_two_over_pi<1>(first);
  const Wide c = word_of_two_over_pi<2>(first), d = word_of_two_over_pi<3>(first);
  const Wide top = (a << 32 | b) << by >> 32;
  const Wide middle = (b << 32 | c) << by >> 32;
  const Wide last = (c << 32 | d) << by >> 32;
  const Wide product = (m * top << 32) + m * middle + (m * last >> 32) + (Wide(1) << 61);
  const int k = static_cast<int>(product >> 62);
  const long long fraction =
      static_cast<long long>(product & (Wide(1) << 62) - 1) - (1LL << 61);
  const float high = static_cast<float>(fraction);
  const float low = static_cast<float>(fraction - static_cast<long long>(high));
  constexpr float unit = 1.0f / (1LL << 62);
  float rest = __fmaf_rn(high, kRestOfHalfPi * unit, low * (kHalfPi * unit));
  rest = __fmaf_rn(high, kHalfPi * unit, rest);
  if (exponent == 255) rest = __int_as_float(0x7fffffff);
  return bits < 0 ? Reduced{-rest, -k} : Reduced{rest, k};
}

__device__ __forceinline__ void cos_sin_of(const Reduced& angle, float* cos, float* sin) {
  const float r = angle.rest, square = r * r;
  float s = __fmaf_rn(square, -0.0001941808732226491f, 0.008331302553415298f);
  s = __fmaf_rn(__fmaf_rn(s, square, -0.16666637361049652f), square * r, r);
  float c = __fmaf_rn(square, 2.435762871755287e-05f, -0.0013886616798117757f);
  c = __fmaf_rn(c, square, 0.041666630655527115f);
  c = __fmaf_rn(c, square * square, __fmaf_rn(square, -0.5f, 1.0f));
  const bool odd = angle.quarter & 1;
  const float new_sin = odd ? c : s, new_cos = odd ? s : c;
  *sin = angle.quarter & 2 ? -new_sin : new_sin;
  *cos = angle.quarter + 1 & 2 ? -new_cos : new_cos;
}

// N cosines and sines. The result of an angle does not depend on the other angles, which only
// decide whether the code for large angles runs.
template <int N>
__device__ __forceinline__ void cos_sin(const float (&angle)[N], float (&cos)[N],
                                        float (&sin)[N]) {
  bool small = true;
#pragma unroll
  for (int i = 0; i < N; ++i) small &= fabsf(angle[i]) <= kLargestAngle;
  if (small) {
#pragma unroll
    for (int i = 0; i < N; ++i) cos_sin_of(reduced(angle[i]), &cos[i], &sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool large = !(fabsf(angle[i]) <= kLargestAngle);
      cos_sin_of(large ? reduced_exactly(angle[i]) : reduced(angle[i]), &cos[i], &sin[i]);
    }
  }
}

template <int N>
__device__ __forceinline__ void cos_sin(const double (&angle)[N], double (&cos)[N],
                                        double (&sin)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sincos(angle[i], &sin[i], &cos[i]);
}

}  // namespace te_fl
