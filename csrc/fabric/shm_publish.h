// What a publish adds to the shm fabric: releases and flags of one table on one rank. They lie in
// this process's own memory: the rank's update thread releases, its publish thread raises flags,
// whoever gathers for its node waits for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "../core/publish.h"
#include "shm.h"

namespace dmuon {

struct ShmFlags {
  explicit ShmFlags(uint32_t tasks) : steps(new std::atomic<uint64_t>[tasks]()) {}

  // Task `number` of `step` is in this rank's copy.
  void raise(uint32_t number, uint64_t step) {
    steps[number] = step;
    raised.fetch_add(1);
    bell.ring();
  }

  // Task `number`, of this rank, is final for `step`; `count` tasks are, over all steps. publisher:
  // where the rank's call sleeps.
  void release(uint32_t number, uint64_t step, uint64_t count, ShmBell& publisher) {
    raise(number, step);
    // Invariant: this thread wrote the task's bytes before, and whoever reads the count acquires
    // them.
    released = count;
    publisher.ring();
  }

  enum class Wait { over, late, failed };
  // Wait until tasks next .. end - 1 of `step` are here; `next` moves on to the first that is not.
  // limit_seconds: longest time in which no task arrives.
  Wait wait(uint64_t& next, uint64_t end, uint64_t step, double limit_seconds) {
    using Clock = std::chrono::steady_clock;
    // Flags never fall: what was seen need not be looked at again.
    const auto all_here = [&] {
      while (next < end && steps[next] >= step) ++next;
      return next == end;
    };
    uint64_t seen_raised = raised;
    Clock::time_point progress = Clock::now();
    while (!all_here()) {
      if (failed) return Wait::failed;
      if (const uint64_t now = raised; now != seen_raised) {
        seen_raised = now;
        progress = Clock::now();
      }
      const std::chrono::duration<double> waited = Clock::now() - progress;
      const double left = limit_seconds - waited.count();
      if (left <= 0) return Wait::late;
      const uint32_t seen = bell.rings;
      bell.sleepers.fetch_add(1);
      // The second look of ShmBell.
      if (!all_here() && !failed) bell.sleep(seen, std::min(left, kLookSeconds));
      bell.sleepers.fetch_sub(1);
    }
    return Wait::over;
  }

  // Ends are noticed at the latest after this time, should a ring come too late.
  static constexpr double kLookSeconds = 1.0;

  std::atomic<uint64_t> released{0};  // own tasks, over all steps
  std::atomic<uint64_t> ended{0};     // last step whose call has ended on this rank
  std::atomic<uint64_t> raised{0};    // flags raised: whether anything goes on
  std::atomic<bool> failed{false};    // a call has: nothing more will arrive
  std::atomic<bool> stopped{false};   // no more releases will come
  // Who waits for flags sleeps here. Invariant: as for the words of ShmBell, all are written and
  // read in sequentially consistent order.
  ShmBell bell{};
  std::unique_ptr<std::atomic<uint64_t>[]> steps;  // by task number: the step that is here
};

// The one thread group's view of one call.
class ShmPublishFabric : public ShmFabric {
 public:
  // released: own tasks once all of the call's are final.
  ShmPublishFabric(ShmChannel& channel, ShmFlags& flags, uint64_t released)
      : ShmFabric(channel, 0, false), flags_(flags), all_released_(released) {}

  uint64_t released() const { return flags_.released; }
  void flag(uint32_t number, uint64_t step) { flags_.raise(number, step); }

  // The call waits for a release that will not come.
  bool hopeless() const { return flags_.stopped && flags_.released < all_released_; }

 private:
  ShmFlags& flags_;
  const uint64_t all_released_;
};

}  // namespace dmuon
