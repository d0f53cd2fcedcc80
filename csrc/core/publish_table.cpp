#include "publish_table.h"

#include <string>

namespace dmuon {
namespace {

[[noreturn]] void fail_at(size_t i, const std::string& text) {
  throw TableError("task " + std::to_string(i) + ": " + text, i);
}

}  // namespace

PublishPlan::PublishPlan(const Channel& channel, const std::vector<Segment>& tasks,
                         uint64_t buffer_bytes) {
  check_table(channel, tasks, buffer_bytes, 0, 1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].rail != channel.rail) {
      fail_at(i, "owner rail " + std::to_string(tasks[i].rail) + ", expected this rank's, " +
                     std::to_string(channel.rail));
    }
    if (tasks[i].bytes == 0) fail_at(i, "0 bytes, expected 1 or more");
    sources_.push_back(tasks[i].node);
  }
  for (int source = 0; source < channel.nodes; ++source) {
    PublishStream stream{count(), 0, 0};
    uint64_t tiles = 0;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].node != source) continue;
      const uint64_t bytes = round_up(tasks[i].bytes, kAlignment);
      tasks_.push_back(
          {tasks[i].offset, bytes, static_cast<uint32_t>(tiles), static_cast<uint32_t>(i)});
      ++stream.tasks;
      tiles += (bytes + channel.chunk_bytes - 1) / channel.chunk_bytes;
      if (tiles > kMaxChunks) {
        fail_at(i, "source node " + std::to_string(source) + " has more than " +
                       std::to_string(kMaxChunks) + " tiles of " +
                       std::to_string(channel.chunk_bytes) + " bytes; give larger chunks");
      }
    }
    stream.tiles = static_cast<uint32_t>(tiles);
    streams_.push_back(stream);
  }
}

uint32_t PublishPlan::number_of(int source, uint64_t tile) const {
  const PublishStream& stream = streams_[source];
  uint32_t found = stream.first;
  for (uint32_t i = stream.first; i < stream.first + stream.tasks; ++i) {
    if (tasks_[i].first_tile <= tile) found = i;
  }
  return tasks_[found].number;
}

}  // namespace dmuon
