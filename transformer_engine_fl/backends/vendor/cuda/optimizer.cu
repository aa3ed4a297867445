// The optimizer's steps and the bookkeeping around them, over lists of tensors.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (optimizer.py)
// defines KERNEL_<name> and the macros below that the kernel needs.
//
//   TA           math type: float32 or float64
//   TX, TY       storage types of the input, and of the output
//   TG, TP, TM   storage types of gradients, parameters (short where only their bits count),
//                both moments
//   KIND         the float8 format of the parameters
//   TW           storage type of masters, or of their lower halves
//   TB, TC       storage types of momentum buffers, and of copies of the parameters
//   TLR, TSTEP, TSCALE  types of scalars on the device
//   FORM         how a parameter is kept: PLAIN, MASTER, REMAINDER or FLOAT8
//   FIELDS       addresses and numbers of a row of the table
//   VEC, DEPTH   elements per vector, vectors that a thread has in flight at once
//   LANES        threads of a block
//   CHUNK        elements of a block
//
// A kernel that reads a flag writes nothing if the flag is set. There are no atomic additions, so
// the same call gives the same bits.

#include "cluster.cuh"
#include "float8.cuh"
#include "lists.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "row_reduction.cuh"

#define PLAIN 0
#define MASTER 1
#define REMAINDER 2
#define FLOAT8 3

using namespace te_fl;

// The names of integer types in the host's macros.
using int16 = short;
using int32 = int;
using int64 = long long;

namespace {

template <typename A>
__device__ __forceinline__ bool is_finite(A x) {
  return fabs(x) < -lowest<A>();
}

// Loads M vectors of N elements, as far apart as in `walk`.
template <int N, int M, typename T>
__device__ __forceinline__ void load_all(Vec<T, N> (&to)[M], const T* from) {
#pragma unroll
  for (int i = 0; i < M; ++i) to[i] = load_written<N>(from + i * LANES * N);
}

}  // namespace

#ifdef KERNEL_scale

namespace {

struct Scale {
  const TX* x;
  TY* y;
  TA factor;
  bool finite;

  template <int N, int M>
  __device__ __forceinline__ void at(int place) {
    Vec<TX, N> stored[M];
    load_all(stored, x + place);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      TA values[N];
      decode(stored[i], values);
#pragma unroll
      for (TA& value : values) {
        finite = finite && is_finite(value);
        value *= factor;
      }
      store_to_global(y + place + i * LANES * N, encode<TY>(values));
    }
  }
};

}  // namespace

// y = x * scale; sets the flag if an x is not finite.
extern "C" __global__ void __launch_bounds__(LANES)
    scale(const long long* __restrict__ table, int* flag, const TSCALE* __restrict__ factor_there,
          int rows, double factor) {
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  const TA by = factor_there ? static_cast<TA>(__ldg(factor_there)) : static_cast<TA>(factor);
  Scale step = {chunk.tensor<TX>(0), chunk.tensor<TY>(1), by, true};
  // In place, a factor of 1 changes nothing.
  if (!flag && by == TA(1) && static_cast<const void*>(step.x) == step.y) return;
  walk<LANES, VEC, DEPTH>(chunk.length, step);
  if (flag && !step.finite) *flag = 1;
}

#endif  // KERNEL_scale

#ifdef KERNEL_squares

namespace {

struct Squares {
  const TX* x;
  TA factor, total;

  template <int N, int M>
  __device__ __forceinline__ void at(int place) {
    Vec<TX, N> stored[M];
    load_all(stored, x + place);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      TA values[N];
      decode(stored[i], values);
      TA sum = 0;
#pragma unroll
      for (TA& value : values) {
        if constexpr (SCALED) value *= factor;
        sum += value * value;
      }
      total += sum;
    }
  }
};

}  // namespace

// The sum of (x * scale)**2 over each chunk; a row's sums begin at the index in its second field.
extern "C" __global__ void __launch_bounds__(LANES)
    squares(const long long* __restrict__ table, const TSCALE* __restrict__ factor,
            TA* __restrict__ sums, int rows) {
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  Squares step = {chunk.tensor<TX>(0), TA(1), TA(0)};
  if constexpr (SCALED) step.factor = static_cast<TA>(__ldg(factor));
  walk<LANES, VEC, DEPTH>(chunk.length, step);
  release_dependents();
  RowReduction<LANES, 1, 1, TA> over_block;
  TA total[1] = {step.total};
  over_block.sum(total);
  if (threadIdx.x == 0) sums[__ldg(chunk.fields + 1) + chunk.element / CHUNK] = total[0];
}

