// What the C functions of dmuon.h share between fabrics: error text, argument checks, the words for
// a call that stood still.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "../core/group.h"
#include "../core/table.h"
#include "dmuon.h"

namespace dmuon {

// Operations that groups are made for, and channels of a communicator: the publish has its own.
constexpr int kOperations = 2;
constexpr int kChannels = 3;

inline const char* name_of(Operation operation) {
  if (operation == Operation::publish) return "publish";
  return operation == Operation::all_gather_v ? "all_gather_v" : "reduce_scatter_v";
}

inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

inline int fail(int code, std::string text) {
  last_error() = std::move(text);
  return code;
}

// The operating system, CUDA or NCCL refused.
class SystemError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void refuse(const std::string& text) { throw TableError(text); }

// Runs `work`, which may throw; no exception passes a C function.
template <class Work>
int guarded(Work work) {
  try {
    return work();
  } catch (const TableError& error) {
    return fail(DMUON_BAD_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return fail(DMUON_SYSTEM, error.what());
  }
}

inline void check_mesh(const dmuon_mesh& mesh) {
  const auto check = [](bool right, const char* name, long long value, const char* expected) {
    if (right) return;
    refuse(std::string(name) + " is " + std::to_string(value) + ", expected " + expected);
  };
  check(mesh.nodes >= 1 && mesh.nodes <= kMaxNodes, "nodes", mesh.nodes, "1 to 1024");
  check(mesh.rails >= 1 && mesh.rails <= kMaxRails, "ranks per node", mesh.rails, "1 to 72");
  check(mesh.gather_nodes >= 1 && mesh.nodes % mesh.gather_nodes == 0, "nodes of a gather",
        mesh.gather_nodes, "a divisor of the number of nodes");
  check(mesh.rank >= 0 && mesh.rank < mesh.nodes * mesh.rails, "rank", mesh.rank,
        "0 to nodes * ranks per node - 1");
  check(mesh.user_bytes <= uint64_t{1} << 46, "window bytes",
        static_cast<long long>(mesh.user_bytes), "at most 2^46");
  check(mesh.slots >= 1 && mesh.slots <= 1024, "slots", mesh.slots, "1 to 1024");
  if (!(mesh.timeout_seconds > 0 && mesh.timeout_seconds < 1e9)) {
    refuse("timeout of " + std::to_string(mesh.timeout_seconds) + " s, expected a positive number");
  }
}

// A rank as its job knows it, for errors.
inline std::string named(const dmuon_mesh& mesh, int rank) {
  return std::to_string(mesh.names == nullptr ? rank : mesh.names[rank]);
}

// Makes the names of a checked mesh the communicator's own.
inline void keep_names(dmuon_mesh& mesh, std::vector<int32_t>& kept) {
  if (mesh.names == nullptr) return;
  kept.assign(mesh.names, mesh.names + mesh.nodes * mesh.rails);
  mesh.names = kept.data();
}

// The nodes of the mesh that a channel connects: first, first + stride, ...
struct Span {
  int first;
  int stride;
  int count;
};

// A gather's nodes are those of its row; a publish's those at the same place of all rows.
inline Span span_of(const dmuon_mesh& mesh, Operation operation) {
  const int node = mesh.rank / mesh.rails;
  const int place = node % mesh.gather_nodes;
  switch (operation) {
    case Operation::all_gather_v:
      return {node - place, 1, mesh.gather_nodes};
    case Operation::publish:
      return {place, mesh.gather_nodes, mesh.nodes / mesh.gather_nodes};
    case Operation::reduce_scatter_v:
      break;
  }
  return {0, 1, mesh.nodes};
}

inline Channel channel_of(const dmuon_mesh& mesh, Operation operation, uint64_t ring_base) {
  const Span span = span_of(mesh, operation);
  return make_channel(operation, span.count, mesh.rails,
                      (mesh.rank / mesh.rails - span.first) / span.stride, mesh.rank % mesh.rails,
                      mesh.chunk_bytes,
                      operation == Operation::publish ? kPublishTiles : mesh.slots, ring_base);
}

constexpr uint64_t kPageBytes = 4096;

// Deals a window out: user memory first, then what is taken, each part at a page. The same on every
// rank, so that an offset means the same place on all.
class WindowLayout {
 public:
  explicit WindowLayout(const dmuon_mesh& mesh)
      : mesh_(mesh), bytes_(round_up(mesh.user_bytes, kPageBytes)) {}

  // A channel, with its rings.
  Channel channel(Operation operation) {
    const Channel made = channel_of(mesh_, operation, bytes_);
    take(made.ring_bytes());
    ring_bytes_ += made.ring_bytes();
    return made;
  }
  // Returns where the part begins.
  uint64_t take(uint64_t bytes) {
    const uint64_t begin = bytes_;
    bytes_ = round_up(bytes_ + bytes, kPageBytes);
    return begin;
  }
  uint64_t bytes() const { return bytes_; }
  // What the window takes, with `beside` bytes of words that do not lie in it; `user` is not known
  // yet.
  dmuon_memory memory(uint64_t beside) const {
    return {nullptr, mesh_.user_bytes, ring_bytes_,
            bytes_ - mesh_.user_bytes - ring_bytes_ + beside};
  }

 private:
  const dmuon_mesh& mesh_;
  uint64_t bytes_;
  uint64_t ring_bytes_ = 0;
};

// What is frozen in a group, checked.
struct GroupTable {
  Operation operation;
  Dtype dtype;
  uint64_t buffer_bytes;
  uint64_t home_bytes;
  bool in_place;  // each segment's home is its offset
  std::string label;
  Plan plan;
};

// Before anything is built of a table: what lies outside the window would be refused at each call.
inline void check_inside(const dmuon_mesh& mesh, const dmuon_segment* segments, uint64_t count,
                         bool homes) {
  const auto check = [&](uint64_t i, const char* name, uint64_t begin, uint64_t bytes) {
    if (begin <= mesh.user_bytes && bytes <= mesh.user_bytes - begin) return;
    throw TableError("segment " + std::to_string(i) + ": " + name + " " + std::to_string(begin) +
                         " and " + std::to_string(bytes) + " bytes end behind the window's " +
                         std::to_string(mesh.user_bytes) + " bytes",
                     i);
  };
  for (uint64_t i = 0; i < count; ++i) {
    check(i, "offset", segments[i].offset, segments[i].bytes);
    if (homes) check(i, "home", segments[i].home, segments[i].bytes);
  }
}

inline GroupTable make_table(const Channel& channel, const dmuon_mesh& mesh, const char* label,
                             int32_t dtype, const dmuon_segment* segments, uint64_t count,
                             uint64_t buffer_bytes, uint64_t home_bytes) {
  const bool gather = channel.operation == Operation::all_gather_v;
  if (!gather && dtype != DMUON_BFLOAT16 && dtype != DMUON_FLOAT32) {
    refuse("dtype " + std::to_string(dtype) + ", expected 0 (bfloat16) or 1 (float32)");
  }
  bool in_place = true;
  std::vector<Segment> table;
  table.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const dmuon_segment& s = segments[i];
    table.push_back({s.offset, s.home, s.bytes, s.node, s.rail});
    in_place &= s.bytes == 0 || s.home == s.offset;
  }
  const uint32_t element = gather ? 1 : dtype == DMUON_BFLOAT16 ? 2 : 4;
  try {
    check_inside(mesh, segments, count, !gather);
    return {channel.operation, static_cast<Dtype>(dtype), buffer_bytes, home_bytes, in_place, label,
            Plan(channel, table, buffer_bytes, home_bytes, element)};
  } catch (const TableError& error) {
    refuse(std::string(name_of(channel.operation)) + " of " + label + ": " + error.what());
  }
}

inline void check_operation(int32_t operation) {
  if (operation < 0 || operation >= kOperations) {
    refuse("operation " + std::to_string(operation) + ", expected 0 or 1");
  }
}

inline void check_channel(int32_t operation) {
  if (operation < 0 || operation >= kChannels) {
    refuse("operation " + std::to_string(operation) + ", expected 0 to 2");
  }
}

inline void check_place(const GroupTable& table, const dmuon_mesh& mesh, const char* name,
                        uint64_t place, uint64_t bytes) {
  if (place % kAlignment != 0 || place > mesh.user_bytes || bytes > mesh.user_bytes - place) {
    refuse(std::string(name_of(table.operation)) + " of " + table.label + ": " + name + " at " +
           std::to_string(place) + " with " + std::to_string(bytes) +
           " bytes, expected a multiple of 16 and an end inside the window's " +
           std::to_string(mesh.user_bytes) + " bytes");
  }
}

inline void check_places(const GroupTable& table, const dmuon_mesh& mesh, uint64_t buffer,
                         uint64_t home) {
  check_place(table, mesh, "buffer", buffer, table.buffer_bytes);
  if (table.operation != Operation::reduce_scatter_v) return;
  check_place(table, mesh, "reduced buffer", home, table.home_bytes);
  // Invariant: a sum is written while other sums are still read: at the same bytes only if they are
  // its own addends.
  const bool apart = home >= buffer + table.buffer_bytes || buffer >= home + table.home_bytes;
  if (apart || (home == buffer && table.in_place)) return;
  refuse(std::string(name_of(table.operation)) + " of " + table.label + ": the reduced buffer, " +
         std::to_string(table.home_bytes) + " bytes at " + std::to_string(home) +
         ", overlaps the buffer, " + std::to_string(table.buffer_bytes) + " bytes at " +
         std::to_string(buffer) +
         "; they may be one only if each segment's home is its offset");
}

// One line that says where a call of `mesh.rank` stood still.
inline std::string describe(const dmuon_mesh& mesh, Operation operation, const std::string& label,
                            const dmuon_stuck_report& stuck) {
  const int rail = mesh.rank % mesh.rails;
  const auto rank = [&](int node, int peer_rail) {
    const Span span = span_of(mesh, operation);
    return "rank " + named(mesh, (span.first + node * span.stride) * mesh.rails + peer_rail);
  };
  const auto rank_here = [&](int peer_rail) {
    return "rank " + named(mesh, mesh.rank - rail + peer_rail);
  };
  const std::string other = stuck.peer < 0 ? "another node" : rank(stuck.peer, rail);
  std::string what;
  switch (static_cast<Wait>(stuck.wait)) {
    case Wait::entry:
      what = rank_here(stuck.peer) + " to enter the call (entry)";
      break;
    case Wait::arrival:
      what = "a chunk from " + other + " (arrival)";
      break;
    case Wait::acknowledgement:
      what = other + " to give a slot back (acknowledgement)";
      break;
    case Wait::put:
      what = "the end of a put to " + other + " (put)";
      break;
    case Wait::exit:
      what = (stuck.peer < 0 ? std::string("its node") : rank_here(stuck.peer)) +
             " to finish the call (exit)";
      break;
    case Wait::release:
    case Wait::flag:
    case Wait::none:
      what = "nothing that can be named";
      break;
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f", mesh.timeout_seconds);
  std::string text = std::string(name_of(operation)) + " of " + label + ": rank " +
                     named(mesh, mesh.rank) + " waited " + seconds + " s for " + what;
  if (stuck.queue >= 0) {
    text += "; queue of owner node " + std::to_string(stuck.queue) + ", chunk " +
            std::to_string(stuck.chunk);
  }
  return text + ", thread group " + std::to_string(stuck.group) + ", call " +
         std::to_string(stuck.number);
}

}  // namespace dmuon
