// The publish: after the update, every owner's copy goes to the same place at all other nodes
// (paper, section 5.3). One call per step and rail, by one thread group.
//
// The tasks of one source node, in the order in which it releases them, form that source's stream,
// which is cut into tiles; a tile belongs to one task. A stream goes along s + 1, s + 2, ... to the
// node before s. Every node puts a tile from its copy straight into the next node's copy: there is
// no ring and no staging. Among the sources whichever tile is ready is moved.
//
// What callers keep, and the lines below rely on (the step rule): before any rank releases a task
// of step n + 1, every rank's call of step n has ended, and so has all that reads the copies of
// step n. What a rank writes into its own copy before the release needs only that its own call, and
// its own node's reading, are over.
#pragma once

#include "group.h"
#include "steps.h"

namespace dmuon {

// What one source publishes at a time: released as a whole, flagged as a whole.
struct PublishTask {
  uint64_t offset;     // in the buffer; a multiple of kAlignment
  uint64_t bytes;      // a multiple of kAlignment, never 0
  uint32_t first_tile; // in the source's stream
  uint32_t number;     // in the caller's table
};

struct PublishStream {
  uint32_t first;  // of the view's tasks
  uint32_t tasks;
  uint32_t tiles;
};

// Frozen when the table is built. Plain arrays, as a PlanView.
struct PublishView {
  const PublishTask* tasks;      // source by source, in the order of release
  const PublishStream* streams;  // one per node
};

struct PublishCall {
  PublishView plan;
  Channel channel;
  uint64_t buffer;    // window offset of what the tasks lie in, the same on every rank
  uint64_t step;      // 1, 2, ...: of this table
  uint64_t released;  // own tasks of the table's earlier steps: their releases are counted before
};

// Progress of one source's stream on this rank, in tiles over all calls of the channel. Kept
// between calls: 0 at first.
struct PublishCursor {
  uint64_t end;       // tiles of all calls up to and with the present one
  uint64_t ready;     // tiles that are in this rank's copy: released here, or arrived
  uint64_t sent;      // puts issued
  uint64_t acked;     // tiles that the next node is known to have
  uint64_t batches;   // acknowledgements sent upstream
  uint32_t arriving;  // task of tile `ready`, counted in the stream
  uint32_t sending;   // task of tile `sent`
  uint32_t open;      // 1: something of the present call is left to do
};

// An acknowledgement stands for so many tiles. Invariant: at most as many as may be on their way, so
// whoever waits for one has put enough tiles for it to be sent.
DMUON_HD inline uint64_t tiles_per_ack(const Channel& channel) {
  return channel.slots < 4 ? 1 : channel.slots / 4;
}

DMUON_HD inline Route publish_route(const Channel& channel, int source) {
  return gather_route(channel, Pipeline{source, 0, 0, 1, 0}, false);
}

// Drives all streams of one call. Beside the fabric of fabric.h:
//   uint64_t released()       own tasks of the table that are final, over all steps; acquires what
//                             was written before the releases
//   void flag(number, step)   task `number` of step `step` is in this rank's copy; releases what
//                             the group knows to have arrived
template <class Fabric>
class PublishGroup {
 public:
  // cursors: of the channel, one per node.
  DMUON_HD PublishGroup(const PublishCall& call, PublishCursor* cursors)
      : call_(call), cursors_(cursors) {}

  // Moves at most one tile by one stage, never waits.
  DMUON_HD Progress step(Fabric& fabric) {
    const int nodes = call_.channel.nodes;
    if (!begun_) {
      for (int source = 0; source < nodes; ++source) begin(fabric, source);
      begun_ = true;
      return Progress::moved;
    }
    // Invariant: the group stays at no stream that has nothing ready. What a stream waits for lies
    // on its own chain, whose last node waits for nobody: no deadlock.
    for (int visited = 0; visited < nodes && open_ > 0; ++visited) {
      const int source = next_;
      next_ = next_ + 1 == nodes ? 0 : next_ + 1;
      if (visit(fabric, source)) return Progress::moved;
    }
    return open_ > 0 ? Progress::idle : Progress::finished;
  }

  // What is waited for, after step() returned idle; `chunk` is a tile of the stream. Others before
  // this rank's own releases, which may just be slow.
  DMUON_HD Stuck stuck() const {
    Stuck found{Wait::none, -1, -1, 0};
    for (int source = 0; source < call_.channel.nodes; ++source) {
      if (cursors_[source].open == 0) continue;
      const Stuck here = stuck_at(source);
      if (found.wait == Wait::none || found.wait == Wait::release) found = here;
    }
    return found;
  }

 private:
  DMUON_HD const PublishTask& task(const PublishStream& stream, uint32_t index) const {
    return call_.plan.tasks[stream.first + index];
  }
  // Behind the last tile of a task, in the stream.
  DMUON_HD static uint32_t tiles_to(const PublishTask& task, uint32_t tile_bytes) {
    return task.first_tile + static_cast<uint32_t>((task.bytes + tile_bytes - 1) / tile_bytes);
  }

  DMUON_HD void begin(Fabric& fabric, int source) {
    const uint32_t tiles = call_.plan.streams[source].tiles;
    PublishCursor cursor = cursors_[source];
    cursor.end += tiles;
    cursor.arriving = cursor.sending = 0;
    cursor.open = tiles > 0 ? 1 : 0;
    open_ += static_cast<int>(cursor.open);
    fabric.keep(&cursors_[source], cursor);
  }

