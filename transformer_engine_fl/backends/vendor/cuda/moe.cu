// Moving tokens to their experts and back.
//
// Compiled at run time, one kernel and one specialisation at a time: the host (moe.py) defines
// KERNEL_<name> and the macros below that the kernel needs.
//
//   LANES   threads that share a token: a team, of whole warps
//   TEAMS   teams of a block, more than one only if LANES is 32
//   VECS    vectors of a row that a thread has at once
//   WHOLE   1 if a row fits into the vectors of its team
//   MASK    1 for the row id map of a mask, 0 for that of indices
//   UNIT    bytes of a vector, in kernels that copy values
//   VEC     elements of a vector, in kernels that compute
//   ACCESS  elements that one access may cover, up to VEC
//   PAIRS   rows of a token that are in flight at once in spread_weighted
//   BLOCKS  blocks that must fit on a multiprocessor; bounds the registers
//   TI      type of the experts' indices
//   TX, TDY, TP  storage types of rows, of the gradient of tokens, of probs
//   PROBS   1 if there are probs
//   MOVED   bytes of a number that is moved for each row, 0 for none
//
// A token that goes to several rows is read once, and a token that is the sum of several rows is
// written once. In kernels that only write rows, a team processes the pairs of its token in
// rounds: each thread looks up one row, then all threads copy the token to each of these rows. In
// kernels that read rows, every thread looks up all rows itself: the lanes of a warp read the same
// address of the map, and the load of a row depends on nothing but that read.
//
// Maps come from users: no row is read or written before its index has been checked.

#include "cluster.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "row_maps.cuh"
#include "row_reduction.cuh"

using namespace te_fl;

namespace {

static_assert(LANES % 32 == 0 && (TEAMS == 1 || LANES == 32), "a team needs whole warps");
constexpr int kWarps = LANES / 32;

__device__ __forceinline__ int member() { return static_cast<int>(threadIdx.x) % LANES; }
__device__ __forceinline__ int team() { return static_cast<int>(threadIdx.x) / LANES; }

// The team's index in the grid, and the number of teams in the grid.
__device__ __forceinline__ long long team_of_grid() {
  return static_cast<long long>(blockIdx.x) * TEAMS + team();
}
__device__ __forceinline__ long long teams_of_grid() {
  return static_cast<long long>(gridDim.x) * TEAMS;
}

__device__ __forceinline__ void sync_team() {
  if constexpr (LANES == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

template <int Bytes>
struct RawOf;
template <>
struct RawOf<1> {
  using type = unsigned char;
};
template <>
struct RawOf<2> {
  using type = unsigned short;
};
template <>
struct RawOf<4> {
  using type = unsigned;
};
template <>
struct RawOf<8> {
  using type = uint2;
};
template <>
struct RawOf<16> {
  using type = uint4;
};

#if defined(KERNEL_permute_indices) || defined(KERNEL_permute_mask) || \
    defined(KERNEL_spread) || defined(KERNEL_zero_unused)
#define TE_FL_UNITS

using Unit = RawOf<UNIT>::type;

// Fills a row with zeros; called by a team.
__device__ __forceinline__ void zero_row(Unit* row, int units) {
  for (int at = member(); at < units; at += LANES) row[at] = Unit{};
}

#endif

#if defined(TE_FL_UNITS) && !defined(KERNEL_zero_unused)

// Copies a token to its rows; called by a team.
struct Token {
  const Unit* source;
  int units;
  Unit parts[VECS];

  __device__ __forceinline__ Token(const Unit* from, int width) : source(from), units(width) {
    if constexpr (WHOLE) read(0);
  }

  __device__ __forceinline__ void copy_to(Unit* rows, const int* places, int count) {
    for (int first = 0; first < units; first += LANES * VECS) {
      if constexpr (!WHOLE) read(first);
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        if (places[i] >= 0) write(rows + static_cast<long long>(places[i]) * units, first);
      }
    }
  }

 private:
  // Beyond the end the last unit is loaded again, unused: a branch would split the loads.
  __device__ __forceinline__ void read(int first) {
    if (units == 0) return;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int at = first + v * LANES + member();
      parts[v] = load_unit(source + (at < units ? at : units - 1));
    }
  }
  __device__ __forceinline__ void write(Unit* row, int first) const {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int at = first + v * LANES + member();
      if (at < units) row[at] = parts[v];
    }
  }
};

