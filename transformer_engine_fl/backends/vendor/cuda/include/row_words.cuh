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
  static_assert(Lanes % 32 == 0 && Blocks <= Lanes, "whole warps hear a word a lane");
  using Word = typename ToldIn<K>::type;
  static constexpr int kWarps = Lanes / 32;
  static constexpr int kHearing = (Blocks + 31) / 32;  // warps; if one is enough, all of them
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
    over_warps<Operation, kWarps, true>(value, turn_);
    turn_ ^= 1;
    if (threadIdx.x == 0) {
      Word word = __float_as_uint(value[0]) ^ kNoSum;
      if constexpr (K == 2) word |= Word(__float_as_uint(value[1]) ^ kNoSum) << 32;
      post_word(words_ + (telling_ + blockIdx.x % Blocks), word);
    }
    telling_ += step_;
  }

  template <typename Operation>
  __device__ __forceinline__ void end(float (&value)[K]) {
    // Lanes behind the last block have 0, or of a power of two of blocks the same once more.
    constexpr bool kAgain = Blocks < 32 && (Blocks & (Blocks - 1)) == 0;
    constexpr bool kAll = kAgain || Blocks % 32 == 0;
    static_assert(kAll || kKeeps<Operation>, "0 for what 32 lanes have more");
    if (kHearing == 1 || kHearing == kWarps || own_warp() < kHearing) {
      const int lane = threadIdx.x % (kHearing * 32);
      const int block = kAgain ? lane % Blocks : least(lane, Blocks - 1);
      const Word word = wait_for_word(words_ + (hearing_ + block));
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float told = __uint_as_float(static_cast<unsigned>(word >> k * 32) ^ kNoSum);
        value[k] = kAll || lane < Blocks ? told : 0.0f;
      }
    }
    hearing_ += step_;
    if constexpr (kHearing == 1) {
      halve<Operation, (kAgain ? Blocks : 32)>(value);
    } else {
      over_warps<Operation, kHearing, false>(value, heard_);
      heard_ ^= 1;
    }
  }

 private:
  // From the first lane, so that the compiler sees that it is the same for all of them.
  static __device__ __forceinline__ int own_warp() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  }

  // Over the threads of the first Warps warps; all warps get the result, or the first one. One of
  // two sets of slots in turn: who writes one again has passed the barrier of the other.
  template <typename Operation, int Warps, bool ForFirst>
  __device__ __forceinline__ void over_warps(float (&value)[K], int set) {
    if constexpr (Warps == 1) {
      halve<Operation, 32>(value);
    } else {
      __shared__ __align__(16) float slots[2][K][Warps];
      const int warp = Warps == kWarps ? static_cast<int>(threadIdx.x) / 32 : own_warp();
      const int lane = threadIdx.x % 32;
      if (Warps == kWarps || warp < Warps) {
        if constexpr (K == 2 && kKeeps<Operation>) {
          // Of two sums: after the first exchange each half of the warp has one of them.
          const bool upper = lane & 16;
          float own[1] = {upper ? value[1] : value[0]};
          const float other[1] = {__shfl_xor_sync(0xffffffffu, upper ? value[0] : value[1], 16)};
          Operation::merge(own, other);
          halve<Operation, 16>(own);
          if (lane % 16 == 0) slots[set][upper][warp] = own[0];
        } else {
          halve<Operation, 32>(value);
          if (lane == 0) {
#pragma unroll
            for (int k = 0; k < K; ++k) slots[set][k][warp] = value[k];
          }
        }
      }
      __syncthreads();
      if (ForFirst && warp > 0) return;
      float parts[Warps][K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int w = 0; w < Warps; ++w) parts[w][k] = slots[set][k][w];
      }
      merge_parts<Operation>(parts, value);
    }
  }

  Word* words_;
  unsigned telling_, hearing_, step_;
  int turn_ = 0;
  int heard_ = 0;
};

}  // namespace te_fl
