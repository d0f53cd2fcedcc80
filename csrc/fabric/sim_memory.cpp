#include "fabric/sim_memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "core/bfloat16.h"
#include "fabric/sim.h"

namespace dmuon::sim {
namespace {

template <class... Args>
[[noreturn]] void violated(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, format, args...);
  throw Violation(text);
}

uint64_t mix(uint64_t x) {  // a bijection whose bits all depend on all bits
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

bool meet(const Memory::Range& a, const Memory::Range& b) {
  return a.rank == b.rank && a.begin < b.end && b.begin < a.end;
}

float decode(const uint8_t* at, Dtype dtype) {
  uint32_t bits = 0;
  if (dtype == Dtype::float32) {
    std::memcpy(&bits, at, 4);
  } else {
    uint16_t high;
    std::memcpy(&high, at, 2);
    bits = static_cast<uint32_t>(high) << 16;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest even. Inputs are finite.
void encode(float value, uint8_t* at, Dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (dtype == Dtype::float32) {
    std::memcpy(at, &bits, 4);
  } else {
    round_to_bfloat16(bits);
    const auto high = static_cast<uint16_t>(bits);
    std::memcpy(at, &high, 2);
  }
}

int size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

}  // namespace

Memory::Memory(Operation operation, Dtype dtype, int nodes, int rails, uint64_t buffer_bytes,
               uint64_t home_bytes, uint64_t ring_bytes, uint64_t seed)
    : operation_(operation),
      dtype_(dtype),
      nodes_(nodes),
      rails_(rails),
      buffer_bytes_(buffer_bytes),
      home_bytes_(home_bytes),
      seed_(mix(seed)),
      ranks_(nodes * rails) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    // What is in memory before anything is written must not look like anything that is.
    ranks_[i].window.assign(ring_base() + ring_bytes, static_cast<uint8_t>(0x80 + i));
    ranks_[i].writes.assign(ring_base() / kAlignment, 0);
  }
}


std::vector<uint8_t> Memory::input(int32_t rank, uint64_t number, uint64_t begin,
                                   uint64_t bytes) const {
  std::vector<uint8_t> value(bytes);
  const uint64_t stream = mix(seed_ + number * 4096 + rank);
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = mix(stream + begin + i);
    std::memcpy(&value[i], &word, sizeof word);
  }
  if (operation_ != Operation::reduce_scatter_v) return value;
  // Small whole numbers: any order of adding them is exact, in bfloat16 too.
  const int size = size_of(dtype_);
  for (uint64_t i = 0; i < bytes; i += size) {
    encode(static_cast<float>(value[i] % 15) - 7.0f, &value[i], dtype_);
  }
  return value;
}

std::vector<uint8_t> Memory::expected_sum(uint64_t number, uint64_t offset, uint64_t bytes) const {
  std::vector<float> sums(bytes / size_of(dtype_), 0.0f);
  std::vector<uint8_t> value(bytes);
  for (int32_t rank = 0; rank < nodes_ * rails_; ++rank) {
    const std::vector<uint8_t> part = input(rank, number, offset, bytes);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += decode(&part[i * size_of(dtype_)], dtype_);
  }
  for (size_t i = 0; i < sums.size(); ++i) encode(sums[i], &value[i * size_of(dtype_)], dtype_);
  return value;
}

void Memory::check_inside(const Range& range, uint64_t number, const char* what) const {
  if (operation_ == Operation::publish) return;  // nobody enters: expect() looks at the bytes
  if (range.begin >= ring_base() || ranks_[range.rank].entered == number) return;
  violated("call %" PRIu64 " %s byte %" PRIu64 " of rank %d, which is in call %" PRIu64
           " (0: in none)",
           number, what, range.begin, range.rank, ranks_[range.rank].entered);
}

