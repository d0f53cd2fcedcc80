// Where this node stands on the way of one pipeline: whom it hears from and whom it sends to.
#pragma once

#include "channel.h"
#include "plan.h"

namespace dmuon {

// Progress of one pipeline on this rank, in chunks of its ring, over all calls. Kept in memory of
// the channel between calls: 0 at first.
struct Cursor {
  uint64_t end;    // chunks of all calls up to and with the present one
  uint64_t ready;  // chunks that are in the ring: filled here, or arrived
  uint64_t done;   // chunks whose work inside the node is done: multicast, or reduced
  uint64_t sent;   // puts issued: chunks x targets
  uint64_t freed;  // slots given back upstream
};

// What a pipeline that makes no progress waits for, for the error of a bounded wait.
enum class Wait : int32_t {
  none = 0,
  entry = 1,
  arrival = 2,
  acknowledgement = 3,
  put = 4,
  exit = 5,
  release = 6,  // publish: a task of this rank is not released
  flag = 7,     // publish: whoever reads the copies waits for a task
};

struct Route {
  int32_t queue;
  int32_t ring;       // filled here or by upstream
  int32_t upstream;   // node that puts into the ring; -1 where this rank fills it
  int32_t targets;    // nodes that each chunk is put to
  int32_t first;      // the first of them; the others follow in node order
  int32_t ack_target; // this node's number among the upstream's targets
  bool last;          // reduce: this node owns the queue
  bool star;

  DMUON_HD int target(const Channel& channel, uint64_t index) const {
    return modulo(first + static_cast<int>(index), channel.nodes);
  }
};

// A gather's data goes from the owner's node s along s + 1, s + 2, ...; on the star path from s to
// all others at once.
DMUON_HD inline Route gather_route(const Channel& channel, const Pipeline& pipeline, bool star) {
  Route route{};
  const int hops = modulo(channel.node - pipeline.queue, channel.nodes);
  route.queue = pipeline.queue;
  route.star = star;
  route.ring = channel.ring(pipeline.queue, pipeline.lane, star);
  route.first = modulo(channel.node + 1, channel.nodes);
  if (star) {
    route.upstream = hops == 0 ? -1 : pipeline.queue;
    route.targets = hops == 0 ? channel.nodes - 1 : 0;
    route.ack_target = hops - 1;
  } else {
    route.upstream = hops == 0 ? -1 : modulo(channel.node - 1, channel.nodes);
    // The chain ends one node before the source.
    route.targets = hops == channel.nodes - 1 ? 0 : 1;
    route.ack_target = 0;
  }
  route.last = route.targets == 0;
  return route;
}

// A reduction's sum starts at owner node + 1 and ends at the owner's node; on the star path every
// node sends its own sum to the owner's.
DMUON_HD inline Route reduce_route(const Channel& channel, const Pipeline& pipeline, bool star) {
  Route route{};
  const int hops = modulo(channel.node - pipeline.queue - 1, channel.nodes);
  route.queue = pipeline.queue;
  route.star = star;
  route.ring = channel.ring(pipeline.queue, pipeline.lane, star);
  route.last = hops == channel.nodes - 1;
  route.targets = route.last ? 0 : 1;
  route.first = star ? pipeline.queue : modulo(channel.node + 1, channel.nodes);
  route.upstream = star || hops == 0 ? -1 : modulo(channel.node - 1, channel.nodes);
  route.ack_target = 0;
  return route;
}

}  // namespace dmuon
