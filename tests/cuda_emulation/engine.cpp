// Runs kernels on the CPU: the threads of a block, or of a cluster, are coroutines.
//
// A thread runs until it must wait for others; a wait switches stacks, and nothing needs a lock.
// Blocks (clusters) run one after the other. Every second launch runs threads and blocks from the
// last to the first, so that a kernel that relies on an order that CUDA does not guarantee gives
// different values.
//
// Shared memory is filled with NaN at first. An error ends the launch, and its text is the result.

#include "engine.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

namespace emulation {

const Place* place;
bool surrounded;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kFenceBytes = 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every format
constexpr unsigned char kFence = 0xa5;

struct Copy {
  void* to;
  const void* from;
  unsigned bytes, filled, group;
};

struct Block;

struct Thread {
  Place place;
  Block* block;
  unsigned number;
  jmp_buf here;
  ucontext_t start;
  unsigned char* stack = nullptr;
  bool started = false, returned = false;
  // The thread can continue when the watched value has changed.
  const unsigned* watched = nullptr;
  unsigned seen = 0;
  const char* waits_for = "";
  unsigned cluster_seen = 0;
  bool cluster_arrived = false;
  unsigned group = 0;  // the group of the copies that it issues next
  std::vector<Copy> copies;

  bool can_run() const { return !returned && (!watched || *watched != seen); }
};

struct LaneMeeting {
  unsigned mask, arrived = 0, readers = 0, generation = 0;
  Meeting kind;
  bool open = false;
  uint64_t values[32];
};

struct Block {
  std::vector<unsigned char> raw;
  unsigned char* memory;  // the aligned part of `raw`
  size_t bytes;
  std::vector<std::deque<LaneMeeting>> warps;
  unsigned first, threads;  // of the engine's threads
  bool begun = false;
  unsigned arrived = 0, generation = 0, returned = 0;
  int votes = 0, counted = 0;

  unsigned char* shared() { return memory + kFenceBytes; }
  unsigned char* end() { return memory + bytes - kFenceBytes; }
};

// Occupies eight bytes of a block's shared memory.
struct Counter {
  static constexpr int kArrival = 1 << 24;  // more than the bytes of any phase
  unsigned phases;                          // complete phases
  int missing;                              // bytes missing in this phase, plus the arrival

  void change(int by) {
    missing += by;
    if (missing) return;
    missing = kArrival;
    ++phases;
  }
};

struct Sent {
  unsigned rank;
  unsigned char* to;
  Counter* counter;
  unsigned bytes;
  unsigned char value[8];
};

struct Launch {
  void (*entry)(void**);
  void** arguments;
};

Launch launch;
std::deque<Thread> threads;
std::vector<Block> blocks;
Thread* running;
jmp_buf scheduler, outside;  // targets for leaving a thread, and for failures outside of threads
char error[1024];

struct Range {
  const char *begin, *end;
};
std::vector<Range> forbidden;
unsigned cluster_arrived, cluster_generation, cluster_size;
unsigned cluster_left;  // threads that have returned; in arrivals until the phase ends
bool waited_for_predecessor;
std::deque<Sent> under_way;

Block& block() { return *running->block; }

// -------------------------------------------------------------------------- switching

void leave() {
  if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}

void count_arrival() {
  if (++cluster_arrived < cluster_size) return;
  cluster_arrived = cluster_left;
  ++cluster_generation;
}

// A thread that has returned counts as arrived, in every phase.
void leave_cluster() {
  ++cluster_left;
  if (!running->cluster_arrived) count_arrival();
}

void begin() {
  for (;;) {
    launch.entry(launch.arguments);
    running->returned = true;
    ++block().returned;
    leave_cluster();
    leave();
  }
}

void enter(Thread& thread) {
  running = &thread;
  place = &thread.place;
  thread.watched = nullptr;
  thread.block->begun = true;
  if (_setjmp(scheduler)) {
    running = nullptr;
    return;
  }
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack;
  thread.start.uc_stack.ss_size = kStackBytes;
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, begin, 0);
  setcontext(&thread.start);
}

