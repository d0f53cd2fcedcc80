// What a call moves, as seen from one rail: frozen when the group is built (paper, appendix C.2).
//
// The segments that one node owns form that node's queue. On rail k the queue's stream is slice k
// of each of these segments, one after the other; the stream is cut into chunks. A chunk therefore
// may hold parts of several small segments: its pieces.
//
// Plain arrays without pointers into each other, so that a plan can be copied to a device as it is.
#pragma once

#include "types.h"

namespace dmuon {

// A stretch of one segment inside one chunk.
struct Piece {
  uint64_t offset;     // in the group's buffer; a multiple of kAlignment
  uint64_t home;       // in the owner's reduced buffer; a multiple of kAlignment
  uint32_t bytes;      // a multiple of kAlignment: the last piece of a segment covers its padding
  int32_t owner_rail;
};

// The chunks of one queue that one thread group carries at a time, in order: first, first +
// stride, ... of the plan's chunks.
struct Pipeline {
  int32_t queue;   // node that owns the data
  int32_t lane;    // 0 on the star path
  uint32_t first;
  uint32_t stride;
  uint32_t chunks;  // >= 1
};

struct PlanView {
  const Piece* pieces;
  const uint32_t* chunk_pieces;  // chunk c holds pieces chunk_pieces[c] .. chunk_pieces[c + 1]
  const Pipeline* pipelines;
  int32_t pipeline_count;
  int32_t groups;  // thread groups that serve this table; the same on every rank
  int32_t blocks;  // thread blocks that they fill
  int32_t star;    // 1: the source reaches every node directly

  DMUON_HD uint32_t chunk_bytes(uint32_t chunk) const {
    uint32_t bytes = 0;
    for (uint32_t i = chunk_pieces[chunk]; i < chunk_pieces[chunk + 1]; ++i) bytes += pieces[i].bytes;
    return bytes;
  }
};

}  // namespace dmuon
