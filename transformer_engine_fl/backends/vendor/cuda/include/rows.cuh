// Rows that stay on the chip: which thread holds which columns, and where it keeps them.
//
// _tiles.py chooses the numbers. A row belongs to Lanes threads of each of Cluster blocks, each
// with Vecs vectors of Width elements; a block works on Rows rows at once, more than one only if
// Lanes is at most 32. Full: the row fills all of those vectors.
//
// A vector's elements are neighbouring columns or, if Striped, 32 columns apart, so that the lanes
// of a warp hold neighbours. Striped vectors are for rows of any alignment: the row is copied to
// shared memory in aligned 16-byte pieces, the first of which includes elements before the row, and
// each thread picks its elements there one by one. Beyond the end of a row a thread reads zeros,
// striped or not. The copy reads its 16 bytes in full, although zeros replace what lies beyond the
// row. So that no copy reads beyond the tensor, the last kRest columns of its last row are in no
// piece: a lane of the warp to which such a column belongs loads it, and writes it to its slot when
// the copies have arrived.

#pragma once

#include "cluster.cuh"
#include "memory.cuh"

namespace te_fl {

template <int Width, int Vecs, int Access, int Lanes, int Rows, int Cluster, bool Full,
          bool Striped>
struct RowTile {
  static_assert(!Striped || (Lanes % 32 == 0 && !Full), "Striped needs whole warps, not Full");
  static constexpr int kThreads = Lanes * Rows;
  // Columns from one element of a vector to the next, and from one vector to the next.
  static constexpr int kStep = Striped ? 32 : 1;
  static constexpr int kVectorStride = Cluster * Lanes * Width;

  // The first column of this thread's vector `v`. Vectors are dealt to the lanes and then to the
  // blocks of the cluster in rotation, so that a narrow row leaves all blocks equally idle.
  static __device__ __forceinline__ int first_column(int v, int rank) {
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int group = (v * Cluster + rank) * Lanes;
    if constexpr (Striped) return (group + lane / 32 * 32) * Width + lane % 32;
    else return (group + lane) * Width;
  }

  // The address of this thread's vector `v` of a row. FromFirst: as an offset from the thread's
  // first vector, whose address is computed once, where there are registers for it.
  template <bool FromFirst = true, typename T>
  static __device__ __forceinline__ T* place(T* row, int v, int rank) {
    if constexpr (FromFirst) return row + first_column(0, rank) + v * kVectorStride;
    else return row + first_column(v, rank);
  }

  static __device__ __forceinline__ bool in_row(int column, int columns) {
    return Full || column < columns;
  }

  // Whether element `i` of a vector is in the row, of which `left` columns remain from the vector's
  // first element on; the first element always is.
  static __device__ __forceinline__ bool has(int i, int left) {
    return !Striped || i * kStep < left;
  }

