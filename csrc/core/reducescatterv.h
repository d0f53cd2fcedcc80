// ReduceScatterV: the owner of each segment gets its sum over all ranks (paper, sections 5.1, 5.2).
//
// Rank (r, k) serves slice k. Along an owner node's chain each node adds its own ranks' sum to what
// came from upstream, in the slot that it came in, and puts the slot on; the last hop is the owner's
// node and writes the owner's memory. Sums are added in float32, in the order of rails and of the
// chain, and rounded to the payload's type once per node: the result depends on no timing.
#pragma once

#include "steps.h"

namespace dmuon {

struct ReduceScatterV {
  DMUON_HD static Route route(const Channel& channel, const Pipeline& pipeline, bool star) {
    return reduce_route(channel, pipeline, star);
  }

  DMUON_HD static bool complete(const Route& route, const Cursor& cursor) {
    return cursor.done == cursor.end && cursor.sent == cursor.end * route.targets;
  }

  // Move one chunk by one stage, if any can. Never waits.
  template <class Fabric, class Entered>
  DMUON_HD static bool step(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                            const Route& route, Entered& entered, Cursor& cursor) {
    const Channel& channel = call.channel;
    if (forward(fabric, call, pipeline, route, cursor.done, cursor)) return true;
    if (give_back(fabric, channel, route, cursor)) return true;
    // Invariant: the sum reads all ranks of the node, and the last hop writes one of them: each has
    // entered, and leaves after this group has finished.
    if (cursor.done == cursor.end || !entered.all(fabric)) return false;
    const bool from_star = route.last && route.star;
    // Invariant: the star's sum reads what all other nodes have put, each into its own inbox.
    if (from_star ? !all_arrived(fabric, channel, cursor.done)
                  : !slot_is_ready(fabric, channel, route, cursor.done)) {
      return false;
    }
    add(fabric, call, pipeline, route, cursor);
    // Invariant: the inboxes are read, and chunks are added in order, so all earlier slots are free
    // too. A chain's slot is given back by a later step, after its put.
    if (from_star) give_back_all(fabric, channel, route);
    ++cursor.done;
    return true;
  }

 private:
  // Invariant: the sum is written into the slot. Where upstream fills it, that is once its chunk is
  // there, which nothing overwrites before give_back(); elsewhere, once it is free.
  template <class Fabric>
  DMUON_HD static bool slot_is_ready(Fabric& fabric, const Channel& channel, const Route& route,
                                     uint64_t sequence) {
    if (route.upstream >= 0) return has_arrived(fabric, channel, route.ring, sequence);
    // A single node has no slots: its sum goes to the owner.
    return channel.nodes == 1 || slot_is_free(fabric, channel, route, sequence);
  }

  template <class Fabric>
  DMUON_HD static bool all_arrived(Fabric& fabric, const Channel& channel, uint64_t sequence) {
    for (int hop = 1; hop < channel.nodes; ++hop) {
      const int inbox = channel.star_inbox(channel.node, channel.node + hop);
      if (!has_arrived(fabric, channel, inbox, sequence)) return false;
    }
    return true;
  }

  template <class Fabric>
  DMUON_HD static void give_back_all(Fabric& fabric, const Channel& channel, const Route& route) {
    for (int hop = 1; hop < channel.nodes; ++hop) {
      fabric.signal(modulo(channel.node + hop, channel.nodes), channel.ack_signal(route.ring, 0));
    }
  }

  template <class Fabric>
  DMUON_HD static void add(Fabric& fabric, const Call& call, const Pipeline& pipeline,
                           const Route& route, const Cursor& cursor) {
    const PlanView& plan = call.plan;
    const Channel& channel = call.channel;
    const uint32_t chunk = chunk_of(pipeline, cursor, cursor.done);
    const bool from_star = route.last && route.star;
    const int ring = from_star ? channel.star_inbox(channel.node, channel.node + 1) : route.ring;
    uint64_t slot = channel.slot_offset(ring, cursor.done);
    const int partials = from_star ? channel.nodes - 1 : route.upstream >= 0 ? 1 : 0;
    for (uint32_t i = plan.chunk_pieces[chunk]; i < plan.chunk_pieces[chunk + 1]; ++i) {
      const Piece& piece = plan.pieces[i];
      const int rail = route.last ? piece.owner_rail : channel.rail;
      const uint64_t to = route.last ? call.home + piece.home : slot;
      fabric.reduce(rail, to, call.buffer + piece.offset, piece.bytes, call.dtype, slot, partials,
                    channel.ring_stride());
      slot += piece.bytes;
    }
  }
};

}  // namespace dmuon