uint32_t Memory::start(Move move, bool ordered) {
  if (ordered) {
    const std::vector<uint32_t> open = open_;
    for (const uint32_t index : open) {
      const Move& earlier = moves_[index];
      if (earlier.group != move.group) continue;
      bool meets = meet(earlier.write, move.write);
      for (const Range& read : move.reads) meets = meets || meet(earlier.write, read);
      for (const Range& read : earlier.reads) meets = meets || meet(move.write, read);
      if (meets) finish(index);
    }
  }
  moves_.push_back(std::move(move));
  open_.push_back(static_cast<uint32_t>(moves_.size() - 1));
  return open_.back();
}

void Memory::close(uint32_t index) {
  open_.erase(std::find(open_.begin(), open_.end(), index));
}

std::vector<uint8_t> Memory::value_of(const Move& move) const {
  const uint64_t bytes = move.write.end - move.write.begin;
  for (const Range& read : move.reads) check_inside(read, move.number, "reads");
  if (!move.sum) {
    const uint8_t* from = ranks_[move.reads[0].rank].window.data() + move.reads[0].begin;
    return std::vector<uint8_t>(from, from + bytes);
  }
  const int size = size_of(dtype_);
  std::vector<uint8_t> value(bytes);
  for (uint64_t i = 0; i < bytes; i += size) {
    float sum = 0.0f;
    for (const Range& read : move.reads) {
      sum += decode(ranks_[read.rank].window.data() + read.begin + i, dtype_);
    }
    encode(sum, &value[i], dtype_);
  }
  return value;
}

void Memory::store(const Move& move, uint32_t self) {
  const Range& to = move.write;
  if (move.group >= -1) check_inside(to, move.number, "writes");
  for (const uint32_t index : open_) {
    const Move& other = moves_[index];
    if (index == self || other.captured) continue;
    for (const Range& read : other.reads) {
      if (meet(read, to)) {
        violated("call %" PRIu64 " overwrites byte %" PRIu64 " of rank %d, which call %" PRIu64
                 " has still to read",
                 move.number, to.begin, to.rank, other.number);
      }
    }
  }
  Rank& rank = ranks_[to.rank];
  std::memcpy(rank.window.data() + to.begin, move.bytes.data(), to.end - to.begin);
  if (to.begin >= ring_base() || move.group < -1) return;
  for (uint64_t at = to.begin / kAlignment; at < to.end / kAlignment; ++at) ++rank.writes[at];
}

void Memory::capture(uint32_t index) {
  moves_[index].bytes = value_of(moves_[index]);
  moves_[index].captured = true;
}

void Memory::finish(uint32_t index) {
  if (std::find(open_.begin(), open_.end(), index) == open_.end()) return;
  Move& move = moves_[index];
  if (!move.reads.empty() && !move.captured) capture(index);
  if (move.owner >= 0) {
    const Range& read = move.reads[0];
    check_bytes(read.rank, move.number, move.owner, read.begin, move.bytes, "reads");
  } else {
    store(move, index);
  }
  close(index);
}

void Memory::release(int32_t group) {
  const std::vector<uint32_t> open = open_;
  for (const uint32_t index : open) {
    if (moves_[index].group == group) finish(index);
  }
}

std::vector<uint32_t> Memory::launch(int32_t rank, uint64_t number,
                                     const std::vector<Segment>& segments) {
  std::vector<uint32_t> started;
  for (const Segment& s : segments) {
    if (s.bytes == 0 || (operation_ == Operation::all_gather_v && owner(s) != rank)) continue;
    started.push_back(update(rank, number, s));
  }
  return started;
}

uint32_t Memory::update(int32_t rank, uint64_t number, const Segment& s) {
  const uint64_t padded = round_up(s.bytes, kAlignment);
  Move move;
  move.group = -2 - rank;
  move.number = number;
  move.write = {rank, s.offset, s.offset + padded};
  move.bytes = input(rank, number, s.offset, padded);
  return start(std::move(move), false);
}

