// AllGatherV: every rank gets the segments of all owners (paper, sections 5.1 and 5.2).
//
// Rank (r, k) serves slice k. At the owner's node it fetches its slice of the owner's memory into a
// ring slot, puts the slot to the next node and multicasts it to its own; at every other node a
// chunk that arrived in a slot is put on and multicast. Sending needs only the owner to have
// entered the call; the multicast writes into all ranks of the node and needs all of them.
#pragma once

#include "steps.h"

namespace dmuon {

struct AllGatherV {
  DMUON_HD static Route route(const Channel& channel, const Pipeline& pipeline, bool star) {
    return gather_route(channel, pipeline, star);
  }

  DMUON_HD static bool complete(const Route& route, const Cursor& cursor) {
    return cursor.done == cursor.end && cursor.sent == cursor.end * route.targets;
  }

  // Move one chunk by one stage, if any can. Never waits.
  template <class Fabric, class Entered>
  DMUON_HD static bool step(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                            const Route& route, Entered& entered, Cursor& cursor) {
    const Channel& channel = call.channel;
    if (channel.nodes == 1) return step_inside(fabric, call, pipeline, entered, cursor);
    if (route.upstream >= 0 && cursor.ready < cursor.end &&
        has_arrived(fabric, channel, route.ring, cursor.ready)) {
      ++cursor.ready;
    }
    // Downstream nodes wait for the put, nobody outside this node for the multicast.
    if (forward(fabric, call, pipeline, route, cursor.ready, cursor)) return true;
    // Invariant: a rank is written by others only after it has entered; it leaves after this group
    // has finished.
    if (cursor.done < cursor.ready && entered.all(fabric)) {
      multicast(fabric, call, pipeline, cursor);
      ++cursor.done;
      return true;
    }
    if (give_back(fabric, channel, route, cursor)) return true;
    if (route.upstream >= 0) return false;
    return fill(fabric, call, pipeline, route, entered, cursor);
  }

 private:
  // Without other nodes the owner's memory is read once, straight into everyone's.
  template <class Fabric, class Entered>
  DMUON_HD static bool step_inside(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                                   Entered& entered, Cursor& cursor) {
    // Invariant: as in step(); and the owners among them have written what is read.
    if (cursor.done == cursor.end || !entered.all(fabric)) return false;
    const PlanView& plan = call.plan;
    const uint32_t chunk = chunk_of(pipeline, cursor, cursor.done);
    for (uint32_t i = plan.chunk_pieces[chunk]; i < plan.chunk_pieces[chunk + 1]; ++i) {
      const Piece& piece = plan.pieces[i];
      const uint64_t place = call.buffer + piece.offset;
      fabric.multicast(place, piece.owner_rail, place, piece.bytes, piece.owner_rail);
    }
    ++cursor.done;
    return true;
  }

  template <class Fabric>
  DMUON_HD static void multicast(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                                 const Cursor& cursor) {
    const PlanView& plan = call.plan;
    const Channel& channel = call.channel;
    const bool owned_here = pipeline.queue == channel.node;
    const uint32_t chunk = chunk_of(pipeline, cursor, cursor.done);
    uint64_t from = channel.slot_offset(
        channel.ring(pipeline.queue, pipeline.lane, plan.star != 0), cursor.done);
    for (uint32_t i = plan.chunk_pieces[chunk]; i < plan.chunk_pieces[chunk + 1]; ++i) {
      const Piece& piece = plan.pieces[i];
      fabric.multicast(call.buffer + piece.offset, channel.rail, from, piece.bytes,
                       owned_here ? piece.owner_rail : -1);
      from += piece.bytes;
    }
  }

  template <class Fabric, class Entered>
  DMUON_HD static bool fill(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                            const Route& route, Entered& entered, Cursor& cursor) {
    const PlanView& plan = call.plan;
    const Channel& channel = call.channel;
    if (cursor.ready == cursor.end) return false;
    // Invariant: a slot is filled again only after its last chunk was multicast and put.
    if (cursor.ready >= cursor.done + channel.slots) return false;
    if (!slot_is_free(fabric, channel, route, cursor.ready)) return false;
    const uint32_t chunk = chunk_of(pipeline, cursor, cursor.ready);
    // Invariant: an owner's memory is read only after it has entered; it may write there before.
    for (uint32_t i = plan.chunk_pieces[chunk]; i < plan.chunk_pieces[chunk + 1]; ++i) {
      if (!entered.one(fabric, plan.pieces[i].owner_rail)) return false;
    }
    uint64_t to = channel.slot_offset(route.ring, cursor.ready);
    for (uint32_t i = plan.chunk_pieces[chunk]; i < plan.chunk_pieces[chunk + 1]; ++i) {
      const Piece& piece = plan.pieces[i];
      fabric.fetch(to, piece.owner_rail, call.buffer + piece.offset, piece.bytes);
      to += piece.bytes;
    }
    ++cursor.ready;
    return true;
  }
};

}  // namespace dmuon
