// Cosines and sines of float32 angles of any size, without memory of the thread's own.
//
// An angle is a multiple k of pi / 2 and a rest r (W. J. Cody and W. Waite, Software Manual
// for the Elementary Functions, 1980). k is the integer nearest to the angle times 2 / pi,
// which a fused multiply-add with 1.5 * 2 ** 23 leaves in the low bits of its result. pi / 2
// is the sum of two float32, less 1.8e-15. Up to the largest angle, 2 ** 21:
//
// - k is off by 0.054 at most, of 2 / pi being rounded, so that |r| <= 0.8701;
// - the angle less k times the first part is exact; taking off k times the second rounds
//   once; what is left out is below 2.4e-9.
//
// The polynomials are minimax on that range, off by less than 4.7e-9 for the sine and 2.8e-10
// for the cosine; with all roundings both are within 1e-7 of the truth. Larger angles are
// reduced exactly, in integers: CUDA's own functions keep what they need for that in local
// memory, and take longer for small ones too.

#pragma once

namespace te_fl {

constexpr float kLargestAngle = 2097152.0f;
constexpr float kHalfPi = 1.5707963705062866f;
constexpr float kRestOfHalfPi = -4.371138828673793e-08f;

struct Reduced {
  float rest;
  int quarter;  // how many times pi / 2, modulo 4
};

// Angles up to the largest.
__device__ __forceinline__ Reduced reduced(float angle) {
  constexpr float to_integer = 12582912.0f;
  const float shifted = __fmaf_rn(angle, 0.6366197466850281f, to_integer);
  const float k = shifted - to_integer;
  const float rest = __fmaf_rn(k, -kRestOfHalfPi, __fmaf_rn(k, -kHalfPi, angle));
  return {rest, __float_as_int(shifted)};
}

// 2 / pi in words of 32 bits, four bits further down: enough for the largest float32. The
// word `further` on than Place: chosen, since an array would have to lie in memory.
template <int Place>
__device__ __forceinline__ unsigned long long word_of_two_over_pi(int further) {
  constexpr unsigned words[] = {0x0A2F9836u, 0xE4E44152u, 0x9FC2757Du, 0x1F534DDCu,
                                0x0DB62959u, 0x93C43904u, 0x1FE5163Au};
  constexpr unsigned a = words[Place], b = words[Place + 1], c = words[Place + 2],
                     d = words[Place + 3];
  return further == 0 ? a : further == 1 ? b : further == 2 ? c : d;
}

// Angles above the largest, and NaN of what is no number.
//
// An angle is an integer m of 24 bits times 2 ** s. Of 2 ** s * 2 / pi the bits from that of
// 4 on do not matter, m times them being multiples of 4; m times the 96 bits behind is k and,
// in its last 94 bits, the fraction, too small by less than 2 ** -70.
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

// Of N angles. What becomes of one does not depend on those beside it: they only decide
// whether the long way is looked at.
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