#endif  // KERNEL_squares

#ifdef KERNEL_norms

// Block 0 computes the root of the sum over all chunks, block r + 1 that over the chunks of row r.
extern "C" __global__ void __launch_bounds__(LANES)
    norms(const TA* sums, const long long* chunk_starts, TA* __restrict__ norm,
          TA* __restrict__ norms, int* flag, int chunks) {
  wait_for_predecessor();
  const int row = static_cast<int>(blockIdx.x) - 1;
  int first = 0, end = chunks;
  if (row >= 0) {
    first = static_cast<int>(__ldcg(chunk_starts + row));
    end = static_cast<int>(__ldcg(chunk_starts + row + 1));
  }
  TA total[1] = {TA(0)};
#pragma unroll 8
  for (int at = first + static_cast<int>(threadIdx.x); at < end; at += LANES) {
    total[0] += __ldcg(sums + at);
  }
  RowReduction<LANES, 1, 1, TA> over_block;
  over_block.sum(total);
  if (threadIdx.x > 0) return;
  const TA root = sqrt(total[0]);
  if (row >= 0) {
    norms[row] = root;
    return;
  }
  *norm = root;
  if (flag && !is_finite(root)) *flag = 1;
}

#endif  // KERNEL_norms

#ifdef KERNEL_adam

namespace {

#if FORM == FLOAT8
using Stored = unsigned char;
#else
using Stored = TP;
#endif

constexpr int kScaleField = 5, kAmaxField = 6, kInverseField = 7;

// The float32 whose lower half is `low`, and whose upper half is `high`, which was rounded up if
// the lower half's highest bit is set.
__device__ __forceinline__ float joined(unsigned high, unsigned low) {
  return __uint_as_float((high - (low >> 15 & 1u)) << 16 | (low & 0xffffu));
}

__device__ __forceinline__ unsigned short half_of(const unsigned* words, int i) {
  return static_cast<unsigned short>(words[i / 2] >> i % 2 * 16);
}
__device__ __forceinline__ unsigned short half_of(const unsigned short* words, int) {
  return words[0];
}

// Sets the i-th 16 bits. To be called for i in ascending order.
template <typename Word>
__device__ __forceinline__ void set_half(Word* words, int i, unsigned bits) {
  const unsigned kept = i % 2 ? words[i / 2] : 0u;
  words[i / 2] = static_cast<Word>(kept | (bits & 0xffffu) << i % 2 * 16);
}

struct Numbers {
  TA keep1, take1, keep2, take2, share1, share2, eps, decay, lr, inv_scale;
  float scale8;
};

struct Adam {
  const TG* g;
  Stored* p;
  TM *m, *v;
  TW* w;
  Numbers by;
  float largest;

  __device__ __forceinline__ void update(TA g, TA& p, TA& m, TA& v) const {
    if constexpr (CAPTURABLE) g *= by.inv_scale;
    if constexpr (!DECOUPLED) g += by.decay * p;
    // Interpolates from the nearer end, which loses less precision where m and g cancel.
    m = SHORT ? g + (m - g) * by.keep1 : m + (g - m) * by.take1;
    v = by.keep2 * v + by.take2 * g * g;
    TA change = m * by.share1 / (sqrt(v) * by.share2 + by.eps);
    if constexpr (DECOUPLED) change += by.decay * p;
    p -= by.lr * change;
  }

