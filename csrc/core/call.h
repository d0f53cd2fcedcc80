// What one call adds to the frozen plan: the leased base addresses, and the numbers that order it.
#pragma once

#include "channel.h"
#include "plan.h"

namespace dmuon {

struct Call {
  PlanView plan;
  Channel channel;
  uint64_t buffer;  // window offset of the group's buffer, the same on every rank
  uint64_t home;    // reduce: window offset of the owner's reduced buffer
  Dtype dtype;      // reduce: of the elements
  uint64_t number;  // 1, 2, ...: calls on this channel, in the order in which all ranks make them
  uint64_t groups_finished;  // thread groups of all calls up to and with this one
};

}  // namespace dmuon
