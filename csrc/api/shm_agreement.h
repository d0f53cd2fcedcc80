// Whether two ranks mean the same call: what they compare of it, and the words if they do not.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "../fabric/shm.h"
#include "common.h"

namespace dmuon {

// FNV-1a.
class Digest {
 public:
  void add(const void* bytes, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      value_ = (value_ ^ static_cast<const unsigned char*>(bytes)[i]) * 0x100000001b3;
    }
  }
  template <class T>
  void add(T value) {
    add(&value, sizeof value);
  }
  // Its higher bits depend on all bytes, its lower ones on few.
  uint64_t bits(int count) const { return value_ >> (64 - count); }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

// A group, as `ShmTag::what` tells it: label, dtype and the rest of its table have bits of their
// own, so that what differs can be named.
constexpr int kNameShift = 32, kDtypeShift = 30;

inline uint64_t name_bits(const std::string& label) {
  Digest digest;
  digest.add(label.data(), label.size());
  return digest.bits(32);
}

inline uint64_t digest_of(Operation operation, const std::string& label, int32_t dtype,
                          const dmuon_segment* segments, uint64_t count, uint64_t buffer_bytes,
                          uint64_t home_bytes) {
  // A gather ignores homes and the dtype, which may then differ.
  const bool reduces = operation == Operation::reduce_scatter_v;
  Digest digest;
  digest.add(buffer_bytes);
  if (reduces) digest.add(home_bytes);
  for (uint64_t i = 0; i < count; ++i) {
    digest.add(segments[i].offset);
    if (reduces) digest.add(segments[i].home);
    digest.add(segments[i].bytes);
    digest.add(segments[i].node);
    digest.add(segments[i].rail);
  }
  const uint64_t kind = reduces ? static_cast<uint64_t>(dtype) & 3 : 0;
  return name_bits(label) << kNameShift | kind << kDtypeShift | digest.bits(kDtypeShift);
}

// Places in units of kAlignment, 32 bits each: exact in windows of up to 64 GiB.
inline ShmTag tag_of(const GroupTable& table, uint64_t digest, uint64_t buffer, uint64_t home) {
  const uint64_t low = table.operation == Operation::reduce_scatter_v ? home / kAlignment : 0;
  return {digest, (buffer / kAlignment) << 32 | (low & UINT32_MAX)};
}

// Labels of the groups that this rank has made, by their bits in a tag.
class GroupNames {
 public:
  void add(const std::string& label) {
    const std::lock_guard<std::mutex> lock(mutex_);
    names_[name_bits(label)] = label;
  }
  std::string of(uint64_t what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = names_.find(what >> kNameShift);
    return found == names_.end() ? "a group that this rank has not made" : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::string> names_;
};

// One line: both ranks, and what they do not agree on.
inline std::string describe(const dmuon_mesh& mesh, const GroupTable& table, uint64_t number,
                            const ShmTag& ours, const ShmDisagreement& found, GroupNames& names) {
  const int rail = mesh.rank % mesh.rails;
  const Span span = span_of(mesh, table.operation);
  const int rank = found.on_rail ? (span.first + found.peer * span.stride) * mesh.rails + rail
                                 : mesh.rank - rail + found.peer;
  const std::string other = "rank " + named(mesh, rank);
  const uint64_t differ = ours.what ^ found.theirs.what;
  const auto place = [](uint64_t units) { return std::to_string(units * kAlignment); };
  std::string what;
  if (differ >> kNameShift != 0) {
    what = "calls " + names.of(found.theirs.what);
  } else if (found.number != number) {
    what = "made it as call " + std::to_string(found.number);
  } else if ((differ >> kDtypeShift & 3) != 0) {
    what = "has made it for another dtype";
  } else if (differ != 0) {
    what = "has made it of other segments or sizes";
  } else if (ours.where >> 32 != found.theirs.where >> 32) {
    what = "has its buffer at byte " + place(found.theirs.where >> 32) + " of the window, not " +
           place(ours.where >> 32);
  } else {
    what = "has its reduced buffer at byte " + place(found.theirs.where & UINT32_MAX) +
           " of the window, not " + place(ours.where & UINT32_MAX);
  }
  return std::string(name_of(table.operation)) + " of " + table.label + ": rank " +
         named(mesh, mesh.rank) + " and " + other + " disagree about call " +
         std::to_string(number) + ": " + other + " " + what +
         "; all ranks make the same calls of an operation in the same order";
}

}  // namespace dmuon
