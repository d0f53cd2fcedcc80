#include "table.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace dmuon {
namespace {

template <class... Args>
[[noreturn]] void fail(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, format, args...);
  throw TableError(text);
}

// The text begins with the entry's name.
template <class... Args>
[[noreturn]] void fail_at(const char* noun, size_t i, const char* format, Args... args) {
  char text[256];
  const int begin = std::snprintf(text, sizeof text, "%s %zu: ", noun, i);
  std::snprintf(text + begin, sizeof text - begin, format, args...);
  throw TableError(text, i);
}

// What a table calls its entries.
const char* noun_of(const Channel& channel) {
  return channel.operation == Operation::publish ? "task" : "segment";
}

struct Range {
  uint64_t begin, end;
};

// Slice of a segment that a rail moves, relative to the segment's first byte.
Range slice(uint64_t bytes, int rails, int rail) {
  const uint64_t padded = round_up(bytes, kAlignment);
  const uint64_t share = round_up((padded + rails - 1) / rails, kSliceBytes);
  const uint64_t begin = std::min(padded, share * rail);
  return {begin, std::min(padded, begin + share)};
}

void check_place(const char* noun, size_t i, const char* name, uint64_t begin, uint64_t bytes,
                 uint64_t limit) {
  if (begin % kAlignment != 0) {
    fail_at(noun, i, "%s %" PRIu64 " is not a multiple of %" PRIu64 " bytes", name, begin,
            kAlignment);
  }
  // Compared without a sum, which could wrap around.
  const uint64_t padded = bytes > UINT64_MAX - kAlignment ? UINT64_MAX : round_up(bytes, kAlignment);
  if (begin > limit || padded > limit - begin) {
    fail_at(noun, i,
            "%s %" PRIu64 " and %" PRIu64 " bytes end behind the %" PRIu64 " bytes of the buffer",
            name, begin, padded, limit);
  }
}

void check_segments(const Channel& channel, const std::vector<Segment>& segments,
                    uint64_t buffer_bytes, uint64_t home_bytes, uint32_t element_bytes) {
  const char* const noun = noun_of(channel);
  if (segments.size() > kMaxSegments) {
    fail_at(noun, kMaxSegments, "a group holds at most %" PRIu64 " %ss, got %zu", kMaxSegments, noun,
            segments.size());
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    if (s.node < 0 || s.node >= channel.nodes) {
      fail_at(noun, i, "owner node %d, expected 0 to %d", s.node, channel.nodes - 1);
    }
    if (s.rail < 0 || s.rail >= channel.rails) {
      fail_at(noun, i, "owner rail %d, expected 0 to %d", s.rail, channel.rails - 1);
    }
    if (s.bytes % element_bytes != 0) {
      fail_at(noun, i, "%" PRIu64 " bytes are no whole elements of %u bytes", s.bytes,
              element_bytes);
    }
    check_place(noun, i, "offset", s.offset, s.bytes, buffer_bytes);
    if (channel.operation == Operation::reduce_scatter_v) {
      check_place(noun, i, "home", s.home, s.bytes, home_bytes);
    }
  }
}

// `place`: where a segment lies; two segments with the same `owner` must not meet there.
template <class Place, class Owner>
void check_overlaps(const char* noun, const std::vector<Segment>& segments, const char* name,
                    Place place, Owner owner) {
  std::vector<size_t> order;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].bytes > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(owner(segments[a]), place(segments[a])) <
           std::pair(owner(segments[b]), place(segments[b]));
  });
  for (size_t j = 1; j < order.size(); ++j) {
    const Segment& before = segments[order[j - 1]];
    const Segment& s = segments[order[j]];
    const uint64_t end = place(before) + round_up(before.bytes, kAlignment);
    if (owner(before) == owner(s) && place(s) < end) {
      fail_at(noun, order[j],
              "%s %" PRIu64 " lies inside %s %zu, which ends at %" PRIu64 " with its padding", name,
              place(s), noun, order[j - 1], end);
    }
  }
}

uint64_t stream_bytes(const std::vector<Segment>& segments, int rails, int node, int rail) {
  uint64_t total = 0;
  for (const Segment& s : segments) {
    if (s.node != node) continue;
    const Range range = slice(s.bytes, rails, rail);
    total += range.end - range.begin;
  }
  return total;
}

}  // namespace