void wait_while(const unsigned& watched, unsigned seen, const char* what) {
  running->watched = &watched;
  running->seen = seen;
  running->waits_for = what;
  leave();
}

// --------------------------------------------------------------------------- a cluster

void prepare_threads(size_t count) {
  while (threads.size() < count) {
    threads.emplace_back();
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for %zu threads", count);
    threads.back().stack = static_cast<unsigned char*>(stack);
  }
}

void prepare_block(Block& block, Index at, Index grid, unsigned rank, size_t shared_bytes) {
  block.bytes = kFenceBytes + kStaticBytes + shared_bytes + kFenceBytes;
  block.raw.assign(block.bytes + kFenceBytes, kPoison);
  const uintptr_t start = reinterpret_cast<uintptr_t>(block.raw.data());
  block.memory = block.raw.data() + (kFenceBytes - start % kFenceBytes);
  memset(block.memory, kFence, kFenceBytes);
  memset(block.end(), kFence, kFenceBytes);
  block.warps.assign((block.threads + 31) / 32, {});
  block.begun = false;
  block.arrived = block.generation = block.returned = 0;
  block.votes = 0;
  for (unsigned i = 0; i < block.threads; ++i) {
    Thread& thread = threads[block.first + i];
    thread.place = {{i, 0, 0}, at, {block.threads, 1, 1}, grid, rank};
    thread.block = &block;
    thread.number = i;
    thread.returned = false;
    thread.watched = nullptr;
    thread.cluster_arrived = false;
    thread.group = 0;
    thread.copies.clear();
  }
}

void check_fences(Block& block) {
  for (const unsigned char* fence : {block.memory, block.end()}) {
    for (size_t i = 0; i < kFenceBytes; ++i) {
      if (fence[i] != kFence) {
        fail("shared memory was written %s its end", fence == block.memory ? "before" : "after");
      }
    }
  }
}

void tell_deadlock(unsigned count) {
  unsigned returned = 0, waiting = 0;
  const char* what = "";
  for (unsigned i = 0; i < count; ++i) {
    returned += threads[i].returned;
    if (!threads[i].returned && !waiting++) what = threads[i].waits_for;
  }
  fail("%u threads wait for ever, the first at %s; %u have returned", waiting, what, returned);
}

// Delivers half of the values in flight, so that some threads continue while others still wait.
void deliver(bool backwards) {
  for (size_t left = under_way.size() / 2; under_way.size() > left;) {
    const Sent it = backwards ? under_way.back() : under_way.front();
    if (backwards) under_way.pop_back();
    else under_way.pop_front();
    const Block& block = blocks[it.rank];
    if (block.returned == block.threads) fail("what was sent to block %u came too late", it.rank);
    memcpy(it.to, it.value, it.bytes);
    it.counter->change(-static_cast<int>(it.bytes));
  }
}

void run_cluster(unsigned count, bool backwards) {
  under_way.clear();
  cluster_arrived = cluster_generation = cluster_left = 0;
  cluster_size = count;
  for (unsigned returned = 0; returned < count;) {
    bool moved = false;
    for (unsigned i = 0; i < count; ++i) {
      Thread& thread = threads[backwards ? count - 1 - i : i];
      if (!thread.can_run()) continue;
      enter(thread);
      if (*error) return;
      moved = true;
      returned += thread.returned;
    }
    if (moved) continue;
    if (under_way.empty()) tell_deadlock(count);
    deliver(backwards);
  }
  if (!under_way.empty()) fail("%zu values were sent to blocks that had ended", under_way.size());
  for (Block& block : blocks) check_fences(block);
}

