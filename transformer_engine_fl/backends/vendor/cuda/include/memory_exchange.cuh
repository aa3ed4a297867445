// Sums over all threads that share a row whose blocks form no cluster.
//
// Any number of blocks may share a row, on whichever multiprocessors: each leaves its sums in
// global memory, each in a slot that also says which epoch it is of, so that nobody clears slots:
// epochs go on from launch to launch (backends/_exchange.py). They must all run at once, so the
// launch is a cooperative one. As in row_reduction.cuh the order of operations depends on the
// numbers of threads and blocks only, not on who comes first, and every thread gets the same bits.

#pragma once

#include "cluster.cuh"
#include "memory.cuh"
#include "row_reduction.cuh"
#include "rows.cuh"

namespace te_fl {

// What the blocks that share a row exchange of it, K numbers each. Call from all threads of
// all blocks, one object for all that a kernel exchanges. Groups of Blocks blocks take rows one
// after the other, in `first_epoch` and those behind it, each group from the first. Unlike in a
// cluster, who posts a row need not have waited for the row before, but for the one before that.
// All had posted that one by then, and so had waited for the one two before it: of four epochs in a
// row nobody writes the slots of one that somebody still waits for.
template <int Blocks, int K>
class MemoryExchange {
  static constexpr unsigned kEpochs = 4;  // whose slots have places of their own
  static constexpr unsigned kOfEpoch = Blocks * K;
  // Lanes behind the last block have nothing, or of a power of two of blocks the same once more.
  static constexpr bool kAgain = Blocks < 32 && (Blocks & (Blocks - 1)) == 0;

 public:
  static constexpr int kPerLane = (Blocks + 31) / 32;     // blocks of a lane, in each warp
  static constexpr int kHalved = kAgain ? Blocks : 32;    // lanes that have all of them
  static constexpr bool kAll = kAgain || Blocks % 32 == 0;  // whether all of those have something

  __device__ __forceinline__ MemoryExchange(FlaggedSlot* slots, unsigned first_epoch,
                                            unsigned group)
      : slots_(slots + group * (kEpochs * kOfEpoch)),
        post_epoch_(first_epoch),
        wait_epoch_(first_epoch) {
    // Else whoever posts the first ones, or waits for them, would wait for memory.
    if (threadIdx.x < kEpochs) prefetch_slot(slots_ + (threadIdx.x * kOfEpoch + own_place()));
  }

  // Of the first warp, all of whose lanes have the block's numbers.
  __device__ __forceinline__ void post(const float (&value)[K]) {
    if (threadIdx.x < K) {
      const float own = threadIdx.x == 0 ? value[0] : value[K - 1];
      post_slot(slots_ + (post_epoch_ % kEpochs * kOfEpoch + own_place() + threadIdx.x),
                post_epoch_, __float_as_uint(own));
    }
    ++post_epoch_;
  }

  // Whose numbers are the lane's `i`th; of lanes that have nothing, none that there is.
  static __device__ __forceinline__ int block_of(int i) {
    const int lane = threadIdx.x % 32;
    return kAgain ? lane % Blocks : lane + i * 32;
  }

  // `nothing`: what lanes have that have nothing.
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
  static __device__ __forceinline__ unsigned own_place() { return block_again() % Blocks * K; }

  FlaggedSlot* slots_;
  unsigned post_epoch_, wait_epoch_;
};

// A reduction whose blocks exchange sums so, which are merged one by one.
template <int Lanes, int Blocks, int K>
class RowReduction<Lanes, Blocks, K, float, kThroughMemory> {
  static_assert(Lanes % 32 == 0, "whole warps wait");
  static constexpr int kWarps = Lanes / 32;
  using Exchange = MemoryExchange<Blocks, K>;

 public:
  __device__ __forceinline__ RowReduction(FlaggedSlot* slots, unsigned first_epoch, unsigned group)
      : exchange_(slots, first_epoch, group) {}

  // Two halves, as those of other reductions.
  template <typename Operation>
  __device__ __forceinline__ void begin(float (&value)[K]) {
    static_assert(kKeeps<Operation, K>, "lanes may have nothing, or half of the values");
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
    halve<Operation, Exchange::kHalved>(value);
  }

 private:
  // Over the threads of a block; the first warp gets the result. One of two sets of slots in
  // alternation: who writes one again has passed the barrier of the other.
  template <typename Operation>
  __device__ __forceinline__ void over_block(float (&value)[K]) {
    if constexpr (kWarps == 1) {
      halve<Operation, 32>(value);
    } else {
      __shared__ __align__(16) float slots[2][K][kWarps];
      const int warp = threadIdx.x / 32;
      const int lane = threadIdx.x % 32;
      if constexpr (K == 2) {
        // Of two sums: after the first exchange each half of the warp has one of them.
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

// What a block has of each row that Blocks blocks share, columns that follow each other: as Row, of
// one block, has them, in Vecs vectors of a thread.
template <typename Row, int Blocks, int Vecs>
class RowPiece {
 public:
  static __device__ __forceinline__ unsigned rank() { return blockIdx.x % Blocks; }
  static __device__ __forceinline__ unsigned group() { return blockIdx.x / Blocks; }

  __device__ __forceinline__ explicit RowPiece(int columns)
      : columns_(columns), first_(rank() * Vecs * Row::kApart + Row::first_column(0, 0)) {}

  // Whether this thread's vector `v` is in the row.
  __device__ __forceinline__ bool has(int v) const { return Row::in_row(column(v), columns_); }

  // How many columns of a row there are from the block's first one on.
  __device__ __forceinline__ int left() const { return columns_ - rank() * Vecs * Row::kApart; }

  // Where it lies in a row.
  template <typename T>
  __device__ __forceinline__ T* place(T* row, int v) const {
    return row + first_ + v * Row::kApart;
  }

  // Asks for it, if the row exists.
  template <Reading How, typename T>
  __device__ __forceinline__ void fill(unsigned char* slots, int v, const T* row,
                                       bool exists) const {
    Row::template Slots<T>::template fill<How>(slots, v, row + first_, exists, column(v),
                                               columns_);
  }

 private:
  __device__ __forceinline__ int column(int v) const { return first_ + v * Row::kApart; }

  int columns_, first_;
};

// Goes through the rows of a group of Blocks blocks, which are all of the grid's groups apart: asks
// for each, takes it and posts its sums, and writes it, having taken the next one
// meanwhile. Stages rows are asked for at once, each with so many Bytes of the ring. Two rows are
// held in alternation, and neither is moved to where the other was.
template <int Blocks, int Stages, int Bytes, typename Held, typename Index, typename Ask,
          typename Take, typename Write>
__device__ __forceinline__ void go_through(unsigned char* ring, Index rows, Ask ask, Take take,
                                           Write write) {
  const Index groups = gridDim.x / Blocks;
  Index row = blockIdx.x / Blocks;
  auto request = [&](Index of, int stage) {
    ask(of, ring + stage * Bytes);
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < Stages; ++stage) request(row + stage * groups, stage);
  int stage = 0;
  auto take_from_ring = [&](Index of, Held& held) {
    wait_copies<Stages - 1>();
    take(of, ring + stage * Bytes, held);
  };
  // In the place of the row that was taken last.
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