Channel make_channel(Operation operation, int nodes, int rails, int node, int rail,
                     uint32_t chunk_bytes, int slots, uint64_t ring_base) {
  if (nodes < 1 || nodes > kMaxNodes) fail("%d nodes, expected 1 to %d", nodes, kMaxNodes);
  if (rails < 1 || rails > kMaxRails) fail("%d ranks per node, expected 1 to %d", rails, kMaxRails);
  if (node < 0 || node >= nodes) fail("node %d, expected 0 to %d", node, nodes - 1);
  if (rail < 0 || rail >= rails) fail("rail %d, expected 0 to %d", rail, rails - 1);
  if (chunk_bytes == 0 || chunk_bytes % kAlignment != 0 || chunk_bytes > kMaxChunkBytes) {
    fail("chunks of %u bytes, expected a multiple of %" PRIu64 " up to %u", chunk_bytes,
         kAlignment, kMaxChunkBytes);
  }
  if (slots < 1) fail("%d slots per ring, expected 1 or more", slots);
  // With few nodes several pipelines share a queue, so that all blocks find work. A publish has one
  // block.
  const int lanes = operation == Operation::publish ? 1 : std::max(1, kMaxBlocks / nodes);
  return {operation, nodes, rails, node, rail, lanes, slots, chunk_bytes, ring_base};
}

void check_table(const Channel& channel, const std::vector<Segment>& segments,
                 uint64_t buffer_bytes, uint64_t home_bytes, uint32_t element_bytes) {
  check_segments(channel, segments, buffer_bytes, home_bytes, element_bytes);
  const char* const noun = noun_of(channel);
  check_overlaps(noun, segments, "offset", [](const Segment& s) { return s.offset; },
                 [](const Segment&) { return 0; });
  if (channel.operation == Operation::reduce_scatter_v) {
    check_overlaps(noun, segments, "home", [](const Segment& s) { return s.home; },
                   [&](const Segment& s) { return s.node * channel.rails + s.rail; });
  }
}

Plan::Plan(const Channel& channel, const std::vector<Segment>& segments, uint64_t buffer_bytes,
           uint64_t home_bytes, uint32_t element_bytes) {
  check_table(channel, segments, buffer_bytes, home_bytes, element_bytes);

  // Decisions that all ranks must make alike look at all rails, not at the own one.
  uint64_t longest = 0;
  uint64_t most_chunks = 0;
  std::vector<int> pipelines_of_rail(channel.rails, 0);
  const uint32_t unit = channel.chunk_bytes;
  for (int rail = 0; rail < channel.rails; ++rail) {
    uint64_t chunks = 0;
    for (int node = 0; node < channel.nodes; ++node) {
      const uint64_t bytes = stream_bytes(segments, channel.rails, node, rail);
      longest = std::max(longest, bytes);
      pipelines_of_rail[rail] += static_cast<int>(
          std::min<uint64_t>(channel.lanes, (bytes + unit - 1) / unit));
      chunks += (bytes + unit - 1) / unit;
    }
    most_chunks = std::max(most_chunks, chunks);
  }
  if (most_chunks > kMaxChunks) {
    fail("%" PRIu64 " chunks of %u bytes on a rail, expected at most %" PRIu64
         "; give larger chunks",
         most_chunks, unit, kMaxChunks);
  }
  // Little data: one hop to every node costs the source's link no more than the hops of a chain
  // would cost in latency.
  star_ = channel.has_star() && longest <= unit;
  const int most = *std::max_element(pipelines_of_rail.begin(), pipelines_of_rail.end());
  groups_ = star_ ? 1 : std::clamp(most, 1, kMaxBlocks);

  for (int node = 0; node < channel.nodes; ++node) {
    const auto first = static_cast<uint32_t>(chunk_pieces_.size());
    uint64_t room = 0;  // bytes left in the open chunk
    for (const Segment& s : segments) {
      if (s.node != node) continue;
      Range left = slice(s.bytes, channel.rails, channel.rail);
      while (left.begin < left.end) {
        if (room == 0) {
          chunk_pieces_.push_back(static_cast<uint32_t>(pieces_.size()));
          room = unit;
        }
        const uint64_t bytes = std::min(room, left.end - left.begin);
        pieces_.push_back({s.offset + left.begin, s.home + left.begin,
                           static_cast<uint32_t>(bytes), s.rail});
        left.begin += bytes;
        room -= bytes;
      }
    }
    const auto chunks = static_cast<uint32_t>(chunk_pieces_.size()) - first;
    const uint32_t lanes = star_ ? 1 : channel.lanes;
    for (uint32_t lane = 0; lane < std::min(lanes, chunks); ++lane) {
      pipelines_.push_back({node, static_cast<int32_t>(lane), first + lane, lanes,
                            (chunks - lane + lanes - 1) / lanes});
    }
  }
  chunk_pieces_.push_back(static_cast<uint32_t>(pieces_.size()));
}

PlanView Plan::view() const {
  return {pieces_.data(),
          chunk_pieces_.data(),
          pipelines_.data(),
          static_cast<int32_t>(pipelines_.size()),
          groups_,
          groups_,  // one block per group
          star_ ? 1 : 0};
}

}  // namespace dmuon
