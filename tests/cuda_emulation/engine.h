// What a kernel that runs on the CPU asks of the engine that runs it (engine.cpp).

#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

struct Index {
  unsigned x, y, z;
};

// Where the running thread is.
struct Place {
  Index thread, block, threads, blocks;
  unsigned rank;  // of the block in its cluster
};
extern const Place* place;

// Ends the launch with this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Ends the launch if an access of so many bytes is not aligned to them.
inline void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) {
    fail("an access of %zu bytes to %p is not aligned", bytes, address);
  }
}

// The same of a read, also if it reaches outside of tensors whose surroundings are known.
extern bool surrounded;
void check_inside(const void* address, size_t bytes);
inline void check_read(const void* address, size_t bytes) {
  check_aligned(address, bytes);
  if (surrounded) check_inside(address, bytes);
}

// ------------------------------------------------------------------------ threads meet

enum class Meeting { sync, shuffle, vote, match, reduce };

// Waits for all threads of the block; how many came with `vote`.
int meet_block(bool vote);
// Waits for the lanes of `mask`; what each gave, readable until the next meeting.
const uint64_t* meet_lanes(unsigned mask, Meeting meeting, uint64_t value);
unsigned lanes_alive();     // of this warp, those that have not returned
unsigned lanes_existing();  // or have
void arrive_at_cluster();
void wait_for_cluster();
void wait_for_predecessor();
// Waits until a word that another block of the group writes is of a turn.
void wait_for_word(const unsigned* turn_of, unsigned turn);

// ----------------------------------------------------------------------- shared memory

constexpr size_t kStaticBytes = 48 * 1024;

// The block's shared memory: kStaticBytes of variables, then what the launch asked for.
unsigned char* shared_memory();
// The same address in another block of the cluster, which must be running.
unsigned char* in_block(void* own, unsigned rank);
// From an address as asynchronous copies and PTX have it.
inline unsigned char* shared_at(unsigned address) { return shared_memory() + address; }

// Counters of the bytes that blocks of a cluster send each other: an mbarrier for one
// arrival, which says how many bytes its turn has.
void prepare_counter(void* counter);
void expect(void* counter, unsigned bytes);
// What is sent is not there before threads have to wait for it; nor is all of it at once.
void send_later(void* own, unsigned rank, const void* value, unsigned bytes, void* counter);
void wait_for_turn(void* counter, unsigned parity);

// A copy that is not made before the thread waits for it.
void copy_later(void* to, const void* from, unsigned bytes, unsigned filled);
void commit_copies();
void wait_copies(unsigned pending);

}  // namespace emulation
