// What torch's allocators ask the table, and what lets the rest of this folder not be asked.
#pragma once

#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <typeinfo>

#include "signatures.h"

namespace dmuon::allocator {

// The number by which a table knows its device.
inline int32_t code_of(c10::Device device) {
  return static_cast<int32_t>(device.type()) << 8 | (device.has_index() ? device.index() : 0);
}

// While one lives, allocations of this thread are ordinary and are not counted.
class Pause {
 public:
  Pause() : before_(paused()) { paused() = true; }
  ~Pause() { paused() = before_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static bool& paused() {
    thread_local bool value = false;
    return value;
  }

 private:
  bool before_;
};

inline Node running_node() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return {};
  const auto& reference = *node;
  return {&reference, reference.sequence_nr(), &typeid(reference)};
}

inline void end_ticket(void* ticket) { Table::end(static_cast<Ticket*>(ticket)); }

// One allocation. device: called only if a scope is open; ordinary: makes ordinary memory.
template <class Device, class Ordinary>
c10::DataPtr allocate(size_t bytes, Device device, Ordinary ordinary) {
  const std::shared_ptr<Table> table = Table::current();
  // No task: an exception has left the scope open, and this is not its backward any more.
  if (table == nullptr || Pause::paused() || torch::autograd::get_current_graph_task_id() == -1) {
    return ordinary();
  }
  const c10::Device where = device();
  if (code_of(where) != table->device()) return ordinary();
  uint64_t record;
  Ticket* ticket = table->claim(bytes, running_node(), &record);
  if (ticket != nullptr) return {ticket->data, ticket, &end_ticket, where};
  c10::DataPtr memory = ordinary();
  table->note(record, memory.get());
  return memory;
}

// Put the wrapper around torch's present CUDA allocator, or take it away; cuda_shim.cpp.
void install_cuda();
void uninstall_cuda();

}  // namespace dmuon::allocator
