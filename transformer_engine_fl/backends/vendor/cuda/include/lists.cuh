// Lists of tensors that one launch goes through: which chunk is a block's, and a walk over it.
//
// The host (backends/_lists.py) makes the table: the number of each row's first chunk, then for
// each row its count of elements and the addresses of its tensors. A row is cut into chunks of
// as many elements, one block each.

#pragma once

#include "memory.cuh"
#include "numeric.cuh"

namespace te_fl {

struct Chunk {
  const long long* fields;  // of the row, behind its count of elements
  long long element;        // the first one
  int length;

  // What field `at` points to, of which each row has one number.
  template <typename T>
  __device__ __forceinline__ T* number(int at) const {
    return reinterpret_cast<T*>(__ldg(fields + at));
  }
  // The elements of tensor `at`.
  template <typename T>
  __device__ __forceinline__ T* tensor(int at) const {
    return number<T>(at) + element;
  }
};

// The chunk of this block, of rows of so many fields. Every warp looks for itself, at 32 rows
// at a time that are as far apart as they may be: two readings find one in 1024.
template <int Fields, int Size>
__device__ __forceinline__ Chunk chunk_of_block(const long long* __restrict__ table, int rows) {
  const long long chunk = blockIdx.x;
  const int lane = threadIdx.x % 32;
  int row = 0, count = rows;  // it is one of so many rows from this one on
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

// Has `step.at<N, M>(place)` called so that it is told of every element once: M vectors of N
// elements, of which the first begins at `place` and each next one Threads * N elements on.
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
