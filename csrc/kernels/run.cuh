// Drives one thread group through one call, with a limit on every wait.
#pragma once

#include "../core/group.h"
#include "block.cuh"
#include "control.h"

namespace dmuon {

// A block's share of dynamic shared memory: cursors and pipelines are read at every visit, and an
// acquire would throw them out of L1.
DMUON_HD inline uint64_t scratch_bytes(const Channel& channel, const PlanView& plan) {
  return channel.cursors() * sizeof(Cursor) + plan.pipeline_count * sizeof(Pipeline);
}

// Whether the group may go on waiting; decided by one thread, for all.
class Patience {
 public:
  DMUON_DEVICE explicit Patience(const Guard& guard) : guard_(guard) {}

  DMUON_DEVICE void moved() { since_ = 0; }
  // 0: waits on, 1: has waited for too long, 2: another group of this rank has.
  DMUON_DEVICE uint64_t idle() {
    const uint64_t now = nanoseconds();
    if (since_ == 0) since_ = now;
    if (load_acquire(guard_.broken) != 0) return 2;
    pause();
    return now - since_ > guard_.limit ? 1 : 0;
  }

 private:
  const Guard& guard_;
  uint64_t since_ = 0;
};

// Steps the group until it has finished, or waits for too long; then it says where, and the channel
// is broken.
template <class GroupType, class Fabric>
DMUON_DEVICE void drive(Fabric& fabric, GroupType& group, int index, uint64_t number,
                        const Guard& guard) {
  Patience patience(guard);
  uint64_t given_up = fabric.uniform(thread() == 0 ? load_acquire(guard.broken) : 0);
  while (given_up == 0) {
    const Progress progress = group.step(fabric);
    if (progress == Progress::finished) break;
    if (progress == Progress::moved) {
      patience.moved();
      continue;
    }
    given_up = fabric.uniform(thread() == 0 ? patience.idle() : 0);
  }
  if (given_up == 1 && thread() == 0 && claim(guard.broken)) {
    guard.report->stuck = group.stuck();
    guard.report->group = index;
    guard.report->number = number;
    store_release(&guard.report->written, 1);
  }
}

// The kernel's body. `call`: in memory that only this block sees, its plan.pipelines are replaced.
// cursors: of the channel, kept from call to call. scratch: scratch_bytes(). Returns when the group
// is finished, or has given up: then the channel is broken and every later call returns at once.
template <class Operator, class Fabric>
DMUON_DEVICE void run_group(Fabric& fabric, Call& call, int index, Cursor* cursors, char* scratch,
                            const Guard& guard) {
  Cursor* near_cursors = reinterpret_cast<Cursor*>(scratch);
  Pipeline* near_pipelines =
      reinterpret_cast<Pipeline*>(scratch + call.channel.cursors() * sizeof(Cursor));
  const Pipeline* pipelines = call.plan.pipelines;
  const int count = call.plan.pipeline_count;
  const int groups = call.plan.groups;
  const auto ring = [&](const Pipeline& p) {
    return call.channel.ring(p.queue, p.lane, call.plan.star != 0);
  };
  for (int i = index + groups * thread(); i < count; i += groups * threads()) {
    near_pipelines[i] = pipelines[i];
    near_cursors[ring(pipelines[i])] = cursors[ring(pipelines[i])];
  }
  barrier();
  if (thread() == 0) call.plan.pipelines = near_pipelines;
  barrier();

  Group<Fabric, Operator> group(call, index, near_cursors);
  drive(fabric, group, index, call.number, guard);

  barrier();
  for (int i = index + groups * thread(); i < count; i += groups * threads()) {
    cursors[ring(pipelines[i])] = near_cursors[ring(pipelines[i])];
  }
}

}  // namespace dmuon