#endif

#if defined(KERNEL_permute_indices) || defined(KERNEL_permute_mask)

// Fills the rows from `end` on with zeros, distributed over the teams of the grid.
__device__ __forceinline__ void zero_rows_from(Unit* rows, long long end, int have, int units) {
  for (long long row = end + team_of_grid(); row < have; row += teams_of_grid()) {
    zero_row(rows + row * units, units);
  }
}

#endif

#if defined(KERNEL_spread) || defined(KERNEL_spread_weighted) || defined(KERNEL_collect) || \
    defined(KERNEL_zero_unused)

struct Pair {
  int row;   // -1 if there is none
  int slot;  // index of the expert (mask), or of the choice among the topk (indices)
};

// A row id map: the pairs of a token are at up to `slots` places, `slot_step` apart.
struct Map {
  const int* entries;
  int slots, have;
  long long token_step, slot_step;

  // How many places of a token may hold pairs.
  __device__ __forceinline__ int places_of(int token) const {
    if constexpr (!MASK) return slots;
    return least(entries[token * token_step + 2 * slots * slot_step], slots);
  }

  __device__ __forceinline__ Pair at(int token, int place) const {
    const int* entry = entries + token * token_step + place * slot_step;
    const int slot = MASK ? entry[slots * slot_step] : place;
    const bool known = *entry >= 0 && *entry < have && slot >= 0 && slot < slots;
    return {known ? *entry : -1, !MASK || known ? slot : -1};
  }

  // The same, or no pair from place `places` on. The map is read without waiting for `places`.
  __device__ __forceinline__ Pair at(int token, int place, int places) const {
    const Pair pair = place < slots ? at(token, place) : Pair{-1, -1};
    return place < places ? pair : Pair{-1, -1};
  }
};

#endif

#if defined(KERNEL_collect) || defined(KERNEL_spread_weighted)

// Probs of pairs, with any strides.
template <typename A>
struct Probs {
  const TP* values;
  long long token_step, slot_step;

  __device__ __forceinline__ A of(int token, int slot) const {
    A prob[1];
    decode(load<1, 1>(values + token * token_step + slot * slot_step), prob);
    return prob[0];
  }
};

#endif

}  // namespace

#ifdef KERNEL_permute_indices

// Computes the rows of a token's pairs, and copies the token to them. The load of the token is
// issued before the wait for the kernel that counts.
extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    permute_indices(const Unit* __restrict__ x, Unit* __restrict__ y, const Place* places,
                    const Count* counts, const long long* extremes,
                    const TI* __restrict__ experts, int* __restrict__ map, int tokens, int topk,
                    int have, int each, int groups, int units, long long x_step,
                    long long token_step, long long slot_step) {
  __shared__ int rows_of[TEAMS][LANES];
  const int token = static_cast<int>(team_of_grid());
  const long long pairs = static_cast<long long>(tokens) * topk;
  if (token < tokens) {
    Token copier(x + token * x_step, units);
    wait_for_predecessor();
    const Indices<TI> indices{experts, topk, token_step, slot_step};
    int* rows = rows_of[team()];
    for (int first = 0; first < topk; first += LANES) {
      if (first > 0) sync_team();
      const int count = least(topk - first, LANES);
      for (int i = member() / 32; i < count; i += kWarps) {
        const int pair = token * topk + first + i;
        const Place place = __ldcg(places + pair);
        int row = begin_of(counts, place.x, pair / each, groups) + place.y;
        if (place.x == 0 || place.x == kBuckets - 1) {  // a shared bucket, which is rare
          if (is_mixed(extremes, place.x != 0, groups)) {
            row = row_by_comparison(indices, pair, static_cast<int>(pairs));
          }
        }
        if (member() % 32 == 0) {
          rows[i] = row < have ? row : -1;
          map[static_cast<long long>(first + i) * tokens + token] = rows[i];
        }
      }
      sync_team();
      copier.copy_to(y, rows, count);
    }
  }
  zero_rows_from(y, pairs, have, units);
}

