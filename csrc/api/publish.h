// What the C functions of a publish share between fabrics: its table, the order of its steps, the
// words for a wait that took too long.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../core/publish_table.h"
#include "common.h"

namespace dmuon {

// What is frozen, checked; and how far the caller's releases and runs are.
class PublishTable {
 public:
  PublishTable(const Channel& channel, const dmuon_mesh& mesh, const char* label,
               const char* const* names, const dmuon_segment* tasks, uint64_t count,
               uint64_t buffer, uint64_t buffer_bytes)
      : mesh_(mesh),
        label_(label),
        names_(names, names + count),
        buffer_(buffer),
        plan_(make_plan(channel, tasks, count, buffer_bytes)) {
    if (buffer % kAlignment != 0 || buffer > mesh.user_bytes ||
        buffer_bytes > mesh.user_bytes - buffer) {
      refuse(where() + "buffer at " + std::to_string(buffer) + " with " +
             std::to_string(buffer_bytes) +
             " bytes, expected a multiple of 16 and an end inside the window's " +
             std::to_string(mesh.user_bytes) + " bytes");
    }
    const PublishStream& own = plan_.streams()[channel.node];
    for (uint32_t i = own.first; i < own.first + own.tasks; ++i) {
      own_.push_back(plan_.tasks()[i].number);
    }
  }

  const PublishPlan& plan() const { return plan_; }
  uint64_t own_tasks() const { return own_.size(); }
  // Whether all own tasks of the steps that were run are released.
  bool is_released() const { return released_ >= steps_ * own_.size(); }
  uint64_t steps() const { return steps_; }

  // The call of the next step, on `channel`.
  PublishCall next(const Channel& channel, uint64_t step) {
    if (step != steps_ + 1) {
      refuse(where() + "step " + std::to_string(step) + ", expected " + std::to_string(steps_ + 1));
    }
    ++steps_;
    return {plan_.view(), channel, buffer_, step, own_.size() * (step - 1)};
  }

  struct Release {
    uint64_t count;  // own tasks released, with this one, over all steps
    uint64_t step;   // that it belongs to
  };
  // ended: last step whose call has ended on this rank.
  Release release(uint64_t task, uint64_t ended) {
    if (task >= plan_.count()) refuse_task(task);
    if (own_.empty() || plan_.source_of(static_cast<uint32_t>(task)) != own_node()) {
      refuse(where() + text_of(static_cast<uint32_t>(task)) + ": released by " +
             rank_of(own_node()) + ", expected its owner, " +
             rank_of(plan_.source_of(static_cast<uint32_t>(task))));
    }
    const uint32_t expected = own_[released_ % own_.size()];
    if (task != expected) {
      refuse(where() + text_of(static_cast<uint32_t>(task)) +
             (task < expected ? ": released again in one step, next is " : ": released before ") +
             text_of(expected) + "; the order is the table's");
    }
    const uint64_t step = released_ / own_.size() + 1;
    // A part of the step rule that this rank sees by itself.
    if (step > ended + 1) {
      refuse(where() + text_of(static_cast<uint32_t>(task)) + ": released for step " +
             std::to_string(step) + " before the publish of step " + std::to_string(ended + 1) +
             " has ended");
    }
    return {++released_, step};
  }

  void check_range(uint64_t first, uint64_t count) const {
    if (first > plan_.count() || count > plan_.count() - first) refuse_task(first + count - 1);
  }

  std::string where() const { return "publish of " + label_ + ": "; }
  // A task, for errors: number, name, owner.
  std::string text_of(uint32_t number) const {
    return "task " + std::to_string(number) + " (" + names_[number] + ")";
  }

  std::string describe_wait(uint32_t number, uint64_t step) const {
    const int source = plan_.source_of(number);
    return where() + rank_of(own_node()) + " waited " + seconds() + " s for " + text_of(number) +
           " of step " + std::to_string(step) + " from " + rank_of(source) + " (source node " +
           std::to_string(source) + ")";
  }

  std::string describe_stuck(const dmuon_stuck_report& stuck) const {
    if (static_cast<Wait>(stuck.wait) == Wait::flag) {
      return describe_wait(static_cast<uint32_t>(stuck.chunk), stuck.number);
    }
    std::string text = where() + rank_of(own_node()) + " waited " + seconds() + " s for ";
    if (stuck.queue < 0) return text + "nothing that can be named";
    const std::string other = stuck.peer < 0 ? "" : rank_of(stuck.peer);
    switch (static_cast<Wait>(stuck.wait)) {
      case Wait::arrival:
        text += "a tile from " + other + " (arrival)";
        break;
      case Wait::acknowledgement:
        text += other + " to take a tile (acknowledgement)";
        break;
      case Wait::put:
        text += "the end of a put to " + other + " (put)";
        break;
      default:
        text += "its own update to release the task (release)";
        break;
    }
    return text + "; " + text_of(plan_.number_of(stuck.queue, stuck.chunk)) + " of source node " +
           std::to_string(stuck.queue) + ", tile " + std::to_string(stuck.chunk) + ", step " +
           std::to_string(stuck.number);
  }

 private:
  PublishPlan make_plan(const Channel& channel, const dmuon_segment* tasks, uint64_t count,
                        uint64_t buffer_bytes) const {
    std::vector<Segment> table;
    table.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      const dmuon_segment& s = tasks[i];
      table.push_back({s.offset, 0, s.bytes, s.node, s.rail});
    }
    try {
      return PublishPlan(channel, table, buffer_bytes);
    } catch (const TableError& error) {
      const bool named = error.entry >= 0 && static_cast<uint64_t>(error.entry) < count;
      refuse(where() + error.what() + (named ? " (" + names_[error.entry] + ")" : ""));
    }
  }

  int own_node() const {
    const Span span = span_of(mesh_, Operation::publish);
    return (mesh_.rank / mesh_.rails - span.first) / span.stride;
  }
  // The rank of a node that this publish connects, for errors.
  std::string rank_of(int node) const {
    const Span span = span_of(mesh_, Operation::publish);
    const int first = (span.first + node * span.stride) * mesh_.rails;
    return "rank " + named(mesh_, first + mesh_.rank % mesh_.rails);
  }
  std::string seconds() const {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", mesh_.timeout_seconds);
    return text;
  }
  [[noreturn]] void refuse_task(uint64_t task) const {
    refuse(where() + "task " + std::to_string(task) + ", expected 0 to " +
           std::to_string(static_cast<int64_t>(plan_.count()) - 1));
  }

  const dmuon_mesh mesh_;
  const std::string label_;
  const std::vector<std::string> names_;
  const uint64_t buffer_;
  const PublishPlan plan_;
  std::vector<uint32_t> own_;  // numbers of this rank's tasks, in order
  uint64_t steps_ = 0;         // runs so far
  uint64_t released_ = 0;      // own tasks, over all steps
};

}  // namespace dmuon
