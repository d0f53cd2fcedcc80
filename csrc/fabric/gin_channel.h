// Where a channel lies in a communicator of NCCL.
#pragma once

#include <nccl.h>

#include "../kernels/control.h"

namespace dmuon {

// What a kernel needs to know of one channel; a kernel parameter.
struct GinChannel {
  ncclWindow_t window;
  NodeWords words;
  uint32_t signals;      // number of the channel's first signal, on every rank
  uint32_t counters;     // of its first counter
  int32_t first_node;    // of the channel's nodes among the communicator's
  int32_t node_stride;   // from one of them to the next
  int32_t multicast;     // 1: the window has a multicast address

  // Of a node of the channel, in the team of the rail.
  DMUON_HD int rank(int node) const { return first_node + node * node_stride; }
};

}  // namespace dmuon