#endif  // KERNEL_permute_indices

#ifdef KERNEL_permute_mask

// As permute_indices, for a mask; also writes the token's line of the map, and the probs of its
// rows. Experts are processed from the last to the first, so that rows are in descending order.
extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    permute_mask(const Unit* __restrict__ x, Unit* __restrict__ y, const int* ranks,
                 const Count* counts, const unsigned char* __restrict__ routed,
                 int* __restrict__ map, const RawOf<MOVED ? MOVED : 1>::type* __restrict__ probs,
                 RawOf<MOVED ? MOVED : 1>::type* __restrict__ permuted, int tokens, int experts,
                 int have, int each, int groups, int units, long long x_step,
                 long long token_step, long long expert_step, long long probs_token,
                 long long probs_expert) {
  __shared__ int rows_of[TEAMS][LANES];
  __shared__ int kept_of[TEAMS][kWarps];
  const int token = static_cast<int>(team_of_grid());
  const int lane = member() % 32;
  const int warp = member() / 32;
  if (token < tokens) {
    Token copier(x + token * x_step, units);
    const Routing routing{routed, token_step, expert_step};
    // The 32 experts below `top` that a warp looks at. No earlier kernel wrote the mask.
    const auto lowest_below = [&](int top) { return top - 32 * (warp + 1); };
    const auto goes_below = [&](int top) {
      const int expert = lowest_below(top) + lane;
      return expert >= 0 && routing.goes(token, expert);
    };
    bool goes = goes_below(experts);
    wait_for_predecessor();
    const int group = token / each;
    int* rows = rows_of[team()];
    int* line = map + token * (2 * static_cast<long long>(experts) + 1);
    int taken = 0;
    for (int top = experts; top > 0; top -= LANES) {
      if (top < experts) {
        sync_team();
        goes = goes_below(top);
      }
      const int lowest = lowest_below(top);
      const int expert = lowest + lane;
      int row = goes ? __ldcg(ranks + static_cast<long long>(token) * experts + expert) : 0;
      for (unsigned left = __ballot_sync(kWholeWarp, goes); left; left &= left - 1) {
        const int next = __ffs(left) - 1;
        const int begin = begin_of(counts, lowest + next, group, groups);
        if (lane == next) row += begin;
      }
      const bool keep = goes && row < have;
      const unsigned kept = __ballot_sync(kWholeWarp, keep);
      if (lane == 0) kept_of[team()][warp] = __popc(kept);
      sync_team();
      int at = __popc(kept & (0xfffffffeu << lane));
      int count = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        at += w < warp ? kept_of[team()][w] : 0;
        count += kept_of[team()][w];
      }
      if (keep) {
        rows[at] = row;
        line[taken + at] = row;
        line[experts + taken + at] = expert;
        if constexpr (MOVED > 0) {
          permuted[row] = probs[token * probs_token + expert * probs_expert];
        }
      }
      sync_team();
      copier.copy_to(y, rows, count);
      taken += count;
    }
    for (int at = taken + member(); at < experts; at += LANES) {
      line[at] = -1;
      line[experts + at] = -1;
    }
    if (member() == 0) line[2 * experts] = taken;
  } else {
    wait_for_predecessor();
  }
  const int total = begin_of(counts, experts, 0, groups);
  zero_rows_from(y, total, have, units);
  if constexpr (MOVED > 0) {
    const long long step = teams_of_grid() * LANES;
    for (long long at = total + team_of_grid() * LANES + member(); at < have; at += step) {
      permuted[at] = {};
    }
  }
}

#endif  // KERNEL_permute_mask

#ifdef KERNEL_spread

