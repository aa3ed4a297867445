// Activations and their derivatives, for forwards and backwards alike.
//
// Each is a type with one function that gives both; what is not used costs nothing. All
// but the rectifiers are x * sigmoid(steepness * u(x)), since (1 + tanh(u)) / 2 = sigmoid(2 * u).
// `alpha` is the steepness of those that leave it open.

#pragma once

#include "numeric.cuh"

namespace te_fl {

template <typename A>
struct Activated {
  A value, slope;
};

// sigmoid(steepness * u). Its slope is value * (1 - value), and 1 - value is below * value
// without the rounding of a difference.
__device__ __forceinline__ Activated<float> sigmoid(float u, float steepness) {
  // From 2^127 on the reciprocal is 0, and 0 times that is no NaN.
  const float below =
      power_of_two(least_or_nan(u * (-1.4426950408889634f * steepness), 127.0f));
  const float value = reciprocal(1.0f + below);
  return {value, value * (below * value)};
}
__device__ __forceinline__ Activated<double> sigmoid(double u, double steepness) {
  const double below = exp(-steepness * u);
  const double value = 1.0 / (1.0 + below);
  return {value, value == 0.0 ? 0.0 : value * (below * value)};
}

// To `most` of either sign; NaN stays.
template <typename A>
__device__ __forceinline__ A clamp(A x, A most) {
  return x > most ? most : x < -most ? -most : x;
}

// x * sigmoid(steepness * u), where u changes by `change` with x.
template <typename A>
__device__ __forceinline__ Activated<A> gated_by_itself(A x, A u, A steepness, A change) {
  const Activated<A> gate = sigmoid(u, steepness);
  return {x * gate.value, gate.value + x * (gate.slope * (steepness * change))};
}

struct Gelu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    constexpr A kSteepness = A(1.5957691216057308);  // 2 * sqrt(2 / pi)
    // Beyond |x| = 32, where it is 46, the result is 0 or x in float64 too.
    const A square = least_or_nan(x * A(0.044715) * x, A(46));
    return gated_by_itself(x, x + x * square, kSteepness, A(1) + A(3) * square);
  }
};

struct QuickGelu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return gated_by_itself(x, x, A(1.702), A(1));
  }
};

struct Silu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return gated_by_itself(x, x, A(1), A(1));
  }
};

struct SteepSilu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A alpha) {
    return gated_by_itself(x, x, alpha, A(1));
  }
};

struct Sigmoid {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return sigmoid(x, A(1));
  }
};

struct Relu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    const bool below = x <= A(0);  // which NaN is not
    return {below ? A(0) : x, below ? A(0) : A(1)};
  }
};

struct SquaredRelu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    const A above = x <= A(0) ? A(0) : x;
    return {above * above, above + above};
  }
};

}  // namespace te_fl
