// What a put and a signal cost between two NICs of the `sim` fabric.
#pragma once

#include <algorithm>

#include "fabric/sim.h"
#include "fabric/sim_clock.h"

namespace dmuon::sim {

struct PutTimes {
  Time read;       // the source may be overwritten
  Time landed;     // the bytes are there
  Time signalled;  // the receiver sees the signal
  Time counted;    // the sender sees that its source was read
};

// now: of the event loop; start: of the put. delay(): a random time, 0 or more.
template <class Delay>
PutTimes pass_put(const Costs& costs, Port& out, Port& in, Time now, Time start, uint64_t n,
                  Delay delay) {
  const Time wire = picoseconds(costs.wire_us);
  const Time sent = out.pass(now, start, n, costs.nic_gbs, picoseconds(costs.message_us));
  const Time first = sent - picoseconds(n * 1e-3 / costs.nic_gbs) + wire;
  const Time received = in.pass(now, first, n, costs.nic_gbs);
  PutTimes times;
  times.read = sent + delay();
  times.landed =
      std::max({received, first + picoseconds(n * 1e-3 / costs.message_gbs), times.read}) + delay();
  times.signalled = times.landed + picoseconds(costs.arrive_us) + delay();
  // The source is known to be read when the receiver's NIC has said so.
  times.counted = std::max(times.read, received) + wire + delay();
  return times;
}

// When the receiver sees a signal.
template <class Delay>
Time pass_signal(const Costs& costs, Port& out, Time now, Time start, Delay delay) {
  const Time sent = out.pass(now, start, 0, costs.nic_gbs, picoseconds(costs.message_us));
  return sent + picoseconds(costs.wire_us + costs.arrive_us) + delay();
}

}  // namespace dmuon::sim