// Copies each token to its rows. Writes the pair of each row that has one to `owner`.
extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    spread(const Unit* __restrict__ x, Unit* __restrict__ y, const int* __restrict__ entries,
           int* __restrict__ owner, int tokens, int slots, int have, int units,
           long long x_step, long long token_step, long long slot_step) {
  __shared__ int rows_of[TEAMS][LANES];
  release_dependents();
  const int token = static_cast<int>(team_of_grid());
  if (token >= tokens) return;
  Token copier(x + token * x_step, units);
  const Map map{entries, slots, have, token_step, slot_step};
  const int places = map.places_of(token);
  int* rows = rows_of[team()];
  for (int first = 0; first < places; first += LANES) {
    if (first > 0) sync_team();
    const int place = first + member();
    if (place < places) {
      const int row = map.at(token, place).row;
      rows[member()] = row;
      if (row >= 0) owner[row] = token * slots + place;
    }
    sync_team();
    copier.copy_to(y, rows, least(places - first, LANES));
  }
}

#endif  // KERNEL_spread

#ifdef KERNEL_zero_unused

// Fills the rows that no pair has with zeros. For these `owner` is uninitialised, so each entry is
// checked against the map.
extern "C" __global__ void __launch_bounds__(LANES* TEAMS)
    zero_unused(Unit* __restrict__ y, const int* __restrict__ entries, const int* owner,
                int tokens, int slots, int have, int units, long long token_step,
                long long slot_step) {
  const Map map{entries, slots, have, token_step, slot_step};
  const long long first = team_of_grid() * LANES;
  wait_for_predecessor();
  const long long row = first + member();
  bool unused = false;
  if (row < have) {
    const int pair = __ldcg(owner + row);
    unused = true;
    if (pair >= 0 && pair / slots < tokens) {
      const int token = pair / slots;
      const int place = pair - token * slots;
      unused = place >= map.places_of(token) || map.at(token, place).row != row;
    }
  }
  for (unsigned left = __ballot_sync(kWholeWarp, unused); left; left &= left - 1) {
    zero_row(y + (first + __ffs(left) - 1) * units, units);
  }
}

#endif  // KERNEL_zero_unused

#ifdef KERNEL_spread_weighted

// Writes each token's gradient times its probs to its rows of dx, and the dot products of the
// gradient with the rows of x to dprobs.
extern "C" __global__ void __launch_bounds__(LANES* TEAMS, BLOCKS)
    spread_weighted(const TDY* __restrict__ dy, const TX* __restrict__ x,
                    const TP* __restrict__ prob_values, const int* __restrict__ entries,
                    int* __restrict__ owner, TDY* __restrict__ dx,
                    Accumulator<TP>::type* __restrict__ dprobs, int tokens, int slots, int have,
                    int columns, long long dy_step, long long x_step, long long token_step,
                    long long slot_step, long long probs_token, long long probs_slot) {
  using A = Accumulator<TDY>::type;
  constexpr int kSpan = LANES * VEC * VECS;
  release_dependents();
  const int token = static_cast<int>(team_of_grid());
  if (token >= tokens) return;
  const Map map{entries, slots, have, token_step, slot_step};
  const Probs<A> probs{prob_values, probs_token, probs_slot};
  dy += token * dy_step;
  Vec<TDY, VEC> grads[VECS];
  auto read = [&](int first) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first + (v * LANES + member()) * VEC;
      grads[v] = column < columns ? load<ACCESS, VEC>(dy + column) : zeros<TDY, VEC>();
    }
  };
  if constexpr (WHOLE) read(0);
  const int places = map.places_of(token);
  Accumulator<TP>::type* line = dprobs + static_cast<long long>(token) * slots;
  if constexpr (MASK) {  // the pairs do not cover the whole line
    for (int at = member(); at < slots; at += LANES) line[at] = 0;
  }
  RowReduction<LANES, 1, PAIRS, A> over_row;
  if constexpr (MASK) sync_team();
  for (int i = 0; i == 0 || i < places; i += PAIRS) {
    Pair pairs[PAIRS];
    A weights[PAIRS];
    A products[PAIRS] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) pairs[p] = map.at(token, i + p, places);
    for (int first = 0; first < columns; first += kSpan) {
      if constexpr (!WHOLE) read(first);
      Vec<TX, VEC> held[PAIRS][VECS];
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
          const int column = first + (v * LANES + member()) * VEC;
          held[p][v] = pairs[p].row >= 0 && column < columns
                           ? load<ACCESS, VEC>(x + pairs[p].row * x_step + column)
                           : zeros<TX, VEC>();
        }
        weights[p] = pairs[p].row >= 0 ? probs.of(token, pairs[p].slot) : A(0);
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        if (pairs[p].row < 0) continue;
        TDY* target = dx + static_cast<long long>(pairs[p].row) * columns;
        Vec<TDY, VEC> results[VECS];
