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
  bool ended;      // else it paused, ranks disagree, or a wait took too long
  bool paused;     // run() goes on
  Stuck stuck;     // where
  int group;       // whose
  uint64_t late;   // sleeps that no ring ended although there was work
  ShmDisagreement disagreement;
};

// Steps groups in turn until all are finished, and sleeps while none can go on. `GroupType` has
// step(FabricType&) of core/group.h.
template <class GroupType, class FabricType>
class ShmDriver {
 public:
  struct Outcome {
    bool ended;
    uint64_t late;
    bool paused = false;
  };

  ShmDriver(FabricType& fabric, std::vector<GroupType> groups)
      : fabric_(fabric), groups_(std::move(groups)), ended_(groups_.size()) {
    open_ = static_cast<int>(groups_.size());
  }

  // limit_seconds: longest time without progress. spins: looks before sleeping. pausing: return
  // when a signal handler ran while this slept, and now and then, for it may have run before; then
  // the caller looks after it. Called again this goes on, and the limit with it.
  Outcome run(double limit_seconds, int spins, bool pausing = false) {
    Clock::time_point& progress = progress_;
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
      ShmBell::Slept slept = ShmBell::Slept::rung;
      if (left > 0) slept = bell.sleep(seen, std::min(left, kBackstopSeconds));
      bell.sleepers.fetch_sub(1);
      if (left <= 0) return {false, late};
      overslept = slept == ShmBell::Slept::late;
      if (pausing && slept != ShmBell::Slept::rung) return {false, late, true};
    }
  }

  size_t size() const { return groups_.size(); }
  bool ended(size_t i) const { return ended_[i] != 0; }
  const GroupType& group(size_t i) const { return groups_[i]; }

 private:
  using Clock = std::chrono::steady_clock;
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
  Clock::time_point progress_ = Clock::now();
};

template <class Operator>
class ShmRun {
 public:
  // groups first .. first + count - 1 of `call`; other threads may drive the others. streaming: the
  // call's buffer is too large for a cache. tag: the same on every rank.
  ShmRun(ShmChannel& channel, const Call& call, int first, int count, bool streaming,
         const ShmTag& tag)
      : call_(call),
        channel_(channel),
        fabric_(channel, call.groups_finished, streaming, call.number, tag),
        first_(first),
        driver_(fabric_, make_groups(channel, call, first, count)) {}

  // As ShmDriver::run.
  ShmEnd run(double limit_seconds, int spins, bool pausing = false) {
    const auto outcome = driver_.run(limit_seconds, spins, pausing);
    if (outcome.ended || outcome.paused) {
      return {outcome.ended, outcome.paused, {Wait::none, -1, -1, 0}, -1, outcome.late, {}};
    }
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
    ShmEnd end{false, false, {Wait::none, -1, -1, 0}, -1, late, fabric_.disagreement()};
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
    if (end.stuck.wait == Wait::arrival && end.stuck.peer < 0) end.stuck.peer = missing_inbox();
    return end;
  }

  // On the star path of a reduction: the first node whose put is not here; -1: none.
  int missing_inbox() const {
    const Channel& channel = channel_.channel;
    const uint64_t sequence = channel_.cursors[channel.ring(channel.node, 0, true)].done;
    for (int hop = 1; hop < channel.nodes; ++hop) {
      const int node = modulo(channel.node + hop, channel.nodes);
      const int signal = channel.arrival_signal(channel.star_inbox(channel.node, node), sequence);
      if (channel_.own().words->signal(signal) < channel.uses(sequence)) return node;
    }
    return -1;
  }

  const Call& call_;
  ShmChannel& channel_;
  ShmFabric fabric_;
  int first_;
  ShmDriver<GroupType, ShmFabric> driver_;
};

}  // namespace dmuon
