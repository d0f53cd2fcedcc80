// How a run of the `sim` fabric and another thread that waits for it see each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace dmuon::sim {

// Belongs to the waiting thread, which lays it out as three words of 8 bytes, all 0 at first.
struct Watch {
  std::atomic<uint64_t> stop;  // not 0: give the run up
  std::atomic<uint64_t> done;  // of `all`, of the present schedule
  std::atomic<uint64_t> all;   // 0: not known yet
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Watch) == 24);

// The run was given up.
class Stopped : public std::runtime_error {
 public:
  Stopped() : std::runtime_error("stopped") {}
};

// Counts what a run has done.
class Watcher {
 public:
  // watch: may be null.
  explicit Watcher(Watch* watch) : watch_(watch) {}

  void begin(uint64_t all) {
    if (watch_) watch_->all = all;
  }
  void add() { ++done_; }
  // Of the event loop, before each event. Raises Stopped.
  void look() {
    if (watch_ && ++looks_ % kEvents == 0) tell();
  }
  // Raises Stopped.
  void tell() {
    if (!watch_) return;
    watch_->done = done_;
    if (watch_->stop != 0) throw Stopped();
  }

 private:
  // Some milliseconds of work.
  static constexpr uint64_t kEvents = 4096;

  Watch* watch_;
  uint64_t done_ = 0;
  uint64_t looks_ = 0;
};

}  // namespace dmuon::sim
