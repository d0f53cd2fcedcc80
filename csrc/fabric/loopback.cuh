// All ranks of a mesh on one GPU: their windows lie in one allocation, their thread groups in one
// grid. For tests of the real device code (compute-sanitizer) where there is one GPU; compiled for
// a host, blocks are a few threads, for the same tests where there is none. A put is a copy by the
// block.
#pragma once

#include "../core/allgatherv.h"
#include "../core/reducescatterv.h"
#include "../kernels/node.cuh"
#include "../kernels/run.cuh"

namespace dmuon {

// Window offsets of a channel's words. The same on every rank.
struct LoopbackWords {
  NodeWords node;
  uint64_t signals;   // Channel::signals() words
  uint64_t counters;  // Channel::counters() words
};

class LoopbackMemory {
 public:
  static constexpr bool kMulticast = false;

  // windows: of the channel's first node.
  DMUON_DEVICE LoopbackMemory(char* windows, uint64_t stride, const Channel& channel)
      : windows_(windows), stride_(stride), channel_(channel) {}

  DMUON_DEVICE char* at(int rail, uint64_t offset) const {
    return at_node(channel_.node, rail, offset);
  }
  DMUON_DEVICE char* at_node(int node, int rail, uint64_t offset) const {
    return windows_ + (node * channel_.rails + rail) * stride_ + offset;
  }
  DMUON_DEVICE char* everyone(uint64_t) const { return nullptr; }
  DMUON_DEVICE bool multicast() const { return false; }
  DMUON_DEVICE int rails() const { return channel_.rails; }
  DMUON_DEVICE int rail() const { return channel_.rail; }

 private:
  char* windows_;
  uint64_t stride_;
  const Channel& channel_;
};

class LoopbackFabric : public NodeFabric<LoopbackMemory> {
 public:
  DMUON_DEVICE LoopbackFabric(char* windows, uint64_t stride, const LoopbackWords& words,
                              const Channel& channel)
      : NodeFabric(LoopbackMemory(windows, stride, channel), words.node), own_words_(words) {}

  DMUON_DEVICE void put(int node, uint64_t to, uint64_t from, uint32_t bytes, int signal,
                        int counter) {
    barrier();  // all threads' stores to the source
    copy(memory_.at_node(node, memory_.rail(), to), own(from), bytes);
    // Invariant: behind the barrier the releases cover all threads' part of the copy.
    barrier();
    if (thread() == 0) {
      add_release(word(node, own_words_.signals, signal), 1);
      add_release(word_here(own_words_.counters, counter), 1);
    }
  }

  DMUON_DEVICE void signal(int node, int signal) {
    barrier();  // all threads have read what they give back
    if (thread() == 0) add_release(word(node, own_words_.signals, signal), 1);
  }

  DMUON_DEVICE uint64_t read_signal(int signal) {
    return poll(reinterpret_cast<char*>(word_here(own_words_.signals, signal)));
  }
  DMUON_DEVICE uint64_t read_counter(int counter) {
    return poll(reinterpret_cast<char*>(word_here(own_words_.counters, counter)));
  }

 private:
  DMUON_DEVICE uint64_t* word(int node, uint64_t base, int index) const {
    return reinterpret_cast<uint64_t*>(memory_.at_node(node, memory_.rail(), base)) + index;
  }
  DMUON_DEVICE uint64_t* word_here(uint64_t base, int index) const {
    return reinterpret_cast<uint64_t*>(own(base)) + index;
  }

  LoopbackWords own_words_;
};

// One call of one rank, as its blocks find it.
struct LoopbackCall {
  Call call;
  int32_t first_node;  // of the channel's nodes among the mesh's
  LoopbackWords words;
  Cursor* cursors;
  Guard guard;
  uint64_t delay;  // nanoseconds that the rank waits before it
};

// All that a grid does: `count` calls of each rank, one after the other on each rank, as on a
// stream.
struct LoopbackJob {
  const LoopbackCall* calls;  // [rank][call]
  uint64_t* ended;            // [rank]: blocks that have ended a call, over all calls of the job
  char* windows;
  uint64_t stride;
  int32_t ranks;
  int32_t count;
  int32_t blocks;  // per rank: at least the groups of every call
  int32_t absent;  // a rank that never comes; -1: none
  uint64_t scratch;
};

// What orders the calls of one rank on one stream: all blocks of a call end before the next begins.
DMUON_DEVICE void loopback_stream_order(const LoopbackJob& job, const LoopbackCall& next, int rank,
                                        int number, LoopbackFabric& fabric) {
  barrier();
  if (thread() == 0) add_release(job.ended + rank, 1);
  const uint64_t wanted = static_cast<uint64_t>(job.blocks) * (number + 1);
  const uint64_t begin = nanoseconds();
  for (;;) {
    uint64_t leave = 0;
    if (thread() == 0) {
      leave = load_acquire(job.ended + rank) >= wanted ||
              nanoseconds() - begin > next.guard.limit * 2;
      if (!leave) pause();
    }
    if (fabric.uniform(leave) != 0) return;
  }
}

// The body of one block. own: memory that only this block sees.
DMUON_DEVICE void loopback_block(const LoopbackJob& job, int block, Call& own, char* scratch) {
  const int rank = block / job.blocks;
  const int index = block % job.blocks;
  if (rank == job.absent) return;
  for (int i = 0; i < job.count; ++i) {
    const LoopbackCall& next = job.calls[rank * job.count + i];
    barrier();
    if (thread() == 0) own = next.call;
    barrier();
    char* windows = job.windows + next.first_node * own.channel.rails * job.stride;
    LoopbackFabric fabric(windows, job.stride, next.words, own.channel);
    const uint64_t begin = nanoseconds();
    while (fabric.uniform(nanoseconds() - begin < next.delay) != 0) pause();
    if (index < own.plan.groups) {
      if (own.channel.operation == Operation::all_gather_v) {
        run_group<AllGatherV>(fabric, own, index, next.cursors, scratch, next.guard);
      } else {
        run_group<ReduceScatterV>(fabric, own, index, next.cursors, scratch, next.guard);
      }
    }
    loopback_stream_order(job, next, rank, i, fabric);
  }
}

}  // namespace dmuon
