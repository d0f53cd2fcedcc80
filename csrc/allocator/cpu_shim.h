// The wrapper around torch's CPU allocator.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <limits>

#include "shim.h"

namespace dmuon::allocator {

// Hands on everything but gradients with a place. Ordinary memory keeps the deleter of the
// allocator that made it, so it may be freed whether the wrapper is installed or not.
class CpuShim final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return allocator::allocate(
        bytes, [] { return c10::Device(c10::DeviceType::CPU); },
        [&] { return inner_->allocate(bytes); });
  }

  // Of ordinary memory. A pool's memory has another context than its address, which `raw_allocate`
  // refuses, so that no raw pointer into a pool exists.
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return inner_->is_simple_data_ptr(data);
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  // Storages remember the wrapper as their allocator: it stays usable after `uninstall`.
  static CpuShim& get() {
    static CpuShim& shim = *new CpuShim;
    return shim;
  }

  void install() {
    c10::Allocator* present = c10::GetCPUAllocator();
    if (present == this) return;
    TORCH_CHECK(!installed_,
                "allocation signatures: another CPU allocator was installed over theirs; install "
                "it before the first runtime");
    inner_ = present;
    installed_ = true;
    // torch keeps the allocator of the highest priority so far, and does not tell which that is.
    for (int priority = 0; c10::GetCPUAllocator() != this; ++priority) {
      TORCH_CHECK(priority <= std::numeric_limits<uint8_t>::max(),
                  "allocation signatures: torch refuses another CPU allocator");
      priority_ = static_cast<uint8_t>(priority);
      c10::SetCPUAllocator(this, priority_);
    }
  }

  void uninstall() {
    // Who was installed later calls this one, and goes on doing so.
    if (c10::GetCPUAllocator() != this) return;
    c10::SetCPUAllocator(inner_, priority_);
    installed_ = false;
  }

 private:
  c10::Allocator* inner_ = nullptr;
  bool installed_ = false;
  uint8_t priority_ = 0;
};

}  // namespace dmuon::allocator
