// Rows that stay on the chip: which thread holds which columns, and where it keeps them.
//
// _tiles.py chooses the numbers. A row belongs to Lanes threads of each of Cluster blocks,
// Vecs vectors of Width elements to each; a block works on Rows rows at once, more than
// one only if Lanes is at most 32. Full: the row fills all of those vectors.

#pragma once

#include "cluster.cuh"
#include "memory.cuh"

namespace te_fl {

template <int Width, int Vecs, int Access, int Lanes, int Rows, int Cluster, bool Full>
struct RowTile {
  static constexpr int kThreads = Lanes * Rows;

  // The first column of this thread's vector `v`; columns go round the lanes and then
  // round the blocks of the cluster, so that a narrow row leaves all of them equally idle.
  static __device__ __forceinline__ int first_column(int v, int rank) {
    return ((v * Cluster + rank) * Lanes + static_cast<int>(threadIdx.x) % Lanes) * Width;
  }

  static __device__ __forceinline__ bool in_row(int column, int columns) {
    return Full || column < columns;
  }

  static __device__ __forceinline__ bool in_rows(long long row, long long rows) {
    return Rows == 1 || row < rows;  // the loops over rows stop by themselves
  }

  // This thread's slots in shared memory for its vectors of one row. A slot is read by the
  // thread that filled it, so no barrier is needed. Chunks of one vector lie a block apart,
  // so that neighbouring threads use neighbouring banks.
  template <typename T>
  struct Slots {
    static constexpr int kChunk = least(16, Width * static_cast<int>(sizeof(T)));
    static constexpr int kChunks = Width * static_cast<int>(sizeof(T)) / kChunk;
    static constexpr int kPiece = least(16, Access * static_cast<int>(sizeof(T)));
    static constexpr int kBytes = Vecs * kChunks * kChunk * kThreads;

    static __device__ __forceinline__ unsigned char* chunk(unsigned char* row, int v, int c) {
      return row + ((v * kChunks + c) * kThreads + static_cast<int>(threadIdx.x)) * kChunk;
    }

    // Asks for a vector.
    template <Reading How>
    static __device__ __forceinline__ void fill(unsigned char* row, int v, const T* from,
                                                bool valid) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int at = 0; at < kChunk; at += kPiece) {
          copy_async<kPiece, How>(chunk(row, v, c) + at,
                                  reinterpret_cast<const char*>(from) + c * kChunk + at,
                                  valid);
        }
      }
    }

    static __device__ __forceinline__ Vec<T, Width> read(unsigned char* row, int v) {
      return read_chunks<T, Width>(chunk(row, v, 0), kThreads * kChunk);
    }

    // Something else in the place of a vector whose copies have arrived.
    static __device__ __forceinline__ void write(unsigned char* row, int v,
                                                 const Vec<T, Width>& value) {
      write_chunks(chunk(row, v, 0), kThreads * kChunk, value);
    }
  };
};

}  // namespace te_fl
