// Drives thread groups of one call to the end in the calling thread, with bounded waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "../core/group.h"
#include "shm.h"

namespace dmuon {

// How a call ended.
struct ShmEnd {
  bool ended;        // else a wait took too long
  Stuck stuck;       // where
  int group;         // whose
  uint64_t late;     // sleeps that no ring ended although there was work
};

// Steps groups in turn until all are finished, and sleeps while none can go on. `GroupType` has
// step(FabricType&) of core/group.h.
template <class GroupType, class FabricType>
class ShmDriver {
 public:
  struct Outcome {
    bool ended;
    uint64_t late;
  };

  ShmDriver(FabricType& fabric, std::vector<GroupType> groups)
      : fabric_(fabric), groups_(std::move(groups)), ended_(groups_.size()) {
    open_ = static_cast<int>(groups_.size());
  }

  // limit_seconds: longest time without progress. spins: looks before sleeping.
  Outcome run(double limit_seconds, int spins) {
    using Clock = std::chrono::steady_clock;
    Clock::time_point progress = Clock::now();
    uint64_t late = 0;
    bool overslept = false;
    for (int idle = 0;;) {
      const bool moved = round();
      if (moved) {
        fabric_.ring();
        late += overslept;
        if (open_ == 0) return {true, late};
        progress = Clock::now();
        overslept = false;
        idle = 0;
        continue;
      }
      overslept = false;
      if (++idle <= spins) continue;
      ShmBell& bell = fabric_.bell();
      const uint32_t seen = bell.rings;
      bell.sleepers.fetch_add(1);
      const std::chrono::duration<double> waited = Clock::now() - progress;
      const double left = limit_seconds - waited.count();
      // The second look of ShmBell.
      if (round()) {
        bell.sleepers.fetch_sub(1);
        fabric_.ring();
        if (open_ == 0) return {true, late};
        progress = Clock::now();
        idle = 0;
        continue;
      }
      if (fabric_.hopeless()) {
        bell.sleepers.fetch_sub(1);
        return {false, late};
      }
      if (left > 0) overslept = !bell.sleep(seen, std::min(left, kBackstopSeconds));
      bell.sleepers.fetch_sub(1);
      if (left <= 0) return {false, late};
    }
  }

  size_t size() const { return groups_.size(); }
  bool ended(size_t i) const { return ended_[i] != 0; }
  const GroupType& group(size_t i) const { return groups_[i]; }

 private:
  // A ring that came too late is repaired after this time; `late` counts how often.
  static constexpr double kBackstopSeconds = 1.0;
  // Fill or arrive, put, work inside the node, give back: a chunk goes through while it is in the
  // processor's cache.
  static constexpr int kStages = 4;

  // Let every group move one chunk, as far as it goes. Whether any did.
  bool round() {
    bool moved = false;
    for (size_t i = 0; i < groups_.size(); ++i) {
      for (int stage = 0; stage < kStages && !ended_[i]; ++stage) {
        const Progress progress = groups_[i].step(fabric_);
        if (progress == Progress::idle) break;
        moved = true;
        if (progress == Progress::finished) {
          ended_[i] = 1;
          --open_;
        }
      }
    }
    return moved;
  }

  FabricType& fabric_;
  std::vector<GroupType> groups_;
  std::vector<char> ended_;
  int open_ = 0;
};

template <class Operator>
class ShmRun {
 public:
  // groups first .. first + count - 1 of `call`; other threads may drive the others. streaming: the
  // call's buffer is too large for a cache.
  ShmRun(ShmChannel& channel, const Call& call, int first, int count, bool streaming)
      : call_(call),
        fabric_(channel, call.groups_finished, streaming),
        first_(first),
        driver_(fabric_, make_groups(channel, call, first, count)) {}

  // limit_seconds: longest time without progress. spins: looks before sleeping.
  ShmEnd run(double limit_seconds, int spins) {
    const auto outcome = driver_.run(limit_seconds, spins);
    if (outcome.ended) return {true, {}, -1, outcome.late};
    return stuck(outcome.late);
  }

 private:
  using GroupType = Group<ShmFabric, Operator>;

  static std::vector<GroupType> make_groups(ShmChannel& channel, const Call& call, int first,
                                            int count) {
    std::vector<GroupType> groups;
    groups.reserve(count);
    for (int i = 0; i < count; ++i) groups.emplace_back(call, first + i, channel.cursors.data());
    return groups;
  }

  ShmEnd stuck(uint64_t late) const {
    ShmEnd end{false, {Wait::none, -1, -1, 0}, -1, late};
    for (size_t i = 0; i < driver_.size(); ++i) {
      if (driver_.ended(i)) continue;
      const Stuck found = driver_.group(i).stuck();
      // A group that waits for the exit waits for the others.
      if (end.group < 0 || end.stuck.wait == Wait::exit || end.stuck.wait == Wait::none) {
        end.stuck = found;
        end.group = first_ + static_cast<int>(i);
      }
    }
    if (end.stuck.wait == Wait::exit) end.stuck.peer = fabric_.missing(call_.groups_finished);
    return end;
  }

  const Call& call_;
  ShmFabric fabric_;
  int first_;
  ShmDriver<GroupType, ShmFabric> driver_;
};

}  // namespace dmuon
