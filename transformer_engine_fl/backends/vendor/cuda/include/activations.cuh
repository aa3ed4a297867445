// Activations and their derivatives, for forwards and backwards alike.
//
// Each is a type with one function that returns both; the unused one is optimised away. All but
// Sigmoid and the rectifiers are x * sigmoid(steepness * u(x)), since (1 + tanh(u)) / 2 =
// sigmoid(2 * u). `alpha` is the steepness of SteepSilu.

#pragma once

#include "numeric.cuh"

namespace te_fl {

template <typename A>
struct Activated {
  A value, slope;
};

// sigmoid(steepness * u). Its slope is value * (1 - value); 1 - value is computed as
// below * value, which avoids the rounding of the difference.
__device__ __forceinline__ Activated<float> sigmoid(float u, float steepness) {
  // At 2^127 the reciprocal is 0 already; a larger `below` could be infinite, and 0 * inf is NaN.
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

// Clamps to [-most, most]; NaN stays NaN.
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
    // 46 is its value at |x| = 32, beyond which the result is 0 or x, even in float64.
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
    const bool below = x <= A(0);  // false for NaN
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
