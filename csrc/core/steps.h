// Steps that both operators share: passing chunks on, and giving slots back.
#pragma once

#include "call.h"
#include "route.h"

namespace dmuon {

// The chunk of the plan that is number `sequence` of its ring. Invariant: all ranks make the calls
// of a channel in one order, so `end`, which counts the chunks of all calls, gives each rank the
// same one.
DMUON_HD inline uint32_t chunk_of(const Pipeline& pipeline, const Cursor& cursor, uint64_t sequence) {
  const uint64_t start = cursor.end - pipeline.chunks;
  return pipeline.first + static_cast<uint32_t>(sequence - start) * pipeline.stride;
}

// Whether this rank may fill its own slot for chunk `sequence`. Invariant: a slot is overwritten
// only after the puts that read the chunk before it in this slot have ended.
template <class Fabric>
DMUON_HD bool slot_is_free(Fabric& fabric, const Channel& channel, const Route& route,
                           uint64_t sequence) {
  const uint64_t puts = (channel.uses(sequence) - 1) * route.targets;
  return fabric.read_counter(channel.put_counter(route.ring, sequence)) >= puts;
}

// Whether chunk `sequence` of a ring that upstream fills is there. Invariant: a word counts the
// arrivals of its own slot only, so whatever order puts arrive in, it tells of this one.
template <class Fabric>
DMUON_HD bool has_arrived(Fabric& fabric, const Channel& channel, int ring, uint64_t sequence) {
  return fabric.read_signal(channel.arrival_signal(ring, sequence)) >= channel.uses(sequence);
}

// Put the next chunk among the first `available` to its next target, if that has a slot for it.
template <class Fabric>
DMUON_HD bool forward(Fabric& fabric, const Call& call, const Pipeline& pipeline, const Route& route,
                      uint64_t available, Cursor& cursor) {
  const Channel& channel = call.channel;
  if (route.targets == 0 || cursor.sent >= available * route.targets) return false;
  const uint64_t sequence = cursor.sent / route.targets;
  const uint64_t index = cursor.sent % route.targets;
  const int target = route.target(channel, index);
  // Invariant: a slot is written only after its receiver gave back the chunk that was in it before.
  // Acknowledgements may overtake each other: each was sent after all earlier slots of the ring were
  // free too, so their number tells which are.
  const int ack = channel.ack_signal(route.ring, static_cast<int>(index));
  if (fabric.read_signal(ack) + channel.slots <= sequence) return false;
  const bool to_inbox = route.star && channel.operation == Operation::reduce_scatter_v;
  // Invariant: this rank is the only writer of that ring, so both ends give the chunk one number.
  const int there = to_inbox ? channel.star_inbox(route.queue, channel.node) : route.ring;
  fabric.put(target, channel.slot_offset(there, sequence), channel.slot_offset(route.ring, sequence),
             call.plan.chunk_bytes(chunk_of(pipeline, cursor, sequence)),
             channel.arrival_signal(there, sequence), channel.put_counter(route.ring, sequence));
  ++cursor.sent;
  return true;
}

// Give the oldest slot back upstream once its work and its put have ended. The put's end may come
// after the call; the slot is then given back in the next call that uses the ring. Invariant: all
// counts go on from call to call, so nothing needs to be settled at a call's end.
template <class Fabric>
DMUON_HD bool give_back(Fabric& fabric, const Channel& channel, const Route& route, Cursor& cursor) {
  if (route.upstream < 0 || cursor.freed >= cursor.done) return false;
  if (route.targets > 0) {
    // Invariant: upstream may overwrite the slot only after the put that reads it has read it.
    // Before that put is made the counter is lower too.
    const int counter = channel.put_counter(route.ring, cursor.freed);
    if (fabric.read_counter(counter) < channel.uses(cursor.freed)) return false;
  }
  fabric.signal(route.upstream, channel.ack_signal(route.ring, route.ack_target));
  ++cursor.freed;
  return true;
}

}  // namespace dmuon