#pragma unroll
        for (int v = 0; v < VECS; ++v) {  // zeros beyond the end
          A grad[VEC], value[VEC];
          decode(grads[v], grad);
          decode(held[p][v], value);
#pragma unroll
          for (int at = 0; at < VEC; ++at) {
            products[p] += grad[at] * value[at];
            grad[at] *= weights[p];
          }
          results[v] = encode<TDY>(grad);
        }
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
          const int column = first + (v * LANES + member()) * VEC;
          if (column < columns) store_to_global(target + column, results[v]);
        }
      }
    }
    over_row.sum(products);
    if (member() < PAIRS) {
      // Looked up again, to save registers for the rows.
      const Pair pair = map.at(token, i + member(), places);
      A product = 0;
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) product = member() == p ? products[p] : product;
      if (pair.row >= 0) owner[pair.row] = token * slots + i + member();
      if (pair.slot >= 0) line[pair.slot] = static_cast<Accumulator<TP>::type>(product);
    }
  }
}

#endif  // KERNEL_spread_weighted

#ifdef KERNEL_collect

// The sum of each token's rows, with PROBS each times its prob. `moved`, a number for each row, is
// copied to the position of the row's pair in `to`, [T, slots].
extern "C" __global__ void __launch_bounds__(LANES* TEAMS, BLOCKS)
    collect(const TX* __restrict__ x, TX* __restrict__ y, const int* __restrict__ entries,
            const TP* __restrict__ prob_values,
            const RawOf<MOVED ? MOVED : 1>::type* __restrict__ moved,
            RawOf<MOVED ? MOVED : 1>::type* __restrict__ to, int tokens, int slots, int have,
            int columns, long long x_step, long long token_step, long long slot_step,
            long long probs_token, long long probs_slot) {
  using A = Accumulator<TX>::type;
  constexpr int kSpan = LANES * VEC * VECS;
  const int token = static_cast<int>(team_of_grid());
  if (token >= tokens) return;
  const Map map{entries, slots, have, token_step, slot_step};
  const Probs<A> probs{prob_values, probs_token, probs_slot};
  const int places = map.places_of(token);
  if constexpr (MOVED > 0) {
    to += static_cast<long long>(token) * slots;
    for (int at = member(); at < slots; at += LANES) to[at] = {};
    sync_team();
    for (int place = member(); place < places; place += LANES) {
      const Pair pair = map.at(token, place);
      if (pair.row >= 0) to[pair.slot] = moved[pair.row];
    }
  }
  for (int first = 0; first < columns; first += kSpan) {
    A total[VECS][VEC] = {};
    for (int i = 0; i == 0 || i < places; ++i) {
      const Pair pair = map.at(token, i, places);
      Vec<TX, VEC> held[VECS];
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int column = first + (v * LANES + member()) * VEC;
        held[v] = pair.row >= 0 && column < columns
                      ? load<ACCESS, VEC>(x + pair.row * x_step + column)
                      : zeros<TX, VEC>();
      }
      A weight = 1;
      if constexpr (PROBS) weight = pair.row >= 0 ? probs.of(token, pair.slot) : A(0);
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        A value[VEC];
        decode(held[v], value);
#pragma unroll
        for (int at = 0; at < VEC; ++at) {
          total[v][at] += PROBS ? weight * value[at] : value[at];
        }
      }
    }
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int column = first + (v * LANES + member()) * VEC;
      if (column < columns) {
        store_to_global(y + static_cast<long long>(token) * columns + column, encode<TX>(total[v]));
      }
    }
  }
}

#endif  // KERNEL_collect
