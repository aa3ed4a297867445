// The second stage of a sum over rows: adds up the partial sums of groups of rows.
//
// As for every .cu file of this folder, the host (_sums.py) defines KERNEL_<name> and the kernel's
// macros:
//
//   TS     type of the partial sums: float32 or float64
//   TW     type of the results
//   VEC    columns of a thread
//   LANES  threads of a block
//   WARPS  warps among which the groups of the same columns are divided: all of the block, each
//          covering 32 * VEC columns; or 1, and a thread adds up all groups of its columns
//
// There are no atomics, so the same call gives the same bits.

#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"

using namespace te_fl;

#ifdef KERNEL_sum_of_groups

// Adds partial[blockIdx.y][group][column] up over the groups.
extern "C" __global__ void __launch_bounds__(LANES)
    sum_of_groups(const TS* partial, TW* __restrict__ result, TW* __restrict__ second, int groups,
                  int columns) {
  constexpr int kLanes = LANES / WARPS;
  const int column = (blockIdx.x * kLanes + threadIdx.x % kLanes) * VEC;
  const TS* source = partial + static_cast<long long>(blockIdx.y) * groups * columns + column;

  TS total[VEC] = {};
  wait_for_predecessor();
#if WARPS == 1
  // Through shared memory: the compiler keeps only a few loads into registers in flight.
  constexpr int kBatch = 16;
  static_assert(sizeof(TS) * VEC == 16, "a group's copy must be 16 bytes");
  __shared__ __align__(16) unsigned char buffer[kBatch][LANES][16];
#pragma unroll 1
  for (int first = 0; first < groups; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      copy_async<16, kOnce>(buffer[i][threadIdx.x], 0,
                            source + static_cast<long long>(first + i) * columns,
                            column < columns && first + i < groups);
    }
    commit_copies();
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      TS value[VEC];  // zeros past the end
      decode(read_chunks<TS, VEC>(buffer[i][threadIdx.x], 16), value);
#pragma unroll
      for (int j = 0; j < VEC; ++j) total[j] += value[j];
    }
  }
#else
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (column < columns) {
    constexpr int kBatch = 8;  // loads in flight at once, also in the last iteration
#pragma unroll 1
    for (int first = warp; first < groups; first += kBatch * WARPS) {
      Vec<TS, VEC> batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Past the end, loads the last group again without using it: a branch would split the
        // loads.
        const int group = least(first + i * WARPS, groups - 1);
        batch[i] = load_written<VEC>(source + static_cast<long long>(group) * columns);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        TS value[VEC];
        decode(batch[i], value);
        const bool inside = first + i * WARPS < groups;
#pragma unroll
        for (int j = 0; j < VEC; ++j) total[j] += inside ? value[j] : TS(0);
      }
    }
  }
  __shared__ TS sums[WARPS][VEC][32];
#pragma unroll
  for (int i = 0; i < VEC; ++i) sums[warp][i][lane] = total[i];
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < WARPS; ++other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) total[i] += sums[other][i][lane];
  }
#endif
  if (column >= columns) return;
  TW* target = blockIdx.y == 0 ? result : second;
  store(target + column, encode<TW>(total));
}

#endif  // KERNEL_sum_of_groups
