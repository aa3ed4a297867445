// Counter-based random numbers: Philox4x32-10.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The
// contract (ops/dropout.py) defines what counter and key stand for, so that every implementation
// draws the same numbers.

#pragma once

#include "instructions.cuh"

namespace te_fl {

struct PhiloxBlock {
  unsigned words[4];
};

// The two key words of each round, which philox_keys of dropout.py computes. As arguments of a
// kernel they are operands of its instructions, and need no instructions of their own.
struct PhiloxKeys {
  unsigned rounds[10][2];
};

// The block of the counter (low, high, offset), least significant words first.
__device__ __forceinline__ PhiloxBlock philox(unsigned low, unsigned high,
                                              unsigned long long offset,
                                              const PhiloxKeys& keys) {
  unsigned c0 = low, c1 = high;
  unsigned c2 = static_cast<unsigned>(offset), c3 = static_cast<unsigned>(offset >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long left = wide_product(0xD2511F53u, c0);
    const unsigned long long right = wide_product(0xCD9E8D57u, c2);
    c0 = static_cast<unsigned>(right >> 32) ^ c1 ^ keys.rounds[round][0];
    c1 = static_cast<unsigned>(right);
    c2 = static_cast<unsigned>(left >> 32) ^ c3 ^ keys.rounds[round][1];
    c3 = static_cast<unsigned>(left);
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace te_fl
