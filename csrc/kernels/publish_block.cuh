// What the publish's kernels do, for any fabric of a block: host threads can run it too.
#pragma once

#include "../core/publish.h"
#include "run.cuh"

namespace dmuon {

// A block's fabric, and the words of one publish. They lie in this GPU's memory and no other rank
// sees them; but a NIC reads and writes what they order.
template <class Base>
class PublishBlockFabric : public Base {
 public:
  template <class... Args>
  DMUON_DEVICE explicit PublishBlockFabric(const PublishControl& control, const Args&... args)
      : Base(args...), control_(control) {}

  DMUON_DEVICE uint64_t released() {
    return this->poll(reinterpret_cast<const char*>(control_.released));
  }

  DMUON_DEVICE void flag(uint32_t number, uint64_t step) {
    // Invariant: thread 0 acquired every arrival of the task itself, so its release covers them.
    if (thread() == 0) store_release(control_.flags + number, step);
  }

 private:
  const PublishControl& control_;
};

// The block of one call. scratch: a PublishCursor per node. Cursors are read at every visit, and an
// acquire would throw them out of L1.
template <class Fabric>
DMUON_DEVICE void publish_block(Fabric& fabric, const PublishCall& call, PublishCursor* cursors,
                                char* scratch, const Guard& guard) {
  auto* near_cursors = reinterpret_cast<PublishCursor*>(scratch);
  for (uint32_t i = thread(); i < static_cast<uint32_t>(call.channel.nodes); i += threads()) {
    near_cursors[i] = cursors[i];
  }
  barrier();
  PublishGroup<Fabric> group(call, near_cursors);
  drive(fabric, group, 0, call.step, guard);
  barrier();
  for (uint32_t i = thread(); i < static_cast<uint32_t>(call.channel.nodes); i += threads()) {
    cursors[i] = near_cursors[i];
  }
}

// Task `number` is final for `step`, as the `count`th of all releases. One thread. Invariant: what
// was written before, in the order of the stream, the releases pass on to the call beside it.
DMUON_DEVICE void publish_release(const PublishControl& control, uint32_t number, uint64_t step,
                                  uint64_t count) {
  store_release(control.flags + number, step);
  store_release(control.released, count);
}

// Waits until tasks first .. first + count - 1 of `step` are here; thread `index` of `stride` looks
// at every stride-th of them.
DMUON_DEVICE void publish_wait(const PublishControl& control, uint32_t first, uint32_t count,
                               uint64_t step, uint32_t index, uint32_t stride,
                               const Guard& guard) {
  const uint64_t begin = nanoseconds();
  for (uint32_t i = index; i < count; i += stride) {
    while (load_acquire(control.flags + first + i) < step) {
      if (load_acquire(guard.broken) != 0) return;
      if (nanoseconds() - begin > guard.limit) {
        if (!claim(guard.broken)) return;
        guard.report->stuck = {Wait::flag, -1, -1, first + i};
        guard.report->group = 0;
        guard.report->number = step;
        store_release(&guard.report->written, 1);
        return;
      }
      pause();
    }
  }
}

}  // namespace dmuon
