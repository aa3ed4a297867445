// Activations and their derivatives, for forwards and backwards alike.
//
// Each is a type with one function that gives both; what is not used costs nothing. All
// but the rectifiers are x * sigmoid(logit(x)), since (1 + tanh(u)) / 2 = sigmoid(2 * u).
// `alpha` is the steepness of those that leave it open.

#pragma once

#include "numeric.cuh"

namespace te_fl {

template <typename A>
struct Activated {
  A value, slope;
};

template <typename A>
__device__ __forceinline__ Activated<A> sigmoid(A z) {
  const A below = exponential(-z);
  const A value = reciprocal(A(1) + below);
  // 1 - value is below * value, without the rounding of a difference; not inf * 0.
  return {value, value == A(0) ? A(0) : value * (below * value)};
}

// To `most` of either sign; NaN stays.
template <typename A>
__device__ __forceinline__ A clamp(A x, A most) {
  return x > most ? most : x < -most ? -most : x;
}

// x * sigmoid(logit), where logit changes by `logit_slope` with x.
template <typename A>
__device__ __forceinline__ Activated<A> gated_by_itself(A x, A logit, A logit_slope) {
  const Activated<A> gate = sigmoid(logit);
  const A bend = gate.slope == A(0) ? A(0) : x * (gate.slope * logit_slope);
  return {x * gate.value, gate.value + bend};
}

struct Gelu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    constexpr A kSlope = A(1.5957691216057308);  // 2 * sqrt(2 / pi)
    constexpr A kCube = A(0.044715);
    // Beyond 32 it is 0 or x, in float64 too, and the cube is still finite.
    const A near = clamp(x, A(32));
    const A square = near * near * kCube;
    return gated_by_itself(x, kSlope * (near + near * square), kSlope * (A(1) + A(3) * square));
  }
};

struct QuickGelu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    constexpr A kSlope = A(1.702);
    return gated_by_itself(x, x * kSlope, kSlope);
  }
};

struct Silu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return gated_by_itself(x, x, A(1));
  }
};

struct SteepSilu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A alpha) {
    return gated_by_itself(x, x * alpha, alpha);
  }
};

struct Sigmoid {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return sigmoid(x);
  }
};

struct Relu {
  template <typename A>
  static __device__ __forceinline__ Activated<A> at(A x, A) {
    return {x <= A(0) ? A(0) : x, x > A(0) ? A(1) : A(0)};
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
