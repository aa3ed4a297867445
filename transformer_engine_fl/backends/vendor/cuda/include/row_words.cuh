// Sums over all threads that share a row whose blocks form no cluster.
//
// Any number of blocks may share a row, on whichever multiprocessors: each leaves its sums in
// global memory, in a word for that row. They must all run at once, so the launch is a
// cooperative one. As in row_reduction.cuh the order of operations depends on the numbers of
// threads and blocks only, not on who comes first, and every thread gets the same bits.

#pragma once

#include "cluster.cuh"
#include "row_reduction.cuh"

namespace te_fl {

// What blocks tell each other: one sum, or two that are there together.
template <int K>
struct ToldIn;
template <>
struct ToldIn<1> {
  using type = unsigned;
};
template <>
struct ToldIn<2> {
  using type = unsigned long long;
};

// Call from all threads of all blocks, one object for all sums of a kernel. The rows of this block
// are `first`, `first + step` and so on, each with Blocks words, all 0 at first. Unlike in a
// cluster, who tells of a row need not have heard of the row before.
template <int Lanes, int Blocks, int K>
class RowReduction<Lanes, Blocks, K, float, kThroughMemory> {
  static_assert(Lanes % 32 == 0, "whole warps hear");
  using Word = typename ToldIn<K>::type;
  static constexpr int kWarps = Lanes / 32;
  static constexpr int kHeard = (Blocks + 31) / 32;  // words of a lane, in each warp
  // A signalling NaN, which no sum is: what comes of arithmetic is a quiet one. So no word that
  // is there is 0.
  static constexpr unsigned kNoSum = 0x7f800001u;

 public:
  __device__ __forceinline__ RowReduction(void* words, unsigned first, unsigned step)
      : words_(static_cast<Word*>(words)),
        telling_(first * Blocks),
        hearing_(first * Blocks),
        step_(step * Blocks) {}

  // Two halves, as those of other reductions; values are merged one by one.
  template <typename Operation>
  __device__ __forceinline__ void begin(float (&value)[K]) {
    over_block<Operation>(value);
    if (threadIdx.x == 0) {
      Word word = __float_as_uint(value[0]) ^ kNoSum;
      if constexpr (K == 2) word |= Word(__float_as_uint(value[1]) ^ kNoSum) << 32;
      post_word(words_ + (telling_ + blockIdx.x % Blocks), word);
    }
    telling_ += step_;
  }

  template <typename Operation>
  __device__ __forceinline__ void end(float (&value)[K]) {
    // Lanes behind the last block have nothing, or of a power of two of blocks the same once more.
    constexpr bool kAgain = Blocks < 32 && (Blocks & (Blocks - 1)) == 0;
    constexpr bool kAll = kAgain || Blocks % 32 == 0;
    static_assert(kAll || kKeeps<Operation, K>, "nothing for what 32 lanes have more");
    const int lane = threadIdx.x % 32;
    int blocks[kHeard];
#pragma unroll
    for (int i = 0; i < kHeard; ++i) {
      blocks[i] = kAgain ? lane % Blocks : least(lane + i * 32, Blocks - 1);
    }
    Word found[kHeard];
    wait_for_words(words_ + hearing_, blocks, found);
    hearing_ += step_;
    float heard[kHeard][K];
#pragma unroll
    for (int i = 0; i < kHeard; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float told = __uint_as_float(static_cast<unsigned>(found[i] >> k * 32) ^ kNoSum);
        const bool there = kAll || lane + i * 32 < Blocks;
        heard[i][k] = there ? told : Operation::template nothing<float>();
      }
    }
    merge_parts<Operation>(heard, value);
    halve<Operation, (kAgain ? Blocks : 32)>(value);
  }

 private:
  // Over the threads of a block; the first warp gets the result. One of two sets of slots in turn:
  // who writes one again has passed the barrier of the other.
  template <typename Operation>
  __device__ __forceinline__ void over_block(float (&value)[K]) {
    if constexpr (kWarps == 1) {
      halve<Operation, 32>(value);
    } else {
      __shared__ __align__(16) float slots[2][K][kWarps];
      const int warp = threadIdx.x / 32;
      const int lane = threadIdx.x % 32;
      if constexpr (K == 2 && kKeeps<Operation, K>) {
        // Of two sums: after the first exchange each half of the warp has one of them.
        const bool upper = lane & 16;
        float own[1] = {upper ? value[1] : value[0]};
        const float other[1] = {__shfl_xor_sync(0xffffffffu, upper ? value[0] : value[1], 16)};
        Operation::merge(own, other);
        halve<Operation, 16>(own);
        if (lane % 16 == 0) slots[turn_][upper][warp] = own[0];
      } else {
        halve<Operation, 32>(value);
        if (lane == 0) {
#pragma unroll
          for (int k = 0; k < K; ++k) slots[turn_][k][warp] = value[k];
        }
      }
      __syncthreads();
      const float(&set)[K][kWarps] = slots[turn_];
      turn_ ^= 1;
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

  Word* words_;
  unsigned telling_, hearing_, step_;
  int turn_ = 0;
};

}  // namespace te_fl
