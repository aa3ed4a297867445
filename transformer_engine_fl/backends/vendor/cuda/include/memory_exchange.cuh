// Reductions over all threads that share a row whose blocks form no cluster.
//
// Any number of blocks may share a row, on any multiprocessors. Each posts its partial sums to
// flagged slots in global memory. A slot also holds its epoch, so no launch clears slots: epochs
// continue from launch to launch (backends/_exchange.py). All blocks must be resident at once, so
// the launch is cooperative. As in row_reduction.cuh the order of operations depends on the numbers
// of threads and blocks only, not on which block posts first, and every thread gets the same bits.

#pragma once

#include "cluster.cuh"
#include "memory.cuh"
#include "row_reduction.cuh"
#include "rows.cuh"

namespace te_fl {

// The exchange among the Blocks blocks of a group, which share rows: each posts K numbers of a row.
// Call from all threads of all blocks, with one object for all exchanges of a kernel. Every group
// numbers its rows as epochs from `first_epoch` on. Unlike in a cluster, a block may post a row
// before it has waited for the row before, but not before it has waited for the one before that. By
// then all blocks have posted that one, and so have waited for the row two before it: with four
// sets of slots in rotation, no block overwrites a slot that another still reads.
template <int Blocks, int K>
class MemoryExchange {
  static constexpr unsigned kEpochs = 4;  // sets of slots in rotation
  static constexpr unsigned kOfEpoch = Blocks * K;
  // Lanes beyond the last block have no block, or, if Blocks is a power of two, repeat the blocks.
  static constexpr bool kRepeated = Blocks < 32 && (Blocks & (Blocks - 1)) == 0;

 public:
  static constexpr int kPerLane = (Blocks + 31) / 32;     // blocks that each lane of a warp reads
  static constexpr int kReducedLanes = kRepeated ? Blocks : 32;    // lanes that have all blocks
  static constexpr bool kAll = kRepeated || Blocks % 32 == 0;  // no lane is without a block

  __device__ __forceinline__ MemoryExchange(FlaggedSlot* slots, unsigned first_epoch,
                                            unsigned group)
      : slots_(slots + group * (kEpochs * kOfEpoch)),
        post_epoch_(first_epoch),
        wait_epoch_(first_epoch) {
    // Otherwise the first posts and waits would wait for DRAM.
    if (threadIdx.x < kEpochs) prefetch_slot(slots_ + (threadIdx.x * kOfEpoch + own_slot()));
  }

  // Posted by the first warp, all of whose lanes must have the block's numbers.
  __device__ __forceinline__ void post(const float (&value)[K]) {
    if (threadIdx.x < K) {
      const float own = threadIdx.x == 0 ? value[0] : value[K - 1];
      post_slot(slots_ + (post_epoch_ % kEpochs * kOfEpoch + own_slot() + threadIdx.x),
                post_epoch_, __float_as_uint(own));
    }
    ++post_epoch_;
  }

  // Which block's numbers are the lane's `i`th; Blocks or more where the lane has no block.
  static __device__ __forceinline__ int block_of(int i) {
    const int lane = threadIdx.x % 32;
    return kRepeated ? lane % Blocks : lane + i * 32;
  }

  // `nothing`: the values of lanes that have no block.
  __device__ __forceinline__ void wait(const float (&nothing)[K], float (&parts)[kPerLane][K]) {
    int places[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) places[i] = least(block_of(i), Blocks - 1) * K;
    unsigned found[kPerLane][K];
    wait_for_slots(slots_ + wait_epoch_ % kEpochs * kOfEpoch, places, wait_epoch_, found);
    ++wait_epoch_;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float posted = __uint_as_float(found[i][k]);
        parts[i][k] = kAll || block_of(i) < Blocks ? posted : nothing[k];
      }
    }
  }

 private:
  static __device__ __forceinline__ unsigned own_slot() {
    return reread_block_index() % Blocks * K;
  }

  FlaggedSlot* slots_;
  unsigned post_epoch_, wait_epoch_;
};

// A reduction whose blocks exchange their results through memory.
template <int Lanes, int Blocks, int K>
class RowReduction<Lanes, Blocks, K, float, kThroughMemory> {
  static_assert(Lanes % 32 == 0, "Lanes must be whole warps");
  static constexpr int kWarps = Lanes / 32;
  using Exchange = MemoryExchange<Blocks, K>;

 public:
  __device__ __forceinline__ RowReduction(FlaggedSlot* slots, unsigned first_epoch, unsigned group)
      : exchange_(slots, first_epoch, group) {}

  // Two halves, as in other reductions.
  template <typename Operation>
  __device__ __forceinline__ void begin(float (&value)[K]) {
    static_assert(kKeeps<Operation, K>, "idle lanes would change the result");
    over_block<Operation>(value);
    exchange_.post(value);
  }

