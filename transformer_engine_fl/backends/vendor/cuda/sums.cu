// The second stage of a sum over rows: adding up the partial sums that groups of rows left.
//
// As in every .cu file of this folder, the host (_sums.py) defines KERNEL_<name> and what
// the kernel needs:
//
//   TS     type of the partial sums: float32 or float64
//   TW     type of the results
//   VEC    columns of a thread
//   LANES  threads of a block: a warp covers 32 * VEC columns, the warps share out the groups
//
// Nothing is added atomically, so the same call gives the same bits.

#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"

using namespace te_fl;

#ifdef KERNEL_sum_of_groups

// Adds partial[blockIdx.y][group][column] up over the groups.
extern "C" __global__ void __launch_bounds__(LANES)
    sum_of_groups(const TS* partial, TW* __restrict__ result, TW* __restrict__ second, int groups,
                  int columns) {
  constexpr int kWarps = LANES / 32;
  __shared__ TS sums[kWarps][VEC][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int column = (blockIdx.x * 32 + lane) * VEC;
  const TS* source = partial + static_cast<long long>(blockIdx.y) * groups * columns + column;

  TS total[VEC] = {};
  wait_for_predecessor();
  if (column < columns) {
    constexpr int kBatch = 8;  // loads under way at once, also in the last round
#pragma unroll 1
    for (int first = warp; first < groups; first += kBatch * kWarps) {
      Vec<TS, VEC> batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Past the end the last group again, unused: a branch would break up the loads.
        const int group = least(first + i * kWarps, groups - 1);
        batch[i] = load_written<VEC>(source + static_cast<long long>(group) * columns);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        TS value[VEC];
        decode(batch[i], value);
        const bool inside = first + i * kWarps < groups;
#pragma unroll
        for (int j = 0; j < VEC; ++j) total[j] += inside ? value[j] : TS(0);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VEC; ++i) sums[warp][i][lane] = total[i];
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) total[i] += sums[other][i][lane];
  }
  TW* target = blockIdx.y == 0 ? result : second;
  store(target + column, encode<TW>(total));
}

#endif  // KERNEL_sum_of_groups
