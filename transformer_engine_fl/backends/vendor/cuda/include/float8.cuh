// Formats of 8 and 4 bits, and their scales.
//
// The arithmetic follows the head of ops/quantization.py to the bit. From sm_89 on an instruction
// converts to float8 with the rounding and clamping specified there; older chips, and e2m1 on
// all chips, use integer and float32 arithmetic that is exact.

#pragma once

#include "instructions.cuh"
#include "numeric.cuh"

namespace te_fl {

// The layouts of the formats; kLargest is the largest value's bits in float32.
struct e4m3 {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7;
  static constexpr unsigned kLargest = 0x43e00000u;
};
struct e5m2 {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15;
  static constexpr unsigned kLargest = 0x47600000u;
};
struct e2m1 {
  static constexpr int kBits = 4, kMantissa = 1, kBias = 1;
  static constexpr unsigned kLargest = 0x40c00000u;
};
struct e8m0 {};  // powers of two, for scales

constexpr unsigned kInfinite = 0x7f800000u;
constexpr float kLargestFloat32 = 3.4028234663852886e38f;

// ----------------------------------------------------------------------------- to codes

// A float8 code in integer arithmetic.
template <typename Kind>
__device__ __forceinline__ unsigned float8_code(float y) {
  constexpr int dropped = 23 - Kind::kMantissa;
  // Its ulp is the format's subnormal step: the sum with a magnitude below the least normal number
  // has the code in its lowest bits.
  constexpr unsigned shifter = static_cast<unsigned>(151 - Kind::kBias - Kind::kMantissa) << 23;
  const unsigned bits = __float_as_uint(y);
  unsigned size = bits & 0x7fffffffu;
  if (size > kInfinite) return 127;
  size = size < Kind::kLargest ? size : Kind::kLargest;
  unsigned code;
  if (size < static_cast<unsigned>(128 - Kind::kBias) << 23) {
    code = __float_as_uint(__uint_as_float(size) + __uint_as_float(shifter)) - shifter;
  } else {
    const unsigned even = size >> dropped & 1;
    code = (size + even + ((1u << (dropped - 1)) - 1)) >> dropped;
    code -= static_cast<unsigned>(127 - Kind::kBias) << Kind::kMantissa;
  }
  return code | (bits >> 24 & 128u);
}

// Codes of e2m1, the first in the lowest bits.
//
// The code of a magnitude y is 2y up to y = 2, then y + 2, and from y = 4 on y / 2 + 4, at most 7.
// The ulp of float32 is 1/2 just below 2^23 and 1 from there on: adding y to 2^23 - 2 therefore
// rounds to the first two pieces at once, and the sum's bits less those of 2^23 - 2 are the code.
// The third piece and the bound are 2^23 + 3 - clamp(3 - y / 2, 0, 1). Each is rounded once, to
// nearest even, and the bits of 2^23 - 2 are even, so that even sums are even codes. The code is
// the smaller of the two; for NaN it is the second, whose clamp is then 0: 7.
template <int N, typename Value>
__device__ __forceinline__ unsigned e2m1_codes(const Value& value) {
  constexpr float octave = 8388608.0f;  // 2^23
  constexpr unsigned start = 0x4afffffcu;  // the bits of 2^23 - 2
  unsigned sizes = 0, signs = 0, starts = 0;
#pragma unroll
  for (int i = N - 1; i >= 0; --i) {
    const float y = value(i);
    const float size = fabsf(y);
    const float third = octave + 3.0f - __saturatef(fmaf(size, -0.5f, 3.0f));
    const float sum = fminf(size + (octave - 2.0f), third);
    sizes = sizes * 16 + __float_as_uint(sum);
    starts = starts * 16 + start;
    signs = __funnelshift_l(__float_as_uint(y), signs, 4);
  }
  return (sizes - starts) | (signs & 0x88888888u);
}

// Four codes of eight bits, the first in the lowest byte.
template <typename Kind>
__device__ __forceinline__ unsigned four_codes(float a, float b, float c, float d) {
#ifdef TE_FL_CONVERTS_FLOAT8
  return Kind::kMantissa == 3 ? four_e4m3(a, b, c, d) : four_e5m2(a, b, c, d);
#else
  return float8_code<Kind>(a) | float8_code<Kind>(b) << 8 | float8_code<Kind>(c) << 16 |
         float8_code<Kind>(d) << 24;
#endif
}

// N codes as they lie in memory; unused bits of a word are 0.
template <typename Kind, int N>
struct Codes {
  static constexpr int kBytes = N * Kind::kBits / 8;
  static_assert(kBytes > 0, "N codes must fill at least a byte");
  unsigned words[kBytes < 4 ? 1 : kBytes / 4];
};

template <typename Kind, int N>
__device__ __forceinline__ Codes<Kind, N> narrow(const float (&values)[N], float scale) {
  constexpr int each = 32 / Kind::kBits;
  Codes<Kind, N> codes;
#pragma unroll
  for (int word = 0; word < (N + each - 1) / each; ++word) {
    const auto scaled = [&](int i) {
      return word * each + i < N ? product(values[word * each + i], scale) : 0.0f;
    };
    if constexpr (Kind::kBits == 8) {
      codes.words[word] = four_codes<Kind>(scaled(0), scaled(1), scaled(2), scaled(3));
    } else {
      codes.words[word] = e2m1_codes<least(each, N)>(scaled);
    }
  }
  return codes;
}

// store_bytes writes Bytes bytes to an address that is aligned to Access; store_some_bytes writes
// the first `count` of them.
template <int Bytes, int Access>
__device__ __forceinline__ void store_bytes(unsigned char* to, const unsigned* words) {
  constexpr int piece = least(Bytes, Access);
#pragma unroll
  for (int at = 0; at < Bytes; at += piece) {
    const unsigned* from = words + at / 4;
    if constexpr (piece == 16) {
      *reinterpret_cast<uint4*>(to + at) = make_uint4(from[0], from[1], from[2], from[3]);
    } else if constexpr (piece == 8) {
      *reinterpret_cast<uint2*>(to + at) = make_uint2(from[0], from[1]);
    } else if constexpr (piece == 4) {
      *reinterpret_cast<unsigned*>(to + at) = from[0];
    } else if constexpr (piece == 2) {
      *reinterpret_cast<unsigned short*>(to + at) =
          static_cast<unsigned short>(from[0] >> at % 4 * 8);
    } else {
      to[at] = static_cast<unsigned char>(from[0] >> at % 4 * 8);
    }
  }
}
template <int Bytes>
__device__ __forceinline__ void store_some_bytes(unsigned char* to, const unsigned* words,
                                                 int count) {
#pragma unroll
  for (int at = 0; at < Bytes; ++at) {
    if (at < count) to[at] = static_cast<unsigned char>(words[at / 4] >> at % 4 * 8);
  }
}

// Reads Bytes bytes from an address that is aligned to Access.
template <int Bytes, int Access>
__device__ __forceinline__ void load_bytes(const unsigned char* __restrict__ from,
                                           unsigned (&words)[Bytes < 4 ? 1 : Bytes / 4]) {
  constexpr int piece = least(Bytes, Access);
#pragma unroll
  for (int i = 0; i < (Bytes < 4 ? 1 : Bytes / 4); ++i) words[i] = 0;
#pragma unroll
  for (int at = 0; at < Bytes; at += piece) {
    unsigned* to = words + at / 4;
    if constexpr (piece >= 4) {
      read_piece<piece>(to, from + at);
    } else if constexpr (piece == 2) {
      unsigned short half;
      read_piece<2>(&half, from + at);
      to[0] |= static_cast<unsigned>(half) << at % 4 * 8;
    } else {
      to[0] |= static_cast<unsigned>(from[at]) << at % 4 * 8;
    }
  }
}

// --------------------------------------------------------------------------- from codes

// The float32 value of a code, exactly.
template <typename Kind>
__device__ __forceinline__ float value_of(unsigned code) {
  constexpr unsigned sign = 1u << (Kind::kBits - 1);
  const unsigned size = code & (sign - 1);
  // Read as a float32, the shifted code is its value times a constant power of two, even if
  // subnormal.
  const unsigned bits = (code & sign) << (32 - Kind::kBits) | size << (23 - Kind::kMantissa);
  if constexpr (Kind::kMantissa == 3) {
    if (size == 127) return __uint_as_float(0x7fc00000u);
  } else if constexpr (Kind::kMantissa == 2) {
    if (size >= 124) return __uint_as_float(bits | kInfinite);  // stays infinity or NaN
  }
  return product(__uint_as_float(bits),
                 __uint_as_float(static_cast<unsigned>(254 - Kind::kBias) << 23));
}

// The values of N codes side by side.
template <typename Kind, int N>
__device__ __forceinline__ void widen(const unsigned* words, float (&values)[N]) {
#ifdef TE_FL_CONVERTS_FLOAT8
  constexpr bool converts = Kind::kMantissa == 3;
#else
  constexpr bool converts = false;
#endif
  if constexpr (N % 2 == 0 && Kind::kBits == 8 && (converts || Kind::kMantissa == 2)) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      unsigned halves;
#ifdef TE_FL_CONVERTS_FLOAT8
      if constexpr (converts) halves = halves_of_e4m3(words[i / 4] >> i % 4 * 8);
      else
#endif
        // An e5m2 code is the high byte of a float16.
        halves = __byte_perm(words[i / 4], 0, i % 4 ? 0x3424 : 0x1404);
      values[i] = widen_half<false>(halves, __half());
      values[i + 1] = widen_half<true>(halves, __half());
    }
  } else if constexpr (N % 8 == 0 && Kind::kBits == 4) {
    // As float16 all magnitudes have a low byte of 0. The high bytes of four codes are looked up
    // at once, then the signs are set.
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      const unsigned codes = words[i / 8];
      const unsigned sizes = codes & 0x77777777u;
      const unsigned low = __byte_perm(0x3e3c3800u, 0x46444240u, sizes);
      const unsigned high = __byte_perm(0x3e3c3800u, 0x46444240u, sizes >> 16);
      const unsigned even = __byte_perm(low, high, 0x6420) | (codes << 4 & 0x80808080u);
      const unsigned odd = __byte_perm(low, high, 0x7531) | (codes & 0x80808080u);
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const unsigned first = __byte_perm(even, 0, j ? 0x3424 : 0x1404);
        const unsigned second = __byte_perm(odd, 0, j ? 0x3424 : 0x1404);
        values[i + j] = widen_half<false>(first, __half());
        values[i + j + 1] = widen_half<false>(second, __half());
        values[i + j + 2] = widen_half<true>(first, __half());
        values[i + j + 3] = widen_half<true>(second, __half());
      }
    }
  } else {
    constexpr int each = 32 / Kind::kBits;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = value_of<Kind>(words[i / each] >> i % each * Kind::kBits &
                                 ((1u << Kind::kBits) - 1));
    }
  }
}