void Memory::check_bytes(int32_t rank, uint64_t number, int32_t owner, uint64_t begin,
                         const std::vector<uint8_t>& bytes, const char* what) const {
  if (bytes == input(owner, number, begin, bytes.size())) return;
  violated("step %" PRIu64 ": rank %d %s wrong bytes at %" PRIu64 ", of source %d", number, rank,
           what, begin, owner);
}

void Memory::expect(int32_t rank, uint64_t number, const Segment& task) const {
  const uint8_t* at = ranks_[rank].window.data() + task.offset;
  const std::vector<uint8_t> bytes(at, at + round_up(task.bytes, kAlignment));
  check_bytes(rank, number, owner(task), task.offset, bytes, "flags");
}

uint32_t Memory::gather(int32_t rank, uint64_t number, const Segment& task) {
  Move move;
  move.number = number;
  move.owner = owner(task);
  move.reads.push_back({rank, task.offset, task.offset + round_up(task.bytes, kAlignment)});
  move.write = {rank, 0, 0};
  return start(std::move(move), false);
}

void Memory::end_publish(int32_t index, uint64_t number, const std::vector<Segment>& tasks) {
  Rank& rank = ranks_[index];
  std::vector<uint8_t> wanted(rank.writes.size(), 0);
  for (const Segment& task : tasks) {
    expect(index, number, task);
    const uint64_t end = task.offset + round_up(task.bytes, kAlignment);
    for (uint64_t at = task.offset; at < end; at += kAlignment) {
      wanted[at / kAlignment] = owner(task) == index ? 0 : 1;
    }
  }
  for (size_t at = 0; at < wanted.size(); ++at) {
    if (rank.writes[at] == wanted[at]) continue;
    violated("step %" PRIu64 " wrote byte %zu of rank %d %d times, expected %d", number,
             at * kAlignment, index, rank.writes[at], wanted[at]);
  }
  std::fill(rank.writes.begin(), rank.writes.end(), 0);
}

void Memory::enter(int32_t rank, uint64_t number) {
  ranks_[rank].entered = number;
  std::fill(ranks_[rank].writes.begin(), ranks_[rank].writes.end(), 0);
}

void Memory::leave(int32_t index, const std::vector<Segment>& segments) {
  Rank& rank = ranks_[index];
  const bool gather = operation_ == Operation::all_gather_v;
  std::vector<uint8_t> wanted(rank.writes.size(), 0);
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const bool own = owner(s) == index;
    if (s.bytes == 0 || (!gather && !own)) continue;
    const uint64_t padded = round_up(s.bytes, kAlignment);
    const uint64_t begin = gather ? s.offset : home_base() + s.home;
    const std::vector<uint8_t> right = gather ? input(owner(s), rank.entered, s.offset, padded)
                                              : expected_sum(rank.entered, s.offset, padded);
    for (uint64_t at = begin / kAlignment; at < (begin + padded) / kAlignment; ++at) {
      // The owner has the bytes that it sends: a multicast may write them there or not.
      wanted[at] = gather && own ? std::min<uint8_t>(rank.writes[at], 1) : 1;
    }
    if (std::memcmp(right.data(), rank.window.data() + begin, padded) != 0) {
      violated("rank %d leaves call %" PRIu64 " with wrong bytes in segment %zu", index,
               rank.entered, i);
    }
  }
  for (size_t at = 0; at < wanted.size(); ++at) {
    if (rank.writes[at] == wanted[at]) continue;
    violated("call %" PRIu64 " wrote byte %zu of rank %d %d times, expected %d", rank.entered,
             at * kAlignment, index, rank.writes[at], wanted[at]);
  }
  rank.entered = 0;
  std::fill_n(rank.window.begin(), ring_base(), static_cast<uint8_t>(0x40 + index));
}

void Memory::end() const {
  for (const uint32_t index : open_) {
    if (moves_[index].write.begin < ring_base()) {
      violated("all calls are made, but call %" PRIu64 " still writes byte %" PRIu64 " of rank %d",
               moves_[index].number, moves_[index].write.begin, moves_[index].write.rank);
    }
  }
}

}  // namespace dmuon::sim
