// Casting neighbouring values of a row, which a thread holds, with the scale of their block.

#pragma once

#include "float8.cuh"

namespace te_fl {

// Where codes and scales go. Blocks are Width columns wide, 0 if all values share a scale;
// Lanes neighbouring threads hold one between them, N values each. Access bytes may be
// written at once; Whole: no values lie beyond the columns.
template <typename Kind, typename Scales, bool PowerOfTwo, int Width, int N, int Lanes, int Access,
          bool Whole>
struct RowCast {
  using Stored = typename StoredScale<Scales>::type;

  unsigned char* data;
  Stored* scale_inv;
  int columns;
  float epsilon;

  // Writes the codes, if the row exists. `scale` is that of all, and 1 if there is none.
  // Every lane of a warp calls it. Inside: there are no columns beyond the last.
  template <bool Inside = false>
  __device__ __forceinline__ Codes<Kind, N> put(const float (&values)[N], int row, int column,
                                                bool exists, float scale) const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) amax = fmaxf(amax, fabsf(values[i]));
    return put<Inside>(values, amax, row, column, exists, scale);
  }

  // The same where the amax of the values is known.
  template <bool Inside = false>
  __device__ __forceinline__ Codes<Kind, N> put(const float (&values)[N], float amax, int row,
                                                int column, bool exists, float scale) const {
    const bool inside = exists && (Inside || column < columns);
    if constexpr (Width > 0) {
      amax = largest_of_lanes<Lanes>(amax);
      Stored inverse;
      scale = block_scale<Kind, Scales, PowerOfTwo>(amax, scale, epsilon, inverse);
      constexpr int width = Width > 0 ? Width : 1;
      if (threadIdx.x % Lanes == 0 && inside) {
        const int across = (columns + width - 1) / width;
        scale_inv[static_cast<long long>(row) * across + column / width] = inverse;
      }
    }
    const Codes<Kind, N> codes = narrow<Kind>(values, scale);
    unsigned char* to = data + (static_cast<long long>(row) * columns + column) / (8 / Kind::kBits);
    if (inside) {
      if (Whole || Inside || column + N <= columns) {
        store_bytes<Codes<Kind, N>::kBytes, Access>(to, codes.words);
      } else {
        store_some_bytes<Codes<Kind, N>::kBytes>(to, codes.words,
                                                 (columns - column) * Kind::kBits / 8);
      }
    }
    return codes;
  }
};

// What is stored of the scale that all values share; Alone: there are no blocks' scales.
template <bool Alone, typename Stored>
__device__ __forceinline__ void write_inverse(float scale, Stored* scale_inv, Stored* scale_inv_t,
                                              float* global_scale_inv) {
  const float inverse = __frcp_rn(scale);
  if (global_scale_inv) *global_scale_inv = inverse;
  if constexpr (Alone) {
    *scale_inv = inverse;
    if (scale_inv_t) *scale_inv_t = inverse;
  }
}

}  // namespace te_fl