  DMUON_HD bool visit(Fabric& fabric, int source) {
    PublishCursor cursor = cursors_[source];
    if (cursor.open == 0) return false;
    const Route route = publish_route(call_.channel, source);
    const uint64_t ready = cursor.ready;
    look(fabric, source, route, cursor);
    bool moved = pass_on(fabric, source, route, cursor) || acknowledge(fabric, route, cursor);
    if (!moved && is_complete(fabric, route, cursor)) {
      cursor.open = 0;
      --open_;
      moved = true;
    }
    if (!moved && cursor.ready == ready) return false;
    fabric.keep(&cursors_[source], cursor);
    return true;
  }

  // Learn which tiles are here.
  DMUON_HD void look(Fabric& fabric, int source, const Route& route, PublishCursor& cursor) {
    if (cursor.ready == cursor.end) return;
    const PublishStream& stream = call_.plan.streams[source];
    const uint32_t tile_bytes = call_.channel.chunk_bytes;
    const uint64_t start = cursor.end - stream.tiles;
    if (route.upstream < 0) {
      // Invariant: releases come in the table's order, so their number says which tasks are final.
      const uint64_t released = fabric.released();
      while (cursor.arriving < stream.tasks && call_.released + cursor.arriving < released) {
        cursor.ready = start + tiles_to(task(stream, cursor.arriving), tile_bytes);
        ++cursor.arriving;
      }
      return;
    }
    if (!has_arrived(fabric, call_.channel, route.ring, cursor.ready)) return;
    ++cursor.ready;
    const PublishTask& arriving = task(stream, cursor.arriving);
    if (cursor.ready - start < tiles_to(arriving, tile_bytes)) return;
    // Invariant: every tile's own arrival was seen, so all bytes of the task are here, whatever
    // order they came in; and they are this step's, since the source puts what was released for it.
    fabric.flag(arriving.number, call_.step);
    ++cursor.arriving;
  }

  // Put the next tile to the next node. Its copy may be written: by the step rule nobody there
  // reads the last step's any more, and its own puts from there had ended when its call did.
  DMUON_HD bool pass_on(Fabric& fabric, int source, const Route& route, PublishCursor& cursor) {
    if (route.targets == 0 || cursor.sent >= cursor.ready) return false;
    const Channel& channel = call_.channel;
    // Invariant: an arrival word counts its tiles in order: the one before this was seen there.
    const uint64_t slots = static_cast<uint64_t>(channel.slots);
    if (cursor.acked + slots <= cursor.sent) {
      cursor.acked = fabric.read_signal(channel.ack_signal(route.ring, 0)) * tiles_per_ack(channel);
      if (cursor.acked + slots <= cursor.sent) return false;
    }
    const PublishStream& stream = call_.plan.streams[source];
    const PublishTask& sending = task(stream, cursor.sending);
    const uint64_t start = cursor.end - stream.tiles;
    const auto tile = static_cast<uint32_t>(cursor.sent - start);
    const uint64_t from = static_cast<uint64_t>(tile - sending.first_tile) * channel.chunk_bytes;
    const uint64_t left = sending.bytes - from;
    const uint64_t place = call_.buffer + sending.offset + from;
    fabric.put(route.target(channel, 0), place, place,
               static_cast<uint32_t>(left < channel.chunk_bytes ? left : channel.chunk_bytes),
               channel.arrival_signal(route.ring, cursor.sent),
               channel.put_counter(route.ring, cursor.sent));
    ++cursor.sent;
    if (tile + 1 == tiles_to(sending, channel.chunk_bytes)) ++cursor.sending;
    return true;
  }

  // No memory is overwritten by the next tile of an arrival word, so a tile is acknowledged as soon
  // as it was seen, before it is put on.
  DMUON_HD bool acknowledge(Fabric& fabric, const Route& route, PublishCursor& cursor) {
    if (route.upstream < 0) return false;
    if (cursor.ready < (cursor.batches + 1) * tiles_per_ack(call_.channel)) return false;
    fabric.signal(route.upstream, call_.channel.ack_signal(route.ring, 0));
    ++cursor.batches;
    return true;
  }

  // Invariant: when the call ends no put reads this rank's copy any more, so the next step's update
  // may write the own tasks, and the upstream's puts the others.
  DMUON_HD bool is_complete(Fabric& fabric, const Route& route, const PublishCursor& cursor) const {
    if (cursor.ready < cursor.end) return false;
    if (route.targets == 0) return true;
    if (cursor.sent < cursor.end) return false;
    return fabric.read_counter(call_.channel.put_counter(route.ring, 0)) >= cursor.sent;
  }

  DMUON_HD Stuck stuck_at(int source) const {
    const Channel& channel = call_.channel;
    const PublishCursor& cursor = cursors_[source];
    const Route route = publish_route(channel, source);
    const uint64_t start = cursor.end - call_.plan.streams[source].tiles;
    if (route.targets > 0 && cursor.sent < cursor.ready) {
      return {Wait::acknowledgement, source, route.target(channel, 0), cursor.sent - start};
    }
    if (cursor.ready < cursor.end) {
      const Wait wait = route.upstream < 0 ? Wait::release : Wait::arrival;
      return {wait, source, route.upstream, cursor.ready - start};
    }
    return {Wait::put, source, route.target(channel, 0), cursor.end - start - 1};
  }

  const PublishCall& call_;
  PublishCursor* cursors_;
  int open_ = 0;  // streams that are not complete
  int next_ = 0;
  bool begun_ = false;
};

}  // namespace dmuon
