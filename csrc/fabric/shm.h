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
  enum class Slept { rung, late, interrupted };
  // Sleep until the next ring after `rings` was `seen` or a signal handler ran, at most `seconds`.
  Slept sleep(uint32_t seen, double seconds);
};

// What ranks that make the same call have alike: a call's group, and the places of its buffers.
struct ShmTag {
  uint64_t what;
  uint64_t where;
  bool operator==(const ShmTag& o) const { return what == o.what && where == o.where; }
};

// A tag in shared memory. Invariant: it is written before a word that is released, and read after
// that word was acquired, which orders it.
struct ShmTagWords {
  std::atomic<uint64_t> what;
  std::atomic<uint64_t> where;

  void store(const ShmTag& tag) {
    what.store(tag.what, std::memory_order_relaxed);
    where.store(tag.where, std::memory_order_relaxed);
  }
  ShmTag load() const {
    return {what.load(std::memory_order_relaxed), where.load(std::memory_order_relaxed)};
  }
};

// A signal, and of an arrival the call that the last put belongs to: in one line of a cache, so
// that the tag costs no transfer of its own.
struct alignas(32) ShmSignal {
  std::atomic<uint64_t> count;
  std::atomic<uint64_t> number;
  ShmTagWords tag;
};

// What one rank shows of one channel; its signals follow. In shared memory; all 0 at first.
struct alignas(64) ShmWords {
  std::atomic<uint64_t> entered;   // number of the last call that this rank has entered
  std::atomic<uint64_t> finished;  // thread groups that this rank has finished, over all calls
  ShmBell bell;                    // this rank sleeps here
  ShmTagWords tags[2];             // of the last two calls, by number modulo 2

  ShmSignal& slot(int index) { return reinterpret_cast<ShmSignal*>(this + 1)[index]; }
  std::atomic<uint64_t>& signal(int index) { return slot(index).count; }
  static size_t bytes(const Channel& channel) {
    return round_up(sizeof(ShmWords) + channel.signals() * sizeof(ShmSignal), alignof(ShmWords));
  }
};
static_assert(sizeof(ShmWords) == 64, "all words of a rank are one line of a cache");
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
  // By arrival signal: the count whose put was compared with the call. Touched as counters are.
  std::vector<uint64_t> compared;

  ShmRank& own() { return rails[channel.rail]; }
};

// memcpy past the caches: a buffer that no cache holds would only be read in before it is
// overwritten, which costs as much as the copy itself. Offsets and n: multiples of kAlignment.
void stream_copy(std::byte* to, const std::byte* from, size_t n);

// Two ranks that are not in the same call.
struct ShmDisagreement {
  bool found = false;
  bool on_rail = false;  // `peer` is a node of the own rail, else a rail of the own node
  int peer = -1;
  uint64_t number = 0;  // of its call
  ShmTag theirs{};
};

// One thread group's view of one call. Not shared between threads.
class ShmFabric {
 public:
  // A call that is compared with the other ranks': with those of the node at entry and exit, with
  // the sender of a put at its arrival. groups_finished: of the call. streaming: its buffer is too
  // large for a cache.
  ShmFabric(ShmChannel& channel, uint64_t groups_finished, bool streaming, uint64_t number,
            const ShmTag& tag)
      : ShmFabric(channel, groups_finished, streaming) {
    compares_ = true;
    number_ = number;
    tag_ = tag;
    arrivals_ = channel.channel.rings() * channel.channel.slots;
  }

  bool entered(int rail, uint64_t number) {
    const ShmWords& words = *c_.rails[rail].words;
    return words.entered >= number && agrees_in_node(rail);
  }

  void enter(uint64_t number) {
    own_.words->tags[number % 2].store(tag_);
    own_.words->entered = number;
    // A gather's first copy waits for one rank, all else for all: the last one to enter rings. It
    // sees the others' entries, since each writes its own before it reads theirs.
    const bool one_counts = c_.channel.operation == Operation::all_gather_v && c_.channel.nodes > 1;
    if (one_counts || all_entered(number)) ring_node_ = true;
  }

  bool finished(uint64_t count) {
    const bool all = missing(count) < 0;
    // A rank that moved nothing has compared nothing before. Who waits for one that disagreed and
    // left would wait in vain: so whoever has entered is looked at.
    for (int rail = 0; rail < c_.channel.rails; ++rail) {
      if (c_.rails[rail].words->entered >= number_ && !agrees_in_node(rail)) return false;
    }
    return all;
  }
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
    if (missing(groups_finished_) < 0) ring_node_ = true;
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
    ShmSignal& slot = c_.nodes[node].words->slot(signal);
    slot.number.store(number_, std::memory_order_relaxed);
    slot.tag.store(tag_);
    this->signal(node, signal);
  }

  void signal(int node, int signal) {
    c_.nodes[node].words->signal(signal).fetch_add(1);
    to_ring_[node] = 1;
    ring_nodes_ = true;
  }

  uint64_t read_signal(int signal) {
    const uint64_t count = own_.words->signal(signal);
    if (signal >= arrivals_ || count == c_.compared[signal]) return count;
    // Invariant: a slot keeps its put until this rank gives it back, and is asked for by the call
    // that expects the put: so the tag is that put's, and must be this call's.
    const ShmSignal& slot = own_.words->slot(signal);
    const uint64_t number = slot.number.load(std::memory_order_relaxed);
    if (!agrees(true, writer_of(signal), number, slot.tag.load())) return c_.compared[signal];
    c_.compared[signal] = count;
    return count;
  }
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
  bool hopeless() const { return disagreement_.found; }
  const ShmDisagreement& disagreement() const { return disagreement_; }

 protected:
  // A call that is compared with nothing.
  ShmFabric(ShmChannel& channel, uint64_t groups_finished, bool streaming)
      : c_(channel),
        own_(channel.own()),
        groups_finished_(groups_finished),
        streaming_(streaming) {
    to_ring_.resize(channel.nodes.size());
  }

 private:
  // Whether a rank of the node, which has entered the call, means the same one. Invariant: nobody
  // enters the call after the next before this rank has left this one, so the tag is still there.
  bool agrees_in_node(int rail) {
    return agrees(false, rail, number_, c_.rails[rail].words->tags[number_ % 2].load());
  }

  bool agrees(bool on_rail, int peer, uint64_t number, const ShmTag& theirs) {
    if (!compares_ || (number == number_ && theirs == tag_)) return true;
    if (!disagreement_.found) disagreement_ = {true, on_rail, peer, number, theirs};
    return false;
  }

  // The node that puts into the ring of an arrival signal.
  int writer_of(int signal) const {
    const Channel& channel = c_.channel;
    const int star = signal / channel.slots - channel.chain_rings();
    if (star < 0) return modulo(channel.node - 1, channel.nodes);
    if (channel.operation == Operation::all_gather_v) return star;
    return modulo(channel.node + 1 + star - channel.nodes, channel.nodes);
  }

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
  bool compares_ = false;
  uint64_t number_ = 0;
  ShmTag tag_{};
  int arrivals_ = 0;  // signals below this one are compared
  ShmDisagreement disagreement_;
  bool ring_node_ = false;
  bool ring_nodes_ = false;
  std::vector<char> to_ring_;  // by node
};

}  // namespace dmuon
