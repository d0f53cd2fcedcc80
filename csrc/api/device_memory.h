// Memory that kernels see and that is given back with its owner. Host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <utility>

#include "common.h"

namespace dmuon {

inline void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    throw SystemError(std::string(what) + ": " + cudaGetErrorString(code));
  }
}

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Of the device; zero.
  explicit DeviceMemory(uint64_t bytes) {
    check_cuda(cudaMalloc(&memory_, bytes), "cudaMalloc");
    check_cuda(cudaMemset(memory_, 0, bytes), "cudaMemset");
  }
  // Of the host, which may read it while kernels run; zero.
  static DeviceMemory of_host(uint64_t bytes) {
    DeviceMemory made;
    made.of_host_ = true;
    check_cuda(cudaHostAlloc(&made.memory_, bytes, cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(made.memory_, 0, bytes);
    return made;
  }
  ~DeviceMemory() {
    if (memory_ == nullptr) return;
    if (of_host_) {
      cudaFreeHost(memory_);
    } else {
      cudaFree(memory_);
    }
  }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(of_host_, other.of_host_);
    return *this;
  }

  template <class T>
  T* as(uint64_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + offset);
  }
  void write(uint64_t offset, const void* from, uint64_t bytes) {
    check_cuda(cudaMemcpy(as<char>(offset), from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const {
    check_cuda(cudaMemcpy(to, as<char>(offset), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  void* memory_ = nullptr;
  bool of_host_ = false;
};

}  // namespace dmuon
