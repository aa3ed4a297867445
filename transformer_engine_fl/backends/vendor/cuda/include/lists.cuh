// Lists of tensors that one launch processes: the chunk of a block, and a loop over its elements.
//
// The host (backends/_lists.py) makes the table: the number of each row's first chunk, then for
// each row its count of elements and the addresses of its tensors. A row is cut into chunks of a
// fixed number of elements, one for each block.

#pragma once

#include "memory.cuh"
#include "numeric.cuh"

namespace te_fl {

struct Chunk {
  const long long* fields;  // the row's fields that follow its count of elements
  long long element;        // the first one
  int length;

  // The pointer in field `at`, to a value that the row has once.
  template <typename T>
  __device__ __forceinline__ T* number(int at) const {
    return reinterpret_cast<T*>(__ldg(fields + at));
  }
  // The chunk's elements of tensor `at`.
  template <typename T>
  __device__ __forceinline__ T* tensor(int at) const {
    return number<T>(at) + element;
  }
};

// The chunk of this block, in a table of rows with Fields fields. Every warp searches by itself,
// and looks at 32 evenly spaced rows at a time: two reads find one of 1024 rows.
template <int Fields, int Size>
__device__ __forceinline__ Chunk chunk_of_block(const long long* __restrict__ table, int rows) {
  const long long chunk = blockIdx.x;
  const int lane = threadIdx.x % 32;
  int row = 0, count = rows;  // the chunk's row is in [row, row + count)
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int ahead = lane * step;
    const bool begun = ahead < count && __ldg(table + row + ahead) <= chunk;
    const int last = __popc(__ballot_sync(0xffffffffu, begun)) - 1;  // the first has begun
    row += last * step;
    count = least(step, count - last * step);
  }
  const long long* entry = table + rows + static_cast<long long>(row) * (1 + Fields);
  const long long element = (chunk - __ldg(table + row)) * Size;
  const long long left = __ldg(entry) - element;
  return {entry + 1, element, left < Size ? static_cast<int>(left) : Size};
}

// Calls `step.at<N, M>(place)` so that each element is processed once: M vectors of N elements,
// the first at `place`, and each next one Threads * N elements further on.
template <int Threads, int Width, int Depth, typename Step>
__device__ __forceinline__ void walk(int length, Step& step) {
  constexpr int kTile = Threads * Width * Depth;
  const int thread = threadIdx.x;
  int begin = 0;
#pragma unroll 1
  for (; begin + kTile <= length; begin += kTile) {
    step.template at<Width, Depth>(begin + thread * Width);
  }
  if (begin == length) return;
  int place = begin + thread * Width;
#pragma unroll 1
  for (; place + Width <= length; place += Threads * Width) step.template at<Width, 1>(place);
  if constexpr (Width > 1) {
    place = length / Width * Width + thread;
    if (place < length) step.template at<1, 1>(place);
  }
}

}  // namespace te_fl