void run_grid(Index grid, unsigned per_block, unsigned cluster, size_t shared_bytes,
              bool backwards) {
  if (grid.x % cluster) fail("%u blocks are no whole clusters of %u", grid.x, cluster);
  prepare_threads(static_cast<size_t>(cluster) * per_block);
  blocks.resize(cluster);
  const uint64_t groups = static_cast<uint64_t>(grid.x / cluster) * grid.y * grid.z;
  for (uint64_t turn = 0; turn < groups && !*error; ++turn) {
    const uint64_t group = backwards ? groups - 1 - turn : turn;
    const unsigned across = grid.x / cluster;
    const unsigned y = group / across % grid.y;
    const unsigned z = group / across / grid.y;
    for (unsigned rank = 0; rank < cluster; ++rank) {
      blocks[rank].first = rank * per_block;
      blocks[rank].threads = per_block;
      const unsigned x = static_cast<unsigned>(group % across) * cluster + rank;
      prepare_block(blocks[rank], {x, y, z}, grid, rank, shared_bytes);
    }
    run_cluster(cluster * per_block, backwards);
  }
}

}  // namespace

// ------------------------------------------------------------------ what kernels call

void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  size_t at = 0;
  if (running) {
    const Place& p = running->place;
    at = snprintf(error, sizeof error, "thread %u of block (%u, %u, %u): ", p.thread.x, p.block.x,
                  p.block.y, p.block.z);
  }
  vsnprintf(error + at, sizeof error - at, format, values);
  va_end(values);
  _longjmp(running ? scheduler : outside, 1);
}

int meet_block(bool vote) {
  Block& own = block();
  own.votes += vote;
  if (++own.arrived < own.threads) {
    wait_while(own.generation, own.generation, "__syncthreads");
  } else {
    own.arrived = 0;
    own.counted = own.votes;
    own.votes = 0;
    ++own.generation;
  }
  return own.counted;
}

const uint64_t* meet_lanes(unsigned mask, Meeting kind, uint64_t value) {
  Block& own = block();
  const unsigned lane = running->number % 32;
  const unsigned first = running->number - lane;
  if (!(mask >> lane & 1)) fail("lane %u is not in its own mask %#x", lane, mask);
  mask &= lanes_existing();
  auto& meetings = own.warps[first / 32];
  LaneMeeting* found = nullptr;
  for (LaneMeeting& it : meetings) {
    if (it.open && it.mask == mask && it.kind == kind && !(it.arrived >> lane & 1)) found = &it;
  }
  for (LaneMeeting& it : meetings) {
    if (!found && !it.open && !it.readers) found = &it;
  }
  if (!found) {
    meetings.emplace_back();
    found = &meetings.back();
  }
  if (!found->open) {
    found->open = true;
    found->mask = mask;
    found->kind = kind;
    found->arrived = 0;
    memset(found->values, kPoison, sizeof found->values);
  }
  found->values[lane] = value;
  found->arrived |= 1u << lane;
  ++found->readers;
  if (found->arrived != mask) {
    wait_while(found->generation, found->generation, "an exchange between lanes");
  } else {
    found->open = false;
    ++found->generation;
  }
  --found->readers;  // no other thread runs before this one has read
  return found->values;
}

unsigned lanes_existing() {
  const unsigned lanes = block().threads - running->number / 32 * 32;
  return lanes < 32 ? (1u << lanes) - 1 : ~0u;
}

unsigned lanes_alive() {
  const unsigned first = running->number / 32 * 32;
  unsigned mask = 0;
  for (unsigned i = first; i < first + 32 && i < block().threads; ++i) {
    mask |= static_cast<unsigned>(!threads[block().first + i].returned) << (i - first);
  }
  return mask;
}

void arrive_at_cluster() {
  if (running->cluster_arrived) fail("arrives at the cluster's barrier again without a wait");
  running->cluster_arrived = true;
  running->cluster_seen = cluster_generation;
  count_arrival();
}

void wait_for_cluster() {
  if (!running->cluster_arrived) fail("waits for the cluster without having arrived");
  if (cluster_generation == running->cluster_seen) {
    wait_while(cluster_generation, running->cluster_seen, "the cluster's barrier");
  }
  running->cluster_arrived = false;
}

void wait_for_predecessor() { waited_for_predecessor = true; }

void wait_for_slot(const unsigned* epoch_of, unsigned epoch) {
  while (*epoch_of != epoch) wait_while(*epoch_of, *epoch_of, "a slot of another block");
}

unsigned char* shared_memory() { return block().shared(); }

