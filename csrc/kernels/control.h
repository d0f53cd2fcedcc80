// Words that kernels share with other ranks and with the host.
#pragma once

#include "../core/group.h"

namespace dmuon {

// Words through which the ranks of a node meet, for one channel: offsets in the window. Each rank
// has one of each kind per rank of its node, so that every word has one writer and is polled in the
// reader's own memory.
struct NodeWords {
  static constexpr uint64_t kStride = 128;  // no two writers share a line

  uint64_t entered;   // number of the last call that the rank has entered
  uint64_t finished;  // thread groups that the rank has finished, over all calls

  DMUON_HD static constexpr uint64_t bytes(int rails) { return 2 * kStride * rails; }
  DMUON_HD static NodeWords place(uint64_t base, int rails) {
    return {base, base + kStride * rails};
  }
};

// Where a call stood still, for the host. In memory that the host reads while kernels run.
struct Report {
  uint64_t written;  // 1: the rest is there
  Stuck stuck;
  int32_t group;
  uint64_t number;
};

// Words of one publish on one rank, in device memory.
struct PublishControl {
  uint64_t* released;  // own tasks that are final, over all steps
  uint64_t* flags;     // by task: the step that is in this rank's copy
};

// The limit of all waits of a channel on one rank.
struct Guard {
  uint64_t limit;   // nanoseconds without progress
  uint64_t* broken; // device memory: groups that gave up
  Report* report;
};

}  // namespace dmuon
