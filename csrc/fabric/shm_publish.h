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

  using Clock = std::chrono::steady_clock;
  // A wait for tasks next .. end - 1 of `step`. One that paused goes on where it stood.
  struct Waiting {
    uint64_t next;  // moves on to the first that is not here
    uint64_t end;
    uint64_t step;
    uint64_t raised;             // when a flag was last seen to rise
    Clock::time_point progress;  // when that was
  };
  Waiting waiting(uint64_t first, uint64_t end, uint64_t step) const {
    return {first, end, step, raised, Clock::now()};
  }
  enum class Wait { over, late, failed, paused };
  // limit_seconds: longest time in which no task arrives. pausing: as for ShmDriver::run.
  Wait wait(Waiting& w, double limit_seconds, bool pausing) {
    // Flags never fall: what was seen need not be looked at again.
    const auto all_here = [&] {
      while (w.next < w.end && steps[w.next] >= w.step) ++w.next;
      return w.next == w.end;
    };
    while (!all_here()) {
      if (failed) return Wait::failed;
      if (const uint64_t now = raised; now != w.raised) {
        w.raised = now;
        w.progress = Clock::now();
      }
      const std::chrono::duration<double> waited = Clock::now() - w.progress;
      const double left = limit_seconds - waited.count();
      if (left <= 0) return Wait::late;
      const uint32_t seen = bell.rings;
      bell.sleepers.fetch_add(1);
      ShmBell::Slept slept = ShmBell::Slept::rung;
      // The second look of ShmBell.
      if (!all_here() && !failed) slept = bell.sleep(seen, std::min(left, kLookSeconds));
      bell.sleepers.fetch_sub(1);
      if (pausing && slept != ShmBell::Slept::rung) return Wait::paused;
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
  std::atomic<bool> given_up{false};  // nor other ranks'
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

  // The call waits for a release that will not come, here or elsewhere.
  bool hopeless() const {
    return flags_.given_up || (flags_.stopped && flags_.released < all_released_);
  }

 private:
  ShmFlags& flags_;
  const uint64_t all_released_;
};

}  // namespace dmuon
