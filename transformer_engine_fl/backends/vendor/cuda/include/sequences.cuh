// Sequences of several lengths in one tensor: which row stands where.
//
// The offsets come from users. Whatever they are, no entry that does not exist is read, and
// what is told of a row without a sequence is only that there is none.

#pragma once

namespace te_fl {

// Where a row stands: its sequence (always one that exists), its place in it, and the length
// of that; they mean nothing else unless `exists`.
struct Place {
  long long place, length;
  int sequence;
  bool exists;
};

// Sequence i of `sequences`, at least one, has the rows from offsets[i] / divisor up to those
// of i + 1.
template <typename Offset>
__device__ __forceinline__ Place place_of(long long row, const Offset* __restrict__ offsets,
                                          int sequences, int divisor) {
  int low = 0, high = sequences;  // the sequence is in [low, high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (offsets[middle] / divisor <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const long long begin = offsets[low] / divisor;
  const long long length = offsets[low + 1] / divisor - begin;
  const long long place = row - begin;
  return {place, length, low, place >= 0 && place < length};
}

}  // namespace te_fl