  template <typename Operation>
  __device__ __forceinline__ void end(float (&value)[K]) {
    float nothing[K];
#pragma unroll
    for (int k = 0; k < K; ++k) nothing[k] = Operation::template nothing<float>();
    float parts[Exchange::kPerLane][K];
    exchange_.wait(nothing, parts);
    merge_parts<Operation>(parts, value);
    halve<Operation, Exchange::kReducedLanes>(value);
  }

 private:
  // Reduces over the threads of a block; the first warp gets the result. Two sets of slots
  // alternate: a warp that writes a set again has passed the barrier of the other.
  template <typename Operation>
  __device__ __forceinline__ void over_block(float (&value)[K]) {
    if constexpr (kWarps == 1) {
      halve<Operation, 32>(value);
    } else {
      __shared__ __align__(16) float slots[2][K][kWarps];
      const int warp = threadIdx.x / 32;
      const int lane = threadIdx.x % 32;
      if constexpr (K == 2) {
        // After the first shuffle each half of the warp reduces one of the two sums.
        const bool upper = lane & 16;
        float own[1] = {upper ? value[1] : value[0]};
        const float other[1] = {__shfl_xor_sync(0xffffffffu, upper ? value[0] : value[1], 16)};
        Operation::merge(own, other);
        halve<Operation, 16>(own);
        if (lane % 16 == 0) slots[set_][upper][warp] = own[0];
      } else {
        halve<Operation, 32>(value);
        if (lane == 0) {
#pragma unroll
          for (int k = 0; k < K; ++k) slots[set_][k][warp] = value[k];
        }
      }
      __syncthreads();
      const float(&set)[K][kWarps] = slots[set_];
      set_ ^= 1;
      if (warp > 0) return;
      float parts[kWarps][K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) parts[w][k] = set[k][w];
      }
      merge_parts<Operation>(parts, value);
    }
  }

  Exchange exchange_;
  int set_ = 0;  // of slots of over_block
};

// The piece of each row that belongs to one of Blocks blocks: contiguous columns, spread over the
// block's threads as Row (with one block) spreads them, Vecs vectors to a thread.
template <typename Row, int Blocks, int Vecs>
class RowPiece {
 public:
  static __device__ __forceinline__ unsigned rank() { return blockIdx.x % Blocks; }
  static __device__ __forceinline__ unsigned group() { return blockIdx.x / Blocks; }

  __device__ __forceinline__ explicit RowPiece(int columns)
      : columns_(columns), first_(rank() * Vecs * Row::kVectorStride + Row::first_column(0, 0)) {}

  // Whether this thread's vector `v` is in the row.
  __device__ __forceinline__ bool has(int v) const { return Row::in_row(column(v), columns_); }

  // The number of columns of a row from the block's first one on.
  __device__ __forceinline__ int left() const {
    return columns_ - rank() * Vecs * Row::kVectorStride;
  }

  // The address of vector `v` in a row.
  template <typename T>
  __device__ __forceinline__ T* place(T* row, int v) const {
    return row + first_ + v * Row::kVectorStride;
  }

  // Starts the copy of vector `v` to shared memory, if the row exists.
  template <Reading How, typename T>
  __device__ __forceinline__ void fill(unsigned char* slots, int v, const T* row,
                                       bool exists) const {
    Row::template Slots<T>::template fill<How>(slots, v, row + first_, exists, column(v),
                                               columns_);
  }

 private:
  __device__ __forceinline__ int column(int v) const { return first_ + v * Row::kVectorStride; }

  int columns_, first_;
};

// Loops over the rows of a group of Blocks blocks, every so-many-th row of the grid's groups, as a
// pipeline: `fetch` starts the copies of a row, `take` reads it and posts its sums, and `write`
// finishes it, after the next row has been taken. Stages rows are in flight, each in Bytes of the
// ring. The loop is unrolled over two rows in registers, so that neither is moved to the other's.
template <int Blocks, int Stages, int Bytes, typename Held, typename Index, typename Fetch,
          typename Take, typename Write>
__device__ __forceinline__ void for_each_row(unsigned char* ring, Index rows, Fetch fetch,
                                             Take take, Write write) {
  const Index groups = gridDim.x / Blocks;
  Index row = blockIdx.x / Blocks;
  auto request = [&](Index of, int stage) {
    fetch(of, ring + stage * Bytes);
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < Stages; ++stage) request(row + stage * groups, stage);
  int stage = 0;
  auto take_from_ring = [&](Index of, Held& held) {
    wait_copies<Stages - 1>();
    take(of, ring + stage * Bytes, held);
  };
  // Fetches a row to the place of the one that was taken last.
  auto refill = [&](Index taken) {
    request(taken + Stages * groups, stage);
    stage = stage + 1 == Stages ? 0 : stage + 1;
  };
  auto step = [&](const Held& held, Held& next) {
    const Index following = row + groups;
    if (following < rows) take_from_ring(following, next);
    write(row, held);
    refill(following);
    row = following;
    return row < rows;
  };
  Held even, odd;
  take_from_ring(row, even);
  refill(row);
#pragma unroll 1
  while (step(even, odd) && step(odd, even)) {
  }
  wait_copies<0>();
}

}  // namespace te_fl
