// The interface of the engine (engine.cpp) for kernels that run on the CPU.

#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

struct Index {
  unsigned x, y, z;
};

// The indices of the running thread.
struct Place {
  Index thread, block, threads, blocks;
  unsigned rank;  // of the block in its cluster
};
extern const Place* place;

// Ends the launch with this error.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Ends the launch if an access of `bytes` bytes is not aligned to its size.
inline void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) {
    fail("an access of %zu bytes to %p is not aligned", bytes, address);
  }
}

// The same for a read; also ends the launch if the read touches forbidden bytes around tensors.
extern bool surrounded;
void check_inside(const void* address, size_t bytes);
inline void check_read(const void* address, size_t bytes) {
  check_aligned(address, bytes);
  if (surrounded) check_inside(address, bytes);
}

// ------------------------------------------------------------------------ synchronisation

enum class Meeting { sync, shuffle, vote, match, reduce };

// Waits for all threads of the block; returns how many of them pass `vote`.
int meet_block(bool vote);
// Waits for the lanes of `mask`; returns their values, readable until the next meeting.
const uint64_t* meet_lanes(unsigned mask, Meeting meeting, uint64_t value);
unsigned lanes_alive();     // lanes of this warp that have not returned
unsigned lanes_existing();  // all lanes of this warp
void arrive_at_cluster();
void wait_for_cluster();
void wait_for_predecessor();
// Waits until a slot that another block of the group writes is of an epoch.
void wait_for_slot(const unsigned* epoch_of, unsigned epoch);

// ----------------------------------------------------------------------- shared memory

constexpr size_t kStaticBytes = 48 * 1024;

// The block's shared memory: kStaticBytes for variables, then the dynamic memory of the launch.
unsigned char* shared_memory();
// The same address in another block of the cluster, which must be running.
unsigned char* in_block(void* own, unsigned rank);
// The pointer for a 32-bit address in shared memory, as asynchronous copies and PTX use it.
inline unsigned char* shared_at(unsigned address) { return shared_memory() + address; }

// Counters of the bytes that blocks of a cluster send each other: an mbarrier with one arrival,
// which sets the number of bytes of its phase.
void prepare_counter(void* counter);
void expect(void* counter, unsigned bytes);
// A sent value is delivered only when threads have to wait; not all values arrive at once.
void send_later(void* own, unsigned rank, const void* value, unsigned bytes, void* counter);
void wait_for_phase(void* counter, unsigned parity);

// An asynchronous copy, which happens only when the thread waits for it.
void copy_later(void* to, const void* from, unsigned bytes, unsigned filled);
void commit_copies();
void wait_copies(unsigned pending);

}  // namespace emulation
