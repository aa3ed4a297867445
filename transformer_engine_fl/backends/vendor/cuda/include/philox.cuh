// Random numbers that are a function of their place: Philox4x32-10.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. What
// counter and key stand for is the contract's to say (ops/dropout.py), so that every
// implementation draws the same numbers.

#pragma once

namespace te_fl {

struct PhiloxBlock {
  unsigned words[4];
};

// The block of the counter (low, high, offset) and the key `seed`, the low halves first.
// What is the same for all threads, as offset and seed are, costs one of them only.
__device__ __forceinline__ PhiloxBlock philox(unsigned low, unsigned high,
                                              unsigned long long offset,
                                              unsigned long long seed) {
  unsigned c0 = low, c1 = high;
  unsigned c2 = static_cast<unsigned>(offset), c3 = static_cast<unsigned>(offset >> 32);
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long left = 0xD2511F53ull * c0, right = 0xCD9E8D57ull * c2;
    c0 = static_cast<unsigned>(right >> 32) ^ c1 ^ k0;
    c1 = static_cast<unsigned>(right);
    c2 = static_cast<unsigned>(left >> 32) ^ c3 ^ k1;
    c3 = static_cast<unsigned>(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace te_fl
