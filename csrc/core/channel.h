// The resources of one ordered sequence of calls on one rank: rings, signals and counters.
//
// A pipeline is one ring: a ring of slots at each node, filled by the upstream node's puts (at the
// start of its chain: by the rank itself). Chain rings come first, one per queue and lane; then the
// star path's. Every ring has one writer, so both ends use slots in the same sequence and never
// negotiate a position. A publish has one pipeline per source, and no memory for slots: its tiles go
// from copy to copy, and a slot is only an arrival word. All numbers are monotonic over calls and
// never reset: a call neither waits for the last acknowledgement nor drains a ring at its end.
#pragma once

#include "types.h"

namespace dmuon {

struct Channel {
  Operation operation;
  int32_t nodes;
  int32_t rails;
  int32_t node;
  int32_t rail;
  int32_t lanes;  // chain pipelines per queue
  int32_t slots;  // of every ring
  uint32_t chunk_bytes;
  uint64_t ring_base;  // in the window, the same on every rank

  DMUON_HD int chain_rings() const { return nodes > 1 ? nodes * lanes : 0; }
  DMUON_HD bool has_star() const {
    return nodes > 1 && nodes <= kStarNodes && operation != Operation::publish;
  }
  // Gather: one ring per source. Reduce: per owner a ring to send from, then per other node one
  // that receives: a node both sends to an owner and, as an owner, receives from it.
  DMUON_HD int star_rings() const {
    if (!has_star()) return 0;
    return operation == Operation::all_gather_v ? nodes : 2 * nodes - 1;
  }
  DMUON_HD int rings() const { return chain_rings() + star_rings(); }
  DMUON_HD uint64_t ring_bytes() const {
    if (operation == Operation::publish) return 0;
    return static_cast<uint64_t>(rings()) * slots * chunk_bytes;
  }

  // Ring of a pipeline; on the star path of a reduction, the one to send from.
  DMUON_HD int ring(int queue, int lane, bool star) const {
    return star ? chain_rings() + queue : queue * lanes + lane;
  }
  // Ring at `owner` that receives from `peer` on the star path of a reduction. In node order after
  // the owner, so that the slots of one chunk lie at a fixed stride.
  DMUON_HD int star_inbox(int owner, int peer) const {
    return chain_rings() + nodes + modulo(peer - owner - 1, nodes);
  }
  DMUON_HD uint64_t ring_stride() const { return static_cast<uint64_t>(slots) * chunk_bytes; }
  // Where pipelines keep their progress: at their ring, or, without rings, at their lane.
  DMUON_HD int cursors() const { return nodes > 1 ? rings() : lanes; }

  DMUON_HD uint64_t slot_offset(int ring, uint64_t sequence) const {
    return ring_base + (static_cast<uint64_t>(ring) * slots + sequence % slots) * chunk_bytes;
  }
  // How often a slot has been used once chunk `sequence` is in it.
  DMUON_HD uint64_t uses(uint64_t sequence) const { return sequence / slots + 1; }

  // Signals are words at the receiver that remote nodes add to. Arrivals have one word per slot:
  // the word says that this very slot was written, whatever order other puts arrive in, so the
  // cheapest signal, which orders only its own put, is enough.
  DMUON_HD int arrival_signal(int ring, uint64_t sequence) const {
    return ring * slots + static_cast<int>(sequence % slots);
  }
  // Acknowledgements count freed slots, one word per ring and target. They may overtake each
  // other: each is sent after all earlier slots of its ring were freed too. On the star path of a
  // gather only the own ring has targets; of a reduction, each ring has one.
  DMUON_HD int ack_signal(int ring, int target) const {
    const int base = rings() * slots;
    if (ring < chain_rings()) return base + ring;
    const int star = operation == Operation::all_gather_v ? target : ring - chain_rings();
    return base + chain_rings() + star;
  }
  DMUON_HD int signals() const {
    return rings() * slots + chain_rings() + (has_star() ? nodes : 0);
  }

  // Counters are local: puts whose source was read completely. One per slot; of a publish, which
  // asks only whether all puts of a ring have ended, one per ring.
  DMUON_HD int put_counter(int ring, uint64_t sequence) const {
    if (operation == Operation::publish) return ring;
    return ring * slots + static_cast<int>(sequence % slots);
  }
  DMUON_HD int counters() const {
    return operation == Operation::publish ? rings() : rings() * slots;
  }

  // The chain ring that a signal, or a counter, serves; -1: the star path. For fabrics that keep
  // what belongs to one ring together: a put's signal and its counter have the same answer.
  DMUON_HD int chain_ring_of_signal(int signal) const {
    const int arrivals = rings() * slots;
    const int ring = signal < arrivals ? signal / slots : signal - arrivals;
    return ring < chain_rings() ? ring : -1;
  }
  DMUON_HD int chain_ring_of_counter(int counter) const {
    const int ring = operation == Operation::publish ? counter : counter / slots;
    return ring < chain_rings() ? ring : -1;
  }
};

}  // namespace dmuon
