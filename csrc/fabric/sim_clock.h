// Time, chance, links and events of the `sim` fabric.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

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

// One direction of a link: bytes pass one after the other.
struct Port {
  Time free = 0;
  uint64_t bytes = 0;

  Time pass(Time now, uint64_t n, double gbs, Time gap = 0) {
    free = std::max(now, free) + gap + static_cast<Time>(std::llround(n * 1e3 / gbs));
    bytes += n;
    return free;
  }
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

}  // namespace dmuon::sim
