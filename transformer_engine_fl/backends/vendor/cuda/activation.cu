// Activations: elementwise and gated, their gradients, and that of a bias.
//
// Compiled at run time, one kernel and one specialisation at a time: the host defines
// KERNEL_<name> and what that kernel needs of the following, as activation.py chooses it.
//
//   TX, TDY    storage types of the input and of the output's gradient
//   KIND       which activation: a type of activations.cuh
//   GATED      1 if a row holds the activated half and, `columns` further on, the gate
//   CLAMPED    1 if both halves are limited
//   BACKWARD   1 for the gradient
//   FLAT       1 if rows follow each other without gaps, so that they need not be told apart
//   VEC        elements per vector; divides the columns, unless FLAT
//   ACCESS     elements that the addresses allow in one access, up to VEC
//   LANES      threads of a block that share its columns (all of them, in `elementwise`)
//   ROWS       rows that a block of `with_bias` works on at once
//   BLOCKS     blocks that must fit on a multiprocessor; bounds the registers
//
// Nothing is added atomically, so the same call gives the same bits.

#include "activations.cuh"
#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

#ifdef KERNEL_elementwise

// N neighbouring elements: what is read of them, and what becomes of that.
template <int N>
struct Share {
  static constexpr int kAccess = least(ACCESS, N);
  Vec<TX, N> x, gate;
  Vec<TDY, N> grad;

  __device__ __forceinline__ void read(const TDY* grad_from, const TX* x_from, int columns) {
    x = load<kAccess, N>(x_from);
    if constexpr (GATED) gate = load<kAccess, N>(x_from + columns);
    if constexpr (BACKWARD) grad = load<kAccess, N>(grad_from);
  }

  __device__ __forceinline__ void finish(TX* out, int columns, A limit, A alpha) const {
    A a[N], b[N], dy[N], first[N], second[N];
    decode(x, a);
    if constexpr (GATED) decode(gate, b);
    if constexpr (BACKWARD) decode(grad, dy);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bool outside = false, gate_outside = false;  // which NaN never is
      if constexpr (CLAMPED) {
        outside = a[i] > limit;
        gate_outside = b[i] > limit || b[i] < -limit;
        a[i] = a[i] > limit ? limit : a[i];
        b[i] = clamp(b[i], limit) + A(1);
      }
      const Activated<A> f = KIND::at(a[i], alpha);
      if constexpr (BACKWARD) {
        first[i] = dy[i] * f.slope;
        if constexpr (GATED) {
          first[i] = outside ? A(0) : dy[i] * b[i] * f.slope;
          second[i] = gate_outside ? A(0) : dy[i] * f.value;
        }
      } else {
        first[i] = GATED ? f.value * b[i] : f.value;
      }
    }
    store(out, encode<TX>(first));
    if constexpr (GATED && BACKWARD) store(out + columns, encode<TX>(second));
  }
};

#endif

}  // namespace

#ifdef KERNEL_elementwise

// A thread has one vector; `vectors` counts those of all rows, and `tail` the elements behind
// them (FLAT).
extern "C" __global__ void __launch_bounds__(LANES)
    elementwise(const TDY* __restrict__ grad, const TX* __restrict__ x, TX* __restrict__ out,
                long long vectors, int tail, int columns, long long grad_stride,
                long long x_stride, double limit, double alpha) {
  constexpr int kOut = GATED && BACKWARD ? 2 : 1;  // halves of a row of the output
  const long long at = static_cast<long long>(blockIdx.x) * LANES + threadIdx.x;
  if (at < vectors) {
    Share<VEC> share;
    long long place = at * VEC;
    if constexpr (FLAT) {
      share.read(grad + place, x + place, 0);
    } else {
      const unsigned per_row = static_cast<unsigned>(columns) / VEC;
      const unsigned row = static_cast<unsigned>(at) / per_row;
      const unsigned column = (static_cast<unsigned>(at) - row * per_row) * VEC;
      place = static_cast<long long>(row) * (kOut * static_cast<long long>(columns)) + column;
      share.read(grad + row * grad_stride + column, x + row * x_stride + column, columns);
    }
    share.finish(out + place, columns, A(limit), A(alpha));
  }
  if constexpr (FLAT) {
    if (blockIdx.x == gridDim.x - 1 && static_cast<int>(threadIdx.x) < tail) {
      const long long place = vectors * VEC + threadIdx.x;
      Share<1> share;
      share.read(grad + place, x + place, 0);
      share.finish(out + place, 0, A(limit), A(alpha));
    }
  }
}

#endif  // KERNEL_elementwise

#ifdef KERNEL_with_bias

// The gradient, and its sum over the rows of each group, to partial[group][column]:
// blockIdx.x chooses the columns, blockIdx.y the group. A thread asks for its next row before
// it works on the one that came.
extern "C" __global__ void __launch_bounds__(LANES * ROWS, BLOCKS)
    with_bias(const TDY* __restrict__ grad, const TX* __restrict__ x, TX* __restrict__ out,
              A* __restrict__ partial, long long rows, long long grad_stride, long long x_stride,
              int columns) {
  const int lane = threadIdx.x % LANES;
  const int team = threadIdx.x / LANES;
  const int column = (blockIdx.x * LANES + lane) * VEC;
  const bool inside = column < columns;
  const long long step = static_cast<long long>(gridDim.y) * ROWS;
  A total[VEC] = {};
  Vec<TX, VEC> next_x;
  Vec<TDY, VEC> next_grad;
  const auto ask = [&](long long row) {
    if (row >= rows || !inside) return;
    next_x = load<ACCESS, VEC>(x + row * x_stride + column);
    next_grad = load<ACCESS, VEC>(grad + row * grad_stride + column);
  };
  const long long first = static_cast<long long>(blockIdx.y) * ROWS + team;
  ask(first);
  for (long long row = first; row < rows && inside; row += step) {
    const Vec<TX, VEC> values = next_x;
    const Vec<TDY, VEC> grads = next_grad;
    ask(row + step);
    A a[VEC], dx[VEC];
    decode(values, a);
    decode(grads, dx);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      dx[i] *= KIND::at(a[i], A(0)).slope;
      total[i] += dx[i];
    }
    store(out + row * columns + column, encode<TX>(dx));
  }
  release_dependents();
  if constexpr (ROWS > 1) {
    // Neighbouring lanes use neighbouring banks.
    __shared__ A teams[ROWS > 1 ? ROWS - 1 : 1][VEC][LANES];
    if (team > 0) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) teams[team - 1][i][lane] = total[i];
    }
    __syncthreads();
    if (team > 0) return;
#pragma unroll
    for (int other = 0; other < ROWS - 1; ++other) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) total[i] += teams[other][i][lane];
    }
  }
  if (inside) {
    store(partial + static_cast<long long>(blockIdx.y) * columns + column, encode<A>(total));
  }
}

#endif  // KERNEL_with_bias
