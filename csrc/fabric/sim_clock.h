// Time, chance, links and events of the `sim` fabric.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <vector>

namespace dmuon::sim {

// Picoseconds: at 450 GB/s one 128-byte sector takes 284 of them.
using Time = int64_t;

inline Time picoseconds(double us) { return static_cast<Time>(std::llround(us * 1e6)); }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }

 private:
  uint64_t state_;
};

// One direction of a link: it carries one message at a time, and is never idle while one waits.
//
// A group's step asks for times that are still to come: a chunk of several pieces passes piece by
// piece. The time before such a piece stays free for whoever asks next. So a message takes the
// first time from its start on that is left, in parts if need be, as packets do.
class Port {
 public:
  // Let n bytes pass, from `start` on and `gap` after what was before. Returns when the last one
  // has passed.
  // Invariant: no later message starts before `now`, so what is over by then can be forgotten.
  Time pass(Time now, Time start, uint64_t n, double gbs, Time gap = 0) {
    bytes_ += n;
    while (!busy_.empty() && busy_.front().end <= now) busy_.pop_front();
    const auto first =
        std::lower_bound(busy_.begin(), busy_.end(), start,
                         [](const Stretch& busy, Time time) { return busy.end < time; });
    auto next = first;
    Stretch whole{start, start};
    if (next != busy_.end() && next->begin <= start) whole = *next++;
    Time left = gap + static_cast<Time>(std::llround(n * 1e3 / gbs));
    for (; next != busy_.end() && next->begin - whole.end < left; ++next) {
      left -= next->begin - whole.end;
      whole.end = next->end;
    }
    const Time passed = whole.end + left;
    whole.end = passed;
    if (next != busy_.end() && next->begin == passed) whole.end = next++->end;
    replace(first, next, whole);
    return passed;
  }

  uint64_t bytes() const { return bytes_; }

 private:
  struct Stretch {
    Time begin, end;
  };
  using Place = std::deque<Stretch>::iterator;

  // All from the first stretch to the last is busy now. Each message adds one at most, so there are
  // few to remove per message.
  void replace(Place first, Place last, const Stretch& whole) {
    if (first != last) {
      *first = whole;
      busy_.erase(first + 1, last);
    } else if (whole.begin < whole.end) {
      busy_.insert(first, whole);
    }
  }

  std::deque<Stretch> busy_;  // in order; none touches the next
  uint64_t bytes_ = 0;
};

// Moves things later, for schedules that no cost would produce.
class Delays {
 public:
  // us: usual length of one; 0: there are none.
  Delays(double us, uint64_t seed) : usual_(picoseconds(us)), random_(seed) {}

  bool any() const { return usual_ > 0; }
  Time next() {
    if (usual_ == 0) return 0;
    const Time most = random_.next() % 8 == 0 ? 16 * usual_ : usual_;
    return static_cast<Time>(random_.next()) % (most + 1);
  }
  // What has two outcomes.
  bool toss() { return random_.next() % 2 == 0; }

 private:
  const Time usual_;
  Random random_;
};

// A world's events; what they mean is its own.
template <class Kind>
struct EventOf {
  Time time;
  uint64_t order;  // of its creation, so that equal times have one order
  Kind kind;
  int32_t rank;
  uint32_t what;  // group, word or move

  bool operator>(const EventOf& other) const {
    return time != other.time ? time > other.time : order > other.order;
  }
};

// Those to come, the next one first.
template <class Kind>
class EventsOf {
 public:
  using Event = EventOf<Kind>;

  bool empty() const { return queue_.empty(); }
  void push(Time time, Kind kind, int32_t rank, uint32_t what) {
    queue_.push({time, ++order_, kind, rank, what});
  }
  Event pop() {
    const Event next = queue_.top();
    queue_.pop();
    return next;
  }

 private:
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> queue_;
  uint64_t order_ = 0;
};

}  // namespace dmuon::sim
