// A rank's end of the shm fabric: its memory, and the channels' numbers between calls.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../core/publish.h"
#include "../fabric/shm_pool.h"
#include "../fabric/shm_run.h"
#include "shm_agreement.h"

namespace dmuon {

// A call that was begun. One that pauses stays in its lane until it goes on.
class RunningCall {
 public:
  virtual ~RunningCall() = default;
  virtual ShmEnd run(double limit_seconds, int spins, bool pausing) = 0;
  virtual const ShmTag& tag() const = 0;
};

// One operation's channel and the numbers that order its calls.
struct Lane {
  ShmChannel shm;
  uint64_t calls = 0;
  uint64_t groups = 0;
  std::atomic<bool> busy{false};  // a call runs, or has paused
  std::unique_ptr<RunningCall> running;
  dmuon_stuck_report report{0, -1, -1, -1, 0, 0};
  std::string text;  // of the failure; empty: none
};

// Takes a lane for one call, or refuses: calls of one operation have one order.
class LaneUse {
 public:
  LaneUse(Lane& lane, const std::string& what) : lane_(lane) {
    if (lane.busy.exchange(true)) {
      refuse(what + ": called while another call of this operation runs; calls of one operation "
                    "have one order");
    }
  }
  ~LaneUse() {
    if (!kept_) lane_.busy = false;
  }
  // Whoever ends the call frees the lane.
  void keep() { kept_ = true; }
  LaneUse(const LaneUse&) = delete;
  LaneUse& operator=(const LaneUse&) = delete;

 private:
  Lane& lane_;
  bool kept_ = false;
};

}  // namespace dmuon

struct dmuon_communicator {
  dmuon_mesh mesh;
  std::vector<int32_t> ranks;  // mesh.names
  int spins;
  std::unique_ptr<dmuon::ShmPool> pool;
  dmuon_memory memory{};
  dmuon::Lane lanes[dmuon::kChannels];
  std::vector<dmuon::PublishCursor> streams;  // of the publish, one per node
  std::atomic<int> groups{0};                 // and publishes
  dmuon::GroupNames names;
};
