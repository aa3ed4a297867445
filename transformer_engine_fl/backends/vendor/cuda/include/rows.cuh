// Rows that stay on the chip: which thread holds which columns, and where it keeps them.
//
// _tiles.py chooses the numbers. A row belongs to Lanes threads of each of Cluster blocks,
// Vecs vectors of Width elements to each; a block works on Rows rows at once, more than
// one only if Lanes is at most 32. Full: the row fills all of those vectors.
//
// A vector is of neighbouring columns, or Strewn: each 32 columns from the one before, so that
// the lanes of a warp have neighbours. That is for rows that begin anywhere: 16 bytes of them at
// a time come to shared memory as they lie, the first with what is before the row, and a thread
// finds its elements there one by one. Of what is behind a row it finds zeros, strewn or not.
// A piece is read in whole, though zeros take the place of what is behind the row. So that none
// reaches behind the tensor, the last kRest columns of its last row are in no piece: a lane of the
// warp that has one fetches it, and puts it into its slot when the pieces have arrived.

#pragma once

#include "cluster.cuh"
#include "memory.cuh"

namespace te_fl {

template <int Width, int Vecs, int Access, int Lanes, int Rows, int Cluster, bool Full,
          bool Strewn>
struct RowTile {
  static_assert(!Strewn || (Lanes % 32 == 0 && !Full), "of whole warps");
  static constexpr int kThreads = Lanes * Rows;
  static constexpr int kStep = Strewn ? 32 : 1;  // columns from one element of a vector to the next
  static constexpr int kApart = Cluster * Lanes * Width;  // and from one of its vectors

  // The first column of this thread's vector `v`; columns go round the lanes and then
  // round the blocks of the cluster, so that a narrow row leaves all of them equally idle.
  static __device__ __forceinline__ int first_column(int v, int rank) {
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int group = (v * Cluster + rank) * Lanes;
    if constexpr (Strewn) return (group + lane / 32 * 32) * Width + lane % 32;
    else return (group + lane) * Width;
  }

  // Where this thread's vector `v` of a row lies. FromFirst: so far from its first one, whose
  // address is that of all, where there are registers for it.
  template <bool FromFirst = true, typename T>
  static __device__ __forceinline__ T* place(T* row, int v, int rank) {
    if constexpr (FromFirst) return row + first_column(0, rank) + v * kApart;
    else return row + first_column(v, rank);
  }

  static __device__ __forceinline__ bool in_row(int column, int columns) {
    return Full || column < columns;
  }

  // Whether element `i` of a vector is in the row, of which so much is left; the first is.
  static __device__ __forceinline__ bool has(int i, int left) {
    return !Strewn || i * kStep < left;
  }

  // A vector that is in_row, from global memory and to it. Plain: as `load` has it, if it is not
  // strewn.
  template <bool Plain = false, typename T>
  static __device__ __forceinline__ Vec<T, Width> get(const T* from, int left) {
    if constexpr (!Strewn) {
      return load<Access, Width, Plain>(from);
    } else {
      static_assert(sizeof(T) == 2, "of half precision");
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
    if constexpr (!Strewn) {
      store(to, value);
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        if (has(i, left)) store(to + i * kStep, element(value, i));
      }
    }
  }

  static __device__ __forceinline__ bool in_rows(long long row, long long rows) {
    return Rows == 1 || row < rows;  // the loops over rows stop by themselves
  }

  static constexpr int kRest = Width - 1;

  // The first row in which a piece may reach behind the tensor, whose rows may overlap.
  template <typename Index>
  static __device__ __forceinline__ Index first_last(Index rows, long long stride) {
    return stride < Width ? 0 : rows - 1;
  }

  // How many columns of a row are asked for in pieces.
  static __device__ __forceinline__ int in_pieces(int columns, bool last) {
    return Strewn && last ? max(0, columns - kRest) : columns;
  }

  // The column that this thread fetches of a last row; below 0, none.
  static __device__ __forceinline__ int rest_of(int columns, int rank) {
    static_assert(Strewn, "else pieces end with the row");
    constexpr int kWarps = Lanes / 32;
    const int thread = static_cast<int>(threadIdx.x) % Lanes;
    const int column = columns - kRest + thread % 32;
    const int warp = column / (32 * Width);  // that has it, over blocks and vectors
    const bool own = warp % kWarps == thread / 32 && warp / kWarps % Cluster == rank;
    return column < columns && own ? column : -1;
  }