// 2^(byte - 127); NaN for 255.
template <>
__device__ __forceinline__ float value_of<e8m0>(unsigned byte) {
  return __uint_as_float(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x400000u : byte << 23);
}

// ------------------------------------------------------------------------------- scales

// `largest / amax` rounded once, at most the largest float32.
__device__ __forceinline__ float bounded_quotient(float largest, float amax) {
  return fminf(largest / amax, kLargestFloat32);
}

// The float32 scale of an amax.
template <bool PowerOfTwo>
__device__ __forceinline__ float scale_of(float amax, float largest, float epsilon) {
  const float a = fmaxf(amax, epsilon);
  const float scale = a == 0.0f || __float_as_uint(a) == kInfinite
                          ? 1.0f
                          : bounded_quotient(largest, a);
  return PowerOfTwo ? __uint_as_float(__float_as_uint(scale) & kInfinite) : scale;
}

// The storage type of a block's scale.
template <typename Scales>
struct StoredScale {
  using type = unsigned char;
};
template <>
struct StoredScale<float> {
  using type = float;
};

// The scale of a block of Kind, and its inverse as stored: a float32, a power of two, or an e4m3
// that is to be divided by `shared`, the scale of the whole tensor or group.
template <typename Kind, typename Scales, bool PowerOfTwo>
__device__ __forceinline__ float block_scale(float amax, float shared, float epsilon,
                                             typename StoredScale<Scales>::type& inverse) {
  if constexpr (sizeof(inverse) == 4) {
    const float scale = scale_of<PowerOfTwo>(amax, __uint_as_float(Kind::kLargest), epsilon);
    inverse = __frcp_rn(scale);
    return scale;
  } else if constexpr (Kind::kBits == 8) {
    // The least e with amax <= largest * 2^e: a mantissa above that of the largest value carries
    // into the exponent.
    constexpr unsigned carry = 0x7fffffu - (Kind::kLargest & 0x7fffffu);
    const unsigned bits = __float_as_uint(amax);
    const bool infinite = bits == kInfinite;
    int byte = static_cast<int>((bits + carry) >> 23) - static_cast<int>(Kind::kLargest >> 23) + 127;
    byte = infinite ? 254 : byte > 0 ? byte : 0;
    inverse = static_cast<unsigned char>(byte);
    return __uint_as_float(infinite ? 0x400000u : static_cast<unsigned>(254 - byte) << 23);
  } else {
    constexpr float sixth = 1.0f / 6.0f;
    const float wanted = product(amax, product(shared, sixth));
    const unsigned code = four_codes<e4m3>(wanted, 0.0f, 0.0f, 0.0f);
    inverse = static_cast<unsigned char>(code);
    const float factor = product(value_of<e4m3>(code), __frcp_rn(shared));
    return least_or_nan(__frcp_rn(factor), kLargestFloat32);
  }
}

// The largest over groups of 1 to 32 neighbouring lanes, returned in each of them. Must be called
// by all lanes of the warp.
template <int Lanes>
__device__ __forceinline__ float largest_of_lanes(float value) {
#pragma unroll
  for (int offset = 1; offset < Lanes; offset *= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

}  // namespace te_fl
