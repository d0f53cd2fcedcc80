// One thread group's part of one call: enter, serve pipelines, finish.
//
// step() moves at most one chunk by one stage and returns; it never waits. A thread block, a host
// thread and a simulator's event loop all drive a call by calling it again. No deadlock can form:
// a group never stays at a pipeline that has nothing ready, and what a pipeline waits for (its
// upstream's data, its downstream's free slots) depends on nodes further along the same chain only,
// whose last node waits for nobody (paper, appendix C.2).
#pragma once

#include "call.h"
#include "route.h"

namespace dmuon {

enum class Progress : int32_t { moved = 0, idle = 1, finished = 2 };

// Where a call stands still.
struct Stuck {
  Wait wait;
  int32_t queue;   // -1: none
  int32_t peer;    // node, or rail of this node, that is waited for; -1: unknown
  uint64_t chunk;  // of the queue's stream on this rail
};

// Which ranks of the node have entered; each is asked until it has.
class Entered {
 public:
  DMUON_HD Entered(uint64_t number, int rails)
      : number_(number), rails_(rails), missing_(rails) {}

  template <class Fabric>
  DMUON_HD bool one(Fabric& fabric, int rail) {
    if (rail < known_) return true;
    const bool there = fabric.entered(rail, number_);
    missing_ = there ? rails_ : rail;
    return there;
  }
  template <class Fabric>
  DMUON_HD bool all(Fabric& fabric) {
    while (known_ < rails_ && fabric.entered(known_, number_)) ++known_;
    missing_ = known_;
    return known_ == rails_;
  }
  // The rank that had not entered when last asked for; the number of rails: none, or none was asked
  // for.
  DMUON_HD int missing() const { return missing_; }

 private:
  uint64_t number_;
  int rails_;
  int known_ = 0;  // rails below this one have entered
  int missing_;
};

template <class Fabric, class Operator>
class Group {
 public:
  // cursors: of the channel, Channel::cursors() of them; this group touches only its pipelines'.
  DMUON_HD Group(const Call& call, int index, Cursor* cursors)
      : call_(call), index_(index), cursors_(cursors), entered_(call.number, call.channel.rails) {
    const int groups = call.plan.groups;
    served_ = index < call.plan.pipeline_count
                  ? (call.plan.pipeline_count - index + groups - 1) / groups
                  : 0;
    open_ = served_;
  }

  DMUON_HD Progress step(Fabric& fabric) {
    switch (phase_) {
      case Phase::enter:
        // Invariant: all calls on a channel are made in one order, and the launch order of the
        // rank's stream puts its writes before this.
        if (index_ == 0) fabric.enter(call_.number);
        for (int i = 0; i < served_; ++i) begin(fabric, pipeline(i));
        phase_ = Phase::serve;
        return Progress::moved;
      case Phase::serve:
        for (int visited = 0; visited < served_ && open_ > 0; ++visited) {
          const int i = next_;
          next_ = next_ + 1 == served_ ? 0 : next_ + 1;
          if (visit(fabric, pipeline(i))) return Progress::moved;
        }
        if (open_ > 0) return Progress::idle;
        fabric.finish();
        phase_ = index_ == 0 ? Phase::leave : Phase::left;
        return Progress::moved;
      case Phase::leave:
        // The others' multicasts into this rank's memory, and their reads of it, end before it
        // leaves; one group per rank waits for them, for all.
        if (!fabric.finished(call_.groups_finished)) return Progress::idle;
        phase_ = Phase::left;
        return Progress::moved;
      case Phase::left:
        break;
    }
    return Progress::finished;
  }

  // The first thing that is waited for, after step() returned idle.
  DMUON_HD Stuck stuck() const {
    if (phase_ == Phase::leave) return {Wait::exit, -1, -1, 0};
    for (int i = 0; i < served_; ++i) {
      const Pipeline& p = pipeline(i);
      const Cursor cursor = cursors_[cursor_of(p)];
      const Route route = Operator::route(call_.channel, p, call_.plan.star != 0);
      if (Operator::complete(route, cursor)) continue;
      return stuck_at(p, route, cursor);
    }
    return {Wait::none, -1, -1, 0};
  }

 private:
  enum class Phase : int32_t { enter, serve, leave, left };

  DMUON_HD const Pipeline& pipeline(int i) const {
    return call_.plan.pipelines[index_ + i * call_.plan.groups];
  }

  DMUON_HD int cursor_of(const Pipeline& p) const {
    return call_.channel.ring(p.queue, p.lane, call_.plan.star != 0);
  }

  DMUON_HD void begin(Fabric& fabric, const Pipeline& p) {
    Cursor cursor = cursors_[cursor_of(p)];
    cursor.end += p.chunks;
    fabric.keep(&cursors_[cursor_of(p)], cursor);
  }

  DMUON_HD bool visit(Fabric& fabric, const Pipeline& p) {
    Cursor cursor = cursors_[cursor_of(p)];
    const Route route = Operator::route(call_.channel, p, call_.plan.star != 0);
    if (Operator::complete(route, cursor)) return false;
    const uint64_t ready = cursor.ready;
    const bool moved = Operator::step(fabric, call_, p, route, entered_, cursor);
    if (!moved && cursor.ready == ready) return false;
    if (Operator::complete(route, cursor)) --open_;
    fabric.keep(&cursors_[cursor_of(p)], cursor);
    return true;
  }

  DMUON_HD Stuck stuck_at(const Pipeline& p, const Route& route, const Cursor& cursor) const {
    const Channel& channel = call_.channel;
    const uint64_t start = cursor.end - p.chunks;
    const auto chunk = [&](uint64_t sequence) { return p.lane + (sequence - start) * p.stride; };
    const uint64_t passed = cursor.ready > cursor.done ? cursor.ready : cursor.done;
    if (route.targets > 0 && cursor.sent < passed * route.targets) {
      return {Wait::acknowledgement, p.queue, route.target(channel, cursor.sent % route.targets),
              chunk(cursor.sent / route.targets)};
    }
    if (entered_.missing() < channel.rails) {
      return {Wait::entry, p.queue, entered_.missing(), chunk(cursor.done)};
    }
    if (route.upstream >= 0 || (route.star && route.last)) {
      return {Wait::arrival, p.queue, route.upstream, chunk(cursor.done)};
    }
    return {Wait::put, p.queue, route.target(channel, 0), chunk(cursor.done)};
  }

  const Call& call_;
  int index_;
  Cursor* cursors_;
  Entered entered_;
  int served_ = 0;
  int open_ = 0;  // pipelines that are not complete
  int next_ = 0;
  Phase phase_ = Phase::enter;
};

}  // namespace dmuon
