// Pads blocks of rows with rows of zeros, or cuts rows off them.
//
// Compiled at run time: the host (padding.py) defines KERNEL_<name> and the macros below.
//
//   UNIT     bytes of a vector; divides rows, distances and addresses
//   LANES    threads of a block that share a row
//   ROWS     rows that a block works on at once
//   VECS     vectors that a thread has in flight at once
//   COUNT    the most blocks of rows of one launch
//
// The blocks' first rows are kernel arguments: nothing has to be copied to the device before, and a
// CUDA graph captures them.

#include "memory.cuh"
#include "numeric.cuh"
#include "sequences.cuh"

using namespace te_fl;

#ifdef KERNEL_move_blocks

namespace {

struct Begins {
  int to[COUNT + 1], from[COUNT + 1];
};

#if UNIT == 1
using Unit = unsigned char;
__device__ __forceinline__ Unit nothing() { return 0; }
__device__ __forceinline__ void write_unit(char* to, Unit value) {
  *reinterpret_cast<Unit*>(to) = value;
}
#else
constexpr int kShorts = UNIT / 2;
using Unit = Vec<unsigned short, kShorts>;
__device__ __forceinline__ Unit nothing() { return zeros<unsigned short, kShorts>(); }
__device__ __forceinline__ void write_unit(char* to, const Unit& value) {
  store(reinterpret_cast<unsigned short*>(to), value);
}
#endif

}  // namespace

// Writes the rows of `y`, of `units` units each, from rows of `x`, which are `x_row` units apart.
extern "C" __global__ void __launch_bounds__(LANES * ROWS)
    move_blocks(const char* __restrict__ x, char* __restrict__ y, int rows, int units,
                long long x_row, int blocks, const __grid_constant__ Begins begins) {
  const long long row =
      static_cast<long long>(blockIdx.x) * ROWS + static_cast<int>(threadIdx.x) / LANES;
  if (row >= rows) return;
  const Place to = place_of(row, begins.to, blocks, 1);
  const long long source = begins.from[to.sequence] + to.place;
  const bool known = source < begins.from[to.sequence + 1];
  const char* from = x + source * x_row * UNIT;
  char* target = y + row * units * UNIT;
  for (int first = static_cast<int>(threadIdx.x) % LANES; first < units; first += LANES * VECS) {
    Unit values[VECS];
    if (known) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        // Beyond the end the last unit is loaded again, unused: a branch would split the loads.
        const int at = first + v * LANES;
        const char* unit = from + static_cast<long long>(at < units ? at : units - 1) * UNIT;
        values[v] = load_unit(reinterpret_cast<const Unit*>(unit));
      }
    } else {
#pragma unroll
      for (int v = 0; v < VECS; ++v) values[v] = nothing();
    }
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int at = first + v * LANES;
      if (at < units) write_unit(target + static_cast<long long>(at) * UNIT, values[v]);
    }
  }
}

#endif  // KERNEL_move_blocks
