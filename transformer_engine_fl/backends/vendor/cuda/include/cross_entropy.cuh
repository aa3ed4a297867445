// A row's loss and lse from its statistics, for all kernels that compute them.

#pragma once

#include "numeric.cuh"

namespace te_fl {

// What is subtracted from scores before the exponential: the highest, or 0 if all are -infinity.
template <typename A>
__device__ __forceinline__ A softmax_shift(A highest) {
  return highest == lowest<A>() ? A(0) : highest;
}

// The statistics of a row: the highest score, the sum of the exponentials of the scores less the
// highest, the score of the target, the sum of the scores.
template <typename A>
struct Statistics {
  A highest, total, at_target, summed;
};

// kSummed: found.summed is valid, the sum of the scores less `center` each, which label smoothing
// needs. The loss is NaN for a target outside [0, last) that is not ignored.
template <bool kSummed, typename A>
__device__ __forceinline__ void store_loss(A* loss, A* lse, long long target, bool ignored,
                                           const Statistics<A>& found, long long last,
                                           double words, double label_smoothing, double z_loss,
                                           A center = A(0)) {
  const A shift = softmax_shift(found.highest);
  const A log_total = log(found.total);
  const A whole = shift + log_total;
  // Not computed from lse, in which a large shift would round off log_total.
  A result = log_total - (found.at_target - shift);
  if constexpr (kSummed) {
    const A uniform = log_total - (found.summed / static_cast<A>(words) + (center - shift));
    // 1 - smoothing in float64: a rounded smoothing near 1 would leave few of its digits.
    result = static_cast<A>(1 - label_smoothing) * result + static_cast<A>(label_smoothing) * uniform;
  }
  const A z = static_cast<A>(z_loss);
  if (z != A(0)) result += z * whole * whole;
  if (target < 0 || target >= last) result = quiet_nan<A>();
  *loss = ignored ? A(0) : result;
  *lse = ignored ? A(0) : whole;
}

}  // namespace te_fl