unsigned char* in_block(void* own, unsigned rank) {
  if (rank >= blocks.size()) fail("block %u is not in a cluster of %zu", rank, blocks.size());
  Block& other = blocks[rank];
  if (!other.begun) fail("uses the memory of block %u, which may not have begun", rank);
  if (other.returned == other.threads) fail("uses the memory of block %u, which has ended", rank);
  const ptrdiff_t at = static_cast<unsigned char*>(own) - block().shared();
  if (at < 0 || at >= other.end() - other.shared()) {
    fail("%p is not in shared memory", own);
  }
  return other.shared() + at;
}

void prepare_counter(void* counter) {
  *static_cast<Counter*>(counter) = {0, Counter::kArrival};
}

void expect(void* counter, unsigned bytes) {
  Counter& own = *static_cast<Counter*>(counter);
  if (own.missing < Counter::kArrival / 2) fail("a phase that has begun, or no counter");
  own.change(static_cast<int>(bytes) - Counter::kArrival);
}

void send_later(void* own, unsigned rank, const void* value, unsigned bytes, void* counter) {
  under_way.push_back({rank, in_block(own, rank),
                       reinterpret_cast<Counter*>(in_block(counter, rank)), bytes, {}});
  memcpy(under_way.back().value, value, bytes);
}

void wait_for_phase(void* counter, unsigned parity) {
  const Counter& own = *static_cast<Counter*>(counter);
  while ((own.phases & 1) == parity) wait_while(own.phases, own.phases, "bytes from the cluster");
}

void check_inside(const void* address, size_t bytes) {
  const char* begin = static_cast<const char*>(address);
  for (const Range& it : forbidden) {
    if (begin < it.end && it.begin < begin + bytes) {
      fail("%zu bytes are read at %p, outside of a tensor", bytes, address);
    }
  }
}

void copy_later(void* to, const void* from, unsigned bytes, unsigned filled) {
  check_aligned(to, bytes);
  if (filled) check_read(from, bytes);  // the whole piece is read, however much of it is kept
  running->copies.push_back({to, from, bytes, filled, running->group});
}

void commit_copies() { ++running->group; }

void wait_copies(unsigned pending) {
  auto& copies = running->copies;
  size_t done = 0;
  while (done < copies.size() && copies[done].group + pending < running->group) {
    const Copy& it = copies[done++];
    memset(it.to, 0, it.bytes);
    if (it.filled) memcpy(it.to, it.from, it.filled);
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace emulation

// ------------------------------------------------------------------- what Python calls

// Forbids reads of these bytes; a call with 0 bytes allows all reads again.
extern "C" void emulation_forbid(const char* begin, size_t bytes) {
  using namespace emulation;
  surrounded = bytes;
  if (bytes) forbidden.push_back({begin, begin + bytes});
  else forbidden.clear();
}

// Runs a kernel; returns null or an error. `backwards` reverses the order of threads and blocks.
extern "C" const char* emulation_launch(void (*entry)(void**), void** arguments,
                                        const unsigned* grid, unsigned per_block,
                                        unsigned cluster, size_t shared_bytes, int dependent,
                                        int backwards) {
  using namespace emulation;
  *error = 0;
  running = nullptr;
  waited_for_predecessor = false;
  launch = {entry, arguments};
  if (!_setjmp(outside)) {
    run_grid({grid[0], grid[1], grid[2]}, per_block, cluster, shared_bytes, backwards);
  }
  if (!*error && dependent && !waited_for_predecessor) {
    snprintf(error, sizeof error, "launched as a dependent, it never waits for its predecessor");
  }
  if (!*error) return nullptr;
  for (Thread& thread : threads) thread.started = false;
  return error;
}

// ------------------------------------------- what g++ calls where -fsanitize finds a fault

namespace {
struct Source {
  const char* file;
  unsigned line, column;
};
}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Source* at, uintptr_t address) {
  emulation::fail("%s:%u: an access to %#zx is not aligned to its type", at->file, at->line,
                  address);
}

extern "C" void __ubsan_handle_out_of_bounds_abort(const Source* at, uintptr_t index) {
  emulation::fail("%s:%u: index %zd is outside its array", at->file, at->line, index);
}