  // Loads and stores a vector that is in_row in global memory. Plain: see `load`; without effect on
  // striped vectors.
  template <bool Plain = false, typename T>
  static __device__ __forceinline__ Vec<T, Width> get(const T* from, int left) {
    if constexpr (!Striped) {
      return load<Access, Width, Plain>(from);
    } else {
      static_assert(sizeof(T) == 2, "Striped needs 2-byte elements");
      Vec<T, Width> result = zeros<T, Width>();
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        result.words[i / 2] |= static_cast<unsigned>(read_where(from + i * kStep, has(i, left)))
                               << i % 2 * 16;
      }
      return result;
    }
  }
  template <typename T>
  static __device__ __forceinline__ void put(T* to, const Vec<T, Width>& value, int left) {
    if constexpr (!Striped) {
      store(to, value);
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        if (has(i, left)) store(to + i * kStep, element(value, i));
      }
    }
  }

  static __device__ __forceinline__ bool in_rows(long long row, long long rows) {
    return Rows == 1 || row < rows;  // one row a block: its loop or its grid ends with the rows
  }

  static constexpr int kRest = Width - 1;

  // The first row in which a piece may reach beyond the tensor: 0 if the stride is below Width.
  template <typename Index>
  static __device__ __forceinline__ Index first_last(Index rows, long long stride) {
    return stride < Width ? 0 : rows - 1;
  }

  // How many columns of a row are copied in pieces.
  static __device__ __forceinline__ int in_pieces(int columns, bool last) {
    return Striped && last ? max(0, columns - kRest) : columns;
  }

  // The column that this thread loads singly of a last row; -1 if none.
  static __device__ __forceinline__ int rest_of(int columns, int rank) {
    static_assert(Striped, "only Striped rows have a rest");
    constexpr int kWarps = Lanes / 32;
    const int thread = static_cast<int>(threadIdx.x) % Lanes;
    const int column = columns - kRest + thread % 32;
    const int warp = column / (32 * Width);  // the owner, numbered over vectors and blocks
    const bool own = warp % kWarps == thread / 32 && warp / kWarps % Cluster == rank;
    return column < columns && own ? column : -1;
  }

  // This thread's slots in shared memory for its vectors of one row. A slot is read by the thread
  // that filled it, or if striped by its warp, so no block barrier is needed. The chunks of a
  // vector lie a block's width apart, so that neighbouring threads use neighbouring banks.
  template <typename T>
  struct Slots {
    static constexpr int kSize = static_cast<int>(sizeof(T));
    static constexpr int kChunk = least(16, Width * kSize);
    static constexpr int kChunks = Width * kSize / kChunk;
    static constexpr int kPiece = least(16, Access * kSize);
    // Striped: with elements beside the row.
    static constexpr int kOfWarp = 32 * Width * kSize + 16;
    static constexpr int kBytes =
        Vecs * (Striped ? kThreads / 32 * kOfWarp : kThreads * Width * kSize);

    // Bytes from one vector of a thread to the next.
    static constexpr int kStride = kThreads * kChunks * kChunk;

    static __device__ __forceinline__ unsigned char* chunk(unsigned char* row, int v) {
      return row + v * kStride + static_cast<int>(threadIdx.x) * kChunk;
    }

    // Where a warp's vectors `v` lie.
    static constexpr int kWarpStride = kThreads / 32 * kOfWarp;
    static __device__ __forceinline__ unsigned char* warp_vectors(unsigned char* row, int v) {
      return row + v * kWarpStride + static_cast<int>(threadIdx.x) / 32 * kOfWarp;
    }

    // How many bytes after the start of its slots a striped row begins, from its global address.
    // Add it to the slots' address for `read` and `write`.
    static __device__ __forceinline__ int begin(const T* row) {
      return Striped ? static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15) : 0;
    }

    // Starts the copy of vector `v`, whose first column is `column`, of a row of `columns` columns,
    // if the row exists and, unless striped, the vector is wanted. `own` is the address of the
    // thread's first vector; the others are at constant offsets from it.
    template <Reading How>
    static __device__ __forceinline__ void fill(unsigned char* row, int v, const T* own,
                                                bool exists, int column, int columns,
                                                bool wanted = true) {
      const T* from = own + v * kVectorStride;
      if constexpr (Striped) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int before = begin(from - lane);
        const char* source = reinterpret_cast<const char*>(from - lane) - before;
        const int left = least(columns - (column - lane), 32 * Width);
        const int bytes = exists && left > 0 ? before + left * kSize : 0;
        auto copy = [&](int at) {
          copy_async_piece<16, How>(warp_vectors(row, 0) + lane * 16, v * kWarpStride + at,
                                    source + lane * 16 + at,
                                    max(0, least(16, bytes - lane * 16 - at)));
        };
#pragma unroll
        for (int at = 0; at < kOfWarp - 16; at += 512) copy(at);
        if (lane == 0) copy(kOfWarp - 16);
      } else {
        const bool valid = exists && in_row(column, columns) && wanted;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
          for (int at = 0; at < kChunk; at += kPiece) {
            copy_async<kPiece, How>(chunk(row, 0), v * kStride + c * kThreads * kChunk + at,
                                    reinterpret_cast<const char*>(from) + c * kChunk + at,
                                    valid);
          }
        }
      }
    }

    static __device__ __forceinline__ Vec<T, Width> read(unsigned char* row, int v) {
      if constexpr (Striped) {
        static_assert(kSize == 2, "Striped needs 2-byte elements");
        const auto* from = reinterpret_cast<const volatile unsigned short*>(warp_vectors(row, v));
        Vec<T, Width> result = zeros<T, Width>();
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const unsigned half = from[i * 32 + static_cast<int>(threadIdx.x) % 32];
          result.words[i / 2] |= half << i % 2 * 16;
        }
        return result;
      } else {
        return read_chunks<T, Width>(chunk(row, v), kThreads * kChunk);
      }
    }

    // Loads the column that `rest_of` gives, if any, from a row in global memory into slots whose
    // copies have arrived.
    static __device__ __forceinline__ void fill_rest(unsigned char* row, const T* from,
                                                     int column) {
      if (column < 0) return;
      auto* vector = reinterpret_cast<T*>(warp_vectors(row + begin(from), column / kVectorStride));
      vector[column % (32 * Width)] = from[column];
    }

    // Overwrites a vector whose copies have arrived.
    static __device__ __forceinline__ void write(unsigned char* row, int v,
                                                 const Vec<T, Width>& value) {
      if constexpr (Striped) {
        auto* to = reinterpret_cast<unsigned short*>(warp_vectors(row, v));
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          to[i * 32 + static_cast<int>(threadIdx.x) % 32] = element(value, i).words[0];
        }
      } else {
        write_chunks(chunk(row, v), kThreads * kChunk, value);
      }
    }
  };

  // wait_copies, after which `read` may be called.
  template <int Pending>
  static __device__ __forceinline__ void wait() {
    wait_copies<Pending>();
    if constexpr (Striped) __syncwarp();
  }

  // After this, slots whose vectors have been read may be filled again, and what other lanes of the
  // warp have written may be read.
  static __device__ __forceinline__ void release() {
    if constexpr (Striped) __syncwarp();
  }
};

}  // namespace te_fl
