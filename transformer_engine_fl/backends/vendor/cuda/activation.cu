// Activations, elementwise and gated, their gradients, and the gradient of a bias.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (activation.py)
// defines KERNEL_<name> and the macros below that the kernel needs.
//
//   TX, TDY    storage types of the input and of the output's gradient
//   KIND       the activation: a type of activations.cuh
//   GATED      1 if a row holds the activated half and, `columns` further on, the gate
//   CLAMPED    1 if both halves are clamped
//   BACKWARD   1 for the gradient
//   FLAT       1 if rows are contiguous, so that all elements are treated as one row
//   VEC        elements per vector; divides the columns, unless FLAT
//   ACCESS     elements that one access may cover, up to VEC
//   LANES      threads along the columns of a block (all threads, in `elementwise`)
//   ROWS       rows that a block of `with_bias` works on at once
//   DEPTH      rows that a thread of `with_bias` has in flight
//
// There are no atomic additions, so the same call gives the same bits.

#include "activations.cuh"
#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "rows.cuh"

using namespace te_fl;

namespace {

using A = Accumulator<TX>::type;

#ifdef KERNEL_elementwise

// N neighbouring elements: the inputs that are read, and the results computed from them.
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
      bool outside = false, gate_outside = false;  // always false for NaN
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

// A thread has one vector. `vectors` is the number of whole vectors in all rows, `tail` that of the
// elements behind them (FLAT).
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

// Writes the gradient, and its sum over each group of rows to partial[group][column]: blockIdx.x
// is the block of columns, blockIdx.y the group. DEPTH rows of a thread are in flight to shared
// memory, since registers cannot hold enough rows to keep memory busy.
extern "C" __global__ void __launch_bounds__(LANES * ROWS)
    with_bias(const TDY* __restrict__ grad, const TX* __restrict__ x, TX* __restrict__ out,
              A* __restrict__ partial, long long rows, long long grad_stride, long long x_stride,
              int columns) {
  using Tile = RowTile<VEC, 1, ACCESS, LANES, ROWS, 1, false, false>;
  using Inputs = Tile::Slots<TX>;
  using Grads = Tile::Slots<TDY>;
  constexpr int kRow = Inputs::kBytes + Grads::kBytes;
  constexpr int kTotals = (ROWS - 1) * VEC * LANES * static_cast<int>(sizeof(A));
  __shared__ __align__(16) unsigned char ring[DEPTH * kRow > kTotals ? DEPTH * kRow : kTotals];
  const int lane = threadIdx.x % LANES;
  const int team = threadIdx.x / LANES;
  const int column = (blockIdx.x * LANES + lane) * VEC;
  const bool inside = column < columns;
  const long long step = static_cast<long long>(gridDim.y) * ROWS;
  const auto fetch = [&](long long row, unsigned char* to) {
    const bool exists = row < rows;
    Inputs::template fill<kOnce>(to, 0, x + row * x_stride + column, exists, column, columns);
    Grads::template fill<kOnce>(to + Inputs::kBytes, 0, grad + row * grad_stride + column, exists,
                                column, columns);
    commit_copies();
  };
  long long row = static_cast<long long>(blockIdx.y) * ROWS + team;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(row + i * step, ring + i * kRow);
  A total[VEC] = {};
#pragma unroll 1
  for (int at = 0; row < rows && inside; row += step) {
    wait_copies<DEPTH - 1>();
    A a[VEC], dx[VEC];
    decode(Inputs::read(ring + at, 0), a);
    decode(Grads::read(ring + at + Inputs::kBytes, 0), dx);
    fetch(row + DEPTH * step, ring + at);
    at = at == (DEPTH - 1) * kRow ? 0 : at + kRow;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      dx[i] *= KIND::at(a[i], A(0)).slope;
      total[i] += dx[i];
    }
    store(out + row * columns + column, encode<TX>(dx));
  }
  release_dependents();
  if constexpr (ROWS > 1) {
    wait_copies<0>();
    __syncthreads();
    // Neighbouring lanes use neighbouring banks.
    auto* teams = reinterpret_cast<A(*)[VEC][LANES]>(ring);
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