  template <int N, int M>
  __device__ __forceinline__ void at(int place) {
    Vec<TG, N> gs[M];
    Vec<TM, N> ms[M], vs[M];
    Vec<TW, N> ws[M];
    Vec<TP, N> ps[M];
    load_all(gs, g + place);
    load_all(ms, m + place);
    load_all(vs, v + place);
    if constexpr (FORM == PLAIN || FORM == REMAINDER) load_all(ps, p + place);
    if constexpr (FORM != PLAIN) load_all(ws, w + place);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const int there = place + i * LANES * N;
      TA grad[N], first[N], second[N], value[N];
      decode(gs[i], grad);
      decode(ms[i], first);
      decode(vs[i], second);
      if constexpr (FORM == PLAIN) {
        decode(ps[i], value);
      } else if constexpr (FORM == REMAINDER) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          value[j] = joined(half_of(ps[i].words, j), half_of(ws[i].words, j));
        }
      } else {
        decode(ws[i], value);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) update(grad[j], value[j], first[j], second[j]);
      store_to_global(m + there, encode<TM>(first));
      store_to_global(v + there, encode<TM>(second));
      write(there, value, ps[i], ws[i]);
    }
  }

  // Writes parameters, and their masters or lower halves.
  template <int N>
  __device__ __forceinline__ void write(int there, const TA (&value)[N], Vec<TP, N>& ps,
                                        Vec<TW, N>& ws) {
    if constexpr (FORM == REMAINDER) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        // Rounding up the bits of another NaN could give a number.
        const unsigned bits = value[j] == value[j] ? __float_as_uint(value[j]) : 0x7fc00000u;
        set_half(ps.words, j, (bits >> 16) + (bits >> 15 & 1u));
        set_half(ws.words, j, bits);
      }
      store_to_global(p + there, ps);
      store_to_global(w + there, ws);
    } else {
      if constexpr (FORM != PLAIN) store_to_global(w + there, encode<TW>(value));
      if constexpr (FORM == FLOAT8) {
        using Kind = KIND;
        const Codes<Kind, N> codes = narrow<Kind>(value, by.scale8);
        store_bytes<N, N>(p + there, codes.words);
#pragma unroll
        for (int j = 0; j < N; ++j) largest = fmaxf(largest, fabsf(value[j]));
      } else {
        store_to_global(p + there, encode<TP>(value));
      }
    }
  }
};

}  // namespace

// A step of Adam on tables of g, p, m, v; then w unless FORM is PLAIN; then, for FLOAT8, scale,
// amax and scale_inv. `rest` is 1 - beta; SHORT: beta1 is below a half. `power` is
// 1 - beta**step, or the logarithm of beta if the step is on the device.
extern "C" __global__ void __launch_bounds__(LANES)
    adam(const long long* __restrict__ table, const int* __restrict__ flag,
         const TLR* __restrict__ lr_there, const TSTEP* __restrict__ step_there,
         const TSCALE* __restrict__ inv_scale, int rows, double beta1, double beta2, double rest1,
         double rest2, double eps, double weight_decay, double lr, double power1, double power2) {
  const bool skip = flag && __ldg(flag) != 0;
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  if (skip) return;
  TA rate = static_cast<TA>(lr), unscale = 1;
  if constexpr (CAPTURABLE) {
    if (lr_there) rate = static_cast<TA>(__ldg(lr_there));
    if (inv_scale) unscale = static_cast<TA>(__ldg(inv_scale));
    if (step_there) {
      const double step = static_cast<double>(__ldg(step_there));
      power1 = 1.0 - exp(step * power1);
      power2 = 1.0 - exp(step * power2);
    }
  }
  float scale8 = 1;
  if constexpr (FORM == FLOAT8) scale8 = __ldg(chunk.number<float>(kScaleField));
  const Numbers by = {static_cast<TA>(beta1),
                      static_cast<TA>(rest1),
                      static_cast<TA>(beta2),
                      static_cast<TA>(rest2),
                      static_cast<TA>(1.0 / power1),
                      static_cast<TA>(1.0 / sqrt(power2)),
                      static_cast<TA>(eps),
                      static_cast<TA>(weight_decay),
                      rate,
                      unscale,
                      scale8};
  Adam step = {chunk.tensor<TG>(0), chunk.tensor<Stored>(1), chunk.tensor<TM>(2),
               chunk.tensor<TM>(3), nullptr,             by,
               0.0f};
  if constexpr (FORM != PLAIN) step.w = chunk.tensor<TW>(4);
  walk<LANES, VEC, DEPTH>(chunk.length, step);
  if constexpr (FORM == FLOAT8) {
    RowReduction<LANES, 1, 1, float> over_block;
    float largest[1] = {step.largest};
    over_block.max(largest);
    if (threadIdx.x > 0) return;
    // The bits of magnitudes have the order of integers, and a maximum does not depend on the order
    // of the blocks.
    if (chunk.length > 0) {
      atomicMax(chunk.number<int>(kAmaxField), __float_as_int(largest[0]));
    }
    if (chunk.element == 0) *chunk.number<float>(kInverseField) = __frcp_rn(scale8);
  }
}

#endif  // KERNEL_adam

#ifdef KERNEL_sgd

namespace {

struct Sgd {
  const TG* g;
  TP* p;
  TB* b;
  TC* c;
  TA lr, decay, momentum, share, scale;

