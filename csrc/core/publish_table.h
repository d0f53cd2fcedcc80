// Builds and checks the frozen table of a publish. Host only.
#pragma once

#include <vector>

#include "publish.h"
#include "table.h"

namespace dmuon {

// The tasks of one rail, with their storage.
class PublishPlan {
 public:
  // tasks: `node` is the source, `rail` the channel's; those of one source in the order in which it
  // releases them; at least one byte each. buffer_bytes: of what they lie in.
  // Raises TableError; the message names the task.
  PublishPlan(const Channel& channel, const std::vector<Segment>& tasks, uint64_t buffer_bytes);

  PublishView view() const { return {tasks_.data(), streams_.data()}; }
  const std::vector<PublishTask>& tasks() const { return tasks_; }
  const std::vector<PublishStream>& streams() const { return streams_; }

  // Of the table.
  uint32_t count() const { return static_cast<uint32_t>(tasks_.size()); }
  // Number in the table of the task that holds a tile of a source's stream.
  uint32_t number_of(int source, uint64_t tile) const;
  // Source of a task.
  int source_of(uint32_t number) const { return sources_[number]; }

 private:
  std::vector<PublishTask> tasks_;
  std::vector<PublishStream> streams_;
  std::vector<int32_t> sources_;  // by number
};

}  // namespace dmuon
