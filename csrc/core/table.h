// Builds and checks the frozen plan of a group from its segments. Host only.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "channel.h"
#include "plan.h"

namespace dmuon {

// The contiguous bytes of one matrix, or small vector, in its group's buffer.
struct Segment {
  uint64_t offset;  // in the group's buffer
  uint64_t home;    // in the owner's reduced buffer; a gather does not use it
  uint64_t bytes;   // 0 is allowed; the bytes up to the next multiple of kAlignment are moved too
  int32_t node;     // of the owner
  int32_t rail;     // of the owner
};

// Bad segments; the message names the segment (of a publish: the task), what is wrong and what is
// accepted.
class TableError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
  TableError(const std::string& text, size_t entry)
      : std::invalid_argument(text), entry(static_cast<int64_t>(entry)) {}

  int64_t entry = -1;  // number of the bad segment; -1: none, or none alone
};

// A channel's fixed sizes for a mesh. Raises TableError for a mesh beyond the limits.
Channel make_channel(Operation operation, int nodes, int rails, int node, int rail,
                     uint32_t chunk_bytes, int slots, uint64_t ring_base);

// What every table must keep: owners in the mesh, aligned places inside the buffers, no overlaps.
void check_table(const Channel& channel, const std::vector<Segment>& segments,
                 uint64_t buffer_bytes, uint64_t home_bytes, uint32_t element_bytes);

// The plan of one rail, with its storage.
class Plan {
 public:
  // buffer_bytes, home_bytes: of the group's buffer and of the owners' reduced buffers.
  Plan(const Channel& channel, const std::vector<Segment>& segments, uint64_t buffer_bytes,
       uint64_t home_bytes, uint32_t element_bytes);

  PlanView view() const;

 private:
  std::vector<Piece> pieces_;
  std::vector<uint32_t> chunk_pieces_;
  std::vector<Pipeline> pipelines_;
  int32_t groups_ = 1;
  bool star_ = false;
};

}  // namespace dmuon