  template <int N, int M>
  __device__ __forceinline__ void at(int place) {
    Vec<TG, N> gs[M];
    Vec<TP, N> ps[M];
    Vec<TB, N> bs[M];
    load_all(gs, g + place);
    load_all(ps, p + place);
    if constexpr (MOMENTUM && !FIRST) load_all(bs, b + place);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const int there = place + i * LANES * N;
      TA grad[N], value[N], buffer[N] = {};
      decode(gs[i], grad);
      decode(ps[i], value);
      if constexpr (MOMENTUM && !FIRST) decode(bs[i], buffer);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        grad[j] *= scale;
        if constexpr (!DECAY_LAST) grad[j] += decay * value[j];
        if constexpr (MOMENTUM) {
          buffer[j] = FIRST ? grad[j] : momentum * buffer[j] + share * grad[j];
          grad[j] = NESTEROV ? grad[j] + momentum * buffer[j] : buffer[j];
        }
        if constexpr (DECAY_LAST) grad[j] += decay * value[j];
        value[j] -= lr * grad[j];
      }
      if constexpr (MOMENTUM) store_to_global(b + there, encode<TB>(buffer));
      const Vec<TP, N> written = encode<TP>(value);
      store_to_global(p + there, written);
      if constexpr (COPIES) {  // copies of the parameters as stored
        decode(written, value);
        store_to_global(c + there, encode<TC>(value));
      }
    }
  }
};

}  // namespace

// A step of SGD on tables of g, p, b and, with COPIES, a copy of p. `share` is 1 - dampening.
extern "C" __global__ void __launch_bounds__(LANES)
    sgd(const long long* __restrict__ table, const int* __restrict__ flag, int rows, double lr,
        double weight_decay, double momentum, double share, double factor) {
  const bool skip = flag && __ldg(flag) != 0;
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  if (skip) return;
  Sgd step = {chunk.tensor<TG>(0),
              chunk.tensor<TP>(1),
              chunk.tensor<TB>(2),
              nullptr,
              static_cast<TA>(lr),
              static_cast<TA>(weight_decay),
              static_cast<TA>(momentum),
              static_cast<TA>(share),
              static_cast<TA>(factor)};
  if constexpr (COPIES) step.c = chunk.tensor<TC>(3);
  walk<LANES, VEC, DEPTH>(chunk.length, step);
}

#endif  // KERNEL_sgd

#ifdef KERNEL_float_scales

// On tables of amax, scale, scale_inv; POWERS: scales are powers of two.
extern "C" __global__ void __launch_bounds__(LANES)
    float_scales(const long long* __restrict__ table, const int* __restrict__ flag, int rows,
                 double largest, double epsilon) {
  const bool skip = flag && __ldg(flag) != 0;
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  if (skip) return;
  const float* amaxes = chunk.tensor<float>(0);
  float* scales = chunk.tensor<float>(1);
  float* inverses = chunk.tensor<float>(2);
  const float low = static_cast<float>(epsilon), high = static_cast<float>(largest);
  for (int at = threadIdx.x; at < chunk.length; at += LANES) {
    const float amax = amaxes[at] < low ? low : amaxes[at];
    float scale = 1.0f;
    if (amax != 0.0f && is_finite(amax)) scale = bounded_quotient(high, amax);
    if constexpr (POWERS) {
      const unsigned bits = __float_as_uint(scale);
      // A subnormal number is rounded down to its highest bit.
      scale = __uint_as_float(bits < 0x800000u ? 0x80000000u >> __clz(static_cast<int>(bits))
                                               : bits & kInfinite);
    }
    scales[at] = scale;
    inverses[at] = __frcp_rn(scale);
  }
}

#endif  // KERNEL_float_scales

#ifdef KERNEL_e8m0_scales

// On tables of amax, as the bits of bfloat16, and of the scale's byte.
extern "C" __global__ void __launch_bounds__(LANES)
    e8m0_scales(const long long* __restrict__ table, const int* __restrict__ flag, int rows) {
  const bool skip = flag && __ldg(flag) != 0;
  const Chunk chunk = chunk_of_block<FIELDS, CHUNK>(table, rows);
  if (skip) return;
  const unsigned short* amaxes = chunk.tensor<unsigned short>(0);
  unsigned char* bytes = chunk.tensor<unsigned char>(1);
  for (int at = threadIdx.x; at < chunk.length; at += LANES) {
    const int bits = amaxes[at] & 0x7fff;
    // 448 is 1.75 * 2**8: the exponent, and one more where the fraction is above 0.75.
    const int byte = (bits >> 7) - 8 + ((bits & 0x7f) > 0x60);
    const int least_byte = byte > 0 ? byte : 0;
    bytes[at] = static_cast<unsigned char>(bits < 0x7f80 ? least_byte : bits == 0x7f80 ? 254 : 255);
  }
}

#endif  // KERNEL_e8m0_scales
