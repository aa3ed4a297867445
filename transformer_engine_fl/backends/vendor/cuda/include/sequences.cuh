// Sequences of different lengths packed in one tensor: the sequence and position of a row.
//
// Offsets come from users. Whatever their values, no read is out of bounds, and of the result for
// a row without a sequence only `exists`, which is false, has a meaning.

#pragma once

namespace te_fl {

// A row's sequence (always a valid index), the row's position in it, and the sequence's length.
// They have no further meaning unless `exists`.
struct Place {
  long long place, length;
  int sequence;
  bool exists;
};

// Sequence i of `sequences` (at least one) has the rows from offsets[i] / divisor up to, but not
// including, offsets[i + 1] / divisor.
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