  // This thread's slots in shared memory for its vectors of one row. A slot is read by the
  // thread that filled it, so no barrier is needed, or, strewn, by its warp. Chunks of one
  // vector lie a block apart, so that neighbouring threads use neighbouring banks.
  template <typename T>
  struct Slots {
    static constexpr int kSize = static_cast<int>(sizeof(T));
    static constexpr int kChunk = least(16, Width * kSize);
    static constexpr int kChunks = Width * kSize / kChunk;
    static constexpr int kPiece = least(16, Access * kSize);
    static constexpr int kOfWarp = 32 * Width * kSize + 16;  // strewn: with what is beside the row
    static constexpr int kBytes =
        Vecs * (Strewn ? kThreads / 32 * kOfWarp : kThreads * Width * kSize);

    // Bytes from one vector of a thread to the next.
    static constexpr int kStride = kThreads * kChunks * kChunk;

    static __device__ __forceinline__ unsigned char* chunk(unsigned char* row, int v) {
      return row + v * kStride + static_cast<int>(threadIdx.x) * kChunk;
    }

    // The place of a warp's vectors `v`.
    static constexpr int kWarpStride = kThreads / 32 * kOfWarp;
    static __device__ __forceinline__ unsigned char* of_warp(unsigned char* row, int v) {
      return row + v * kWarpStride + static_cast<int>(threadIdx.x) / 32 * kOfWarp;
    }

    // How far behind its slots a row begins that lies there in global memory: `read` and `write`
    // take slots that much further on.
    static __device__ __forceinline__ int begin(const T* row) {
      return Strewn ? static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15) : 0;
    }

    // Asks for vector `v` of a row of so many columns, of which `column` is the first, if the row
    // exists and, not strewn, the vector is wanted. `own` is where the thread's first one lies: the
    // others are as far from it in all rows, so one address is worked out, not one for each.
    template <Reading How>
    static __device__ __forceinline__ void fill(unsigned char* row, int v, const T* own,
                                                bool exists, int column, int columns,
                                                bool wanted = true) {
      const T* from = own + v * kApart;
      if constexpr (Strewn) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int before = begin(from - lane);
        const char* source = reinterpret_cast<const char*>(from - lane) - before;
        const int left = least(columns - (column - lane), 32 * Width);
        const int bytes = exists && left > 0 ? before + left * kSize : 0;
        auto copy = [&](int at) {
          copy_async_piece<16, How>(of_warp(row, 0) + lane * 16, v * kWarpStride + at,
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
      if constexpr (Strewn) {
        static_assert(kSize == 2, "of half precision");
        const auto* from = reinterpret_cast<const volatile unsigned short*>(of_warp(row, v));
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

    // Fetches what a row in global memory has in the column of `rest_of`, if there is one, into
    // slots whose copies have arrived.
    static __device__ __forceinline__ void fill_rest(unsigned char* row, const T* from,
                                                     int column) {
      if (column < 0) return;
      auto* vector = reinterpret_cast<T*>(of_warp(row + begin(from), column / kApart));
      vector[column % (32 * Width)] = from[column];
    }

    // Something else in the place of a vector whose copies have arrived.
    static __device__ __forceinline__ void write(unsigned char* row, int v,
                                                 const Vec<T, Width>& value) {
      if constexpr (Strewn) {
        auto* to = reinterpret_cast<unsigned short*>(of_warp(row, v));
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          to[i * 32 + static_cast<int>(threadIdx.x) % 32] = element(value, i).words[0];
        }
      } else {
        write_chunks(chunk(row, v), kThreads * kChunk, value);
      }
    }
  };

  // Waits as wait_copies does, for what `read` finds.
  template <int Pending>
  static __device__ __forceinline__ void wait() {
    wait_copies<Pending>();
    if constexpr (Strewn) __syncwarp();
  }

  // Behind this, slots whose vectors have been read may be filled, and what a warp's other lanes
  // have written may be read.
  static __device__ __forceinline__ void release() {
    if constexpr (Strewn) __syncwarp();
  }
};

}  // namespace te_fl
