// The shm fabric: ranks that share the memory of one machine. "Nodes" are sets of ranks; across
// them this class offers put and signal only, so that data takes the same ways as on a cluster.
//
// It works on pointers and knows nothing of processes: shm_pool.h maps the memory, and a test may
// run ranks as threads on plain memory. Waiting is the caller's: shm_run.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../core/channel.h"
#include "../core/route.h"
#include "sum.h"

namespace dmuon {

// A sleeper reads `rings`, adds itself to `sleepers`, looks once more at what it waits for, and
// sleeps unless `rings` changed. A writer writes, then reads `sleepers`, and rings if there is one.
// Invariant: all four accesses are sequentially consistent, so either the writer sees the sleeper
// or the sleeper's second look sees what was written. That is why the words that are waited for are
// written and read in this order too, where release and acquire would do for the data.
struct ShmBell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;

  void ring();
  // Sleep until the next ring after `rings` was `seen`, at most `seconds`. False: time ran out.
  bool sleep(uint32_t seen, double seconds);
};

// What one rank shows of one channel; its signals follow. In shared memory; all 0 at first.
struct alignas(64) ShmWords {
  std::atomic<uint64_t> entered;   // number of the last call that this rank has entered
  std::atomic<uint64_t> finished;  // thread groups that this rank has finished, over all calls
  ShmBell bell;                    // this rank sleeps here

  std::atomic<uint64_t>& signal(int index) {
    return reinterpret_cast<std::atomic<uint64_t>*>(this + 1)[index];
  }
  static size_t bytes(const Channel& channel) {
    return round_up(sizeof(ShmWords) + channel.signals() * sizeof(std::atomic<uint64_t>),
                    alignof(ShmWords));
  }
};
// Other processes see the same words only if no lock hides beside them.
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// Where a rank's memory lies in this process.
struct ShmRank {
  std::byte* window;
  ShmWords* words;
};

// A channel as one rank sees it.
struct ShmChannel {
  Channel channel;
  std::vector<ShmRank> rails;  // of the own node
  std::vector<ShmRank> nodes;  // ranks of the own rail
  std::vector<Cursor> cursors;
  // Puts copy at once, so these only count. A ring's are touched by the one group that serves it.
  std::vector<uint64_t> counters;

  ShmRank& own() { return rails[channel.rail]; }
};

// memcpy past the caches: a buffer that no cache holds would only be read in before it is
// overwritten, which costs as much as the copy itself. Offsets and n: multiples of kAlignment.
void stream_copy(std::byte* to, const std::byte* from, size_t n);

// One thread group's view of one call. Not shared between threads.
class ShmFabric {
 public:
  // groups_finished: of the call. streaming: its buffer is too large for a cache.
  ShmFabric(ShmChannel& channel, uint64_t groups_finished, bool streaming)
      : c_(channel),
        own_(channel.own()),
        groups_finished_(groups_finished),
        streaming_(streaming) {
    to_ring_.resize(channel.nodes.size());
  }

  bool entered(int rail, uint64_t number) const { return c_.rails[rail].words->entered >= number; }

  void enter(uint64_t number) {
    own_.words->entered = number;
    // A gather's first copy waits for one rank, all else for all: the last one to enter rings. It
    // sees the others' entries, since each writes its own before it reads theirs.
    const bool one_counts = c_.channel.operation == Operation::all_gather_v && c_.channel.nodes > 1;
    if (one_counts || all_entered(number)) ring_node_ = true;
  }

  bool finished(uint64_t count) const { return missing(count) < 0; }
  // First rail that has not finished `count` groups; -1: none.
  int missing(uint64_t count) const {
    for (size_t rail = 0; rail < c_.rails.size(); ++rail) {
      if (c_.rails[rail].words->finished < count) return static_cast<int>(rail);
    }
    return -1;
  }

  void finish() {
    // A read-modify-write: several groups of this rank may finish at a time, and who sees the sum
    // must acquire what each of them wrote.
    own_.words->finished.fetch_add(1);
    // As for entries. Nobody waits for more than the present call's groups.
    if (finished(groups_finished_)) ring_node_ = true;
  }

  void fetch(uint64_t to, int rail, uint64_t from, uint64_t n) {
    std::memcpy(own_.window + to, c_.rails[rail].window + from, n);
  }

  void multicast(uint64_t to, int rail, uint64_t from, uint64_t n, int except) {
    const std::byte* source = c_.rails[rail].window + from;
    for (int peer = 0; peer < c_.channel.rails; ++peer) {
      std::byte* target = c_.rails[peer].window + to;
      if (peer == except) continue;
      if (streaming_) {
        stream_copy(target, source, n);
      } else {
        std::memcpy(target, source, n);
      }
    }
  }

  void reduce(int rail, uint64_t to, uint64_t from, uint64_t n, Dtype dtype, uint64_t partials,
              int count, uint64_t stride) {
    // A star has fewer than kStarNodes partials, a chain one.
    const std::byte* sources[kMaxRails + kStarNodes];
    int sourced = 0;
    for (const ShmRank& peer : c_.rails) sources[sourced++] = peer.window + from;
    for (int i = 0; i < count; ++i) sources[sourced++] = own_.window + partials + i * stride;
    sum(dtype, c_.rails[rail].window + to, sources, sourced, n);
  }

  void put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) {
    std::memcpy(c_.nodes[node].window + to, own_.window + from, n);
    ++c_.counters[counter];
    this->signal(node, signal);
  }

  void signal(int node, int signal) {
    c_.nodes[node].words->signal(signal).fetch_add(1);
    to_ring_[node] = 1;
    ring_nodes_ = true;
  }

  uint64_t read_signal(int signal) const { return own_.words->signal(signal); }
  uint64_t read_counter(int counter) const { return c_.counters[counter]; }
  template <class T>
  void keep(T* place, const T& value) {
    *place = value;
  }

  // Wake whom this group's writes since the last ring() may concern. Not at every write: with fewer
  // processors than ranks each waking costs a switch. Called before sleeping and at the end.
  void ring() {
    if (ring_node_) {
      for (ShmRank& peer : c_.rails) peer.words->bell.ring();
      ring_node_ = false;
    }
    if (ring_nodes_) {
      for (size_t node = 0; node < to_ring_.size(); ++node) {
        if (to_ring_[node]) c_.nodes[node].words->bell.ring();
        to_ring_[node] = 0;
      }
      ring_nodes_ = false;
    }
  }
  ShmBell& bell() { return own_.words->bell; }
  // Whether what is waited for cannot come any more.
  bool hopeless() const { return false; }

 private:
  bool all_entered(uint64_t number) const {
    for (const ShmRank& rank : c_.rails) {
      if (rank.words->entered < number) return false;
    }
    return true;
  }

  ShmChannel& c_;
  ShmRank& own_;
  const uint64_t groups_finished_;
  const bool streaming_;
  bool ring_node_ = false;
  bool ring_nodes_ = false;
  std::vector<char> to_ring_;  // by node
};

}  // namespace dmuon
