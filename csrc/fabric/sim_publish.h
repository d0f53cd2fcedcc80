// Publishes under the virtual clock: one rail, several steps, with the loop around them: updates
// that release tasks, calls, gathers that read what arrived, the exchange that ends a step.
#pragma once

#include <cstdint>
#include <vector>

#include "core/table.h"
#include "fabric/sim.h"
#include "fabric/sim_publish_group.h"

namespace dmuon::sim {

struct PublishConfig {
  int32_t nodes;
  int32_t slots;   // tiles on their way; 0: the protocol's own
  int32_t steps;
  int32_t carry;   // 1: move and check bytes
  int32_t unordered;  // 1: a release does not order what was written before it, a broken fabric
  uint32_t tile_bytes;  // 0: the protocol's own
  uint64_t buffer_bytes;
  uint64_t seed;
  double delay_us;  // as in Config
  Costs costs;
};

// tasks: as for PublishPlan, of rail 0. ready_us: when a task's update is done, from the beginning
// of its step; a rank's tasks are done one after the other. Raises TableError, Violation and
// Stopped. watch: or null. The result's links are the NICs'; `us` is from the first launch to the
// last end.
Result run_publish(const PublishConfig& config, const std::vector<Segment>& tasks,
                   const std::vector<double>& ready_us, MakePublishActor make_actor, Watch* watch);

}  // namespace dmuon::sim
