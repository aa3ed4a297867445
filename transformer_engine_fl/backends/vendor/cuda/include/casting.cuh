// Casting the neighbouring values of a row that a thread holds, with the scale of their block.

#pragma once

#include "float8.cuh"

namespace te_fl {

// Computes and writes codes and scales. Blocks are Width columns wide, 0 if all values share a
// scale; a block is held by Lanes neighbouring threads, N values each. One access may write Access
// bytes. Whole: no values lie beyond the columns.
template <typename Kind, typename Scales, bool PowerOfTwo, int Width, int N, int Lanes, int Access,
          bool Whole>
struct RowCast {
  using Stored = typename StoredScale<Scales>::type;
  static constexpr unsigned kWidth = Width > 0 ? Width : 1;

  unsigned char* data;
  Stored* scale_inv;
  int columns;
  float epsilon;

  // The scales of Rows blocks, one in each of Rows rows. The lanes share the work: a lane reduces
  // the amax of one block and broadcasts its scale. `amaxes` are those of the thread's own values;
  // `inverse` is that of block `threadIdx.x % Rows`. Must be called by all lanes of the warp.
  template <int Rows>
  __device__ __forceinline__ void scales_of(const float (&amaxes)[Rows], float (&scales)[Rows],
                                            Stored& inverse) const {
    static_assert(Rows <= Lanes && (Rows & (Rows - 1)) == 0,
                  "Rows must be a power of two, at most Lanes");
    float kept[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) kept[i] = amaxes[i];
    // Each step halves the blocks of a lane, which keeps those whose next index bit is its own.
#pragma unroll
    for (int offset = 1; offset < Lanes; offset *= 2) {
      if (offset < Rows) {
        const bool odd = threadIdx.x & offset;
#pragma unroll
        for (int i = 0; i < Rows / (2 * offset); ++i) {
          const float given = odd ? kept[2 * i] : kept[2 * i + 1];
          const float own = odd ? kept[2 * i + 1] : kept[2 * i];
          kept[i] = fmaxf(own, __shfl_xor_sync(0xffffffffu, given, offset));
        }
      } else {
        kept[0] = fmaxf(kept[0], __shfl_xor_sync(0xffffffffu, kept[0], offset));
      }
    }
    const float scale =
        block_scale<Kind, Scales, PowerOfTwo>(kept[0], 1.0f, epsilon, inverse);
    const int first = threadIdx.x % 32 & ~(Rows - 1);
#pragma unroll
    for (int i = 0; i < Rows; ++i) scales[i] = __shfl_sync(0xffffffffu, scale, first + i);
  }

  // The position of neighbouring columns: the addresses of their codes and of their block's scale
  // are computed when they are written.
  struct At {
    int row, column;
  };
  __device__ __forceinline__ unsigned char* codes_at(const At& to) const {
    const unsigned long long at = static_cast<long long>(to.row) * columns + to.column;
    return data + at / (8 / Kind::kBits);
  }
  __device__ __forceinline__ Stored* inverse_at(const At& to) const {
    const unsigned across = (columns + kWidth - 1) / kWidth;
    return scale_inv + (static_cast<long long>(to.row) * across + to.column / kWidth);
  }

  // The same addresses computed beforehand, also for columns whole blocks further on in the row.
  struct Place {
    unsigned char* codes;
    Stored* inverse;

    __device__ __forceinline__ Place further(int by) const {
      return {codes + by * Kind::kBits / 8, inverse + by / kWidth};
    }
  };
  __device__ __forceinline__ Place place(const At& to) const {
    return {codes_at(to), inverse_at(to)};
  }
  __device__ __forceinline__ unsigned char* codes_at(const Place& to) const { return to.codes; }
  __device__ __forceinline__ Stored* inverse_at(const Place& to) const { return to.inverse; }

  // Writes the codes, if the row exists. `scale` is the scale that all values share, or 1. Must be
  // called by all lanes of the warp. Inside: no column lies beyond the last.
  template <bool Inside = false, typename Where>
  __device__ __forceinline__ Codes<Kind, N> put(const float (&values)[N], const Where& to,
                                                int column, bool exists, float scale) const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) amax = fmaxf(amax, fabsf(values[i]));
    return put<Inside>(values, amax, to, column, exists, scale);
  }

  // The same with a known amax of the values.
  template <bool Inside = false, typename Where>
  __device__ __forceinline__ Codes<Kind, N> put(const float (&values)[N], float amax,
                                                const Where& to, int column, bool exists,
                                                float scale) const {
    const bool inside = exists && (Inside || column < columns);
    if constexpr (Width > 0) {
      amax = largest_of_lanes<Lanes>(amax);
      Stored inverse;
      scale = block_scale<Kind, Scales, PowerOfTwo>(amax, scale, epsilon, inverse);
      if (threadIdx.x % Lanes == 0 && inside) *inverse_at(to) = inverse;
    }
    return put_codes<Inside>(values, to, column, inside, scale);
  }

  // Writes the codes only, if they are `inside`.
  template <bool Inside = false, typename Where>
  __device__ __forceinline__ Codes<Kind, N> put_codes(const float (&values)[N], const Where& where,
                                                      int column, bool inside, float scale) const {
    const Codes<Kind, N> codes = narrow<Kind>(values, scale);
    unsigned char* to = codes_at(where);
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

// Writes the inverse of the scale that all values share. Alone: there are no scales of blocks.
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
