// A rank's end of the shm fabric: its memory, and the channels' numbers between calls.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../core/publish.h"
#include "../fabric/shm.h"
#include "../fabric/shm_pool.h"
#include "common.h"

namespace dmuon {

// One operation's channel and the numbers that order its calls.
struct Lane {
  ShmChannel shm;
  uint64_t calls = 0;
  uint64_t groups = 0;
  std::atomic<bool> busy{false};
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
  ~LaneUse() { lane_.busy = false; }
  LaneUse(const LaneUse&) = delete;
  LaneUse& operator=(const LaneUse&) = delete;

 private:
  Lane& lane_;
};

}  // namespace dmuon

struct dmuon_communicator {
  dmuon_mesh mesh;
  int spins;
  std::unique_ptr<dmuon::ShmPool> pool;
  dmuon::Lane lanes[dmuon::kChannels];
  std::vector<dmuon::PublishCursor> streams;  // of the publish, one per node
  std::atomic<int> groups{0};                 // and publishes
};
