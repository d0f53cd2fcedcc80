// Where the loopback fabric's ranks run: on the GPU, or on threads where the compiler is no nvcc.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../fabric/loopback.cuh"
#include "common.h"
#if defined(__CUDACC__)
#include "device_memory.h"
#endif

namespace dmuon {

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kBlockThreads, 1)
    loopback_kernel(__grid_constant__ const LoopbackJob job) {
  extern __shared__ __align__(16) char scratch[];
  __shared__ Call own;
  loopback_block(job, static_cast<int>(blockIdx.x), own, scratch);
}

// Runs all blocks at once, or refuses: ranks wait for each other, so each must have a place.
inline void run_blocks(LoopbackJob job) {
  check_cuda(cudaFuncSetAttribute(loopback_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(job.scratch)),
             "shared memory");
  int device = 0, processors = 0, blocks = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, loopback_kernel, kBlockThreads,
                                                           job.scratch),
             "occupancy");
  const int wanted = job.ranks * job.blocks;
  if (wanted > blocks * processors) {
    refuse(std::to_string(job.ranks) + " ranks of " + std::to_string(job.blocks) +
           " blocks: the GPU holds " + std::to_string(blocks * processors) + " blocks at once");
  }
  void* arguments[] = {&job};
  check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(loopback_kernel), wanted,
                                         kBlockThreads, arguments, job.scratch, nullptr),
             "launch");
  check_cuda(cudaDeviceSynchronize(), "kernel");
}

#else

// Few, so that many ranks fit on one processor; odd, so that no work divides evenly among them.
constexpr uint32_t kHostThreads = 3;

class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(uint64_t bytes) : memory_(std::make_unique<Vector[]>(bytes / 16 + 1)) {}

  template <class T>
  T* as(uint64_t offset = 0) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_.get()) + offset);
  }
  void write(uint64_t offset, const void* from, uint64_t bytes) {
    std::memcpy(as<char>(offset), from, bytes);
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const {
    std::memcpy(to, as<char>(offset), bytes);
  }

 private:
  std::unique_ptr<Vector[]> memory_;
};

// What one block's threads share.
struct HostBlock {
  explicit HostBlock(uint64_t scratch) : scratch(scratch / sizeof(Vector) + 1) {
    pthread_barrier_init(&barrier, nullptr, kHostThreads);
  }
  ~HostBlock() { pthread_barrier_destroy(&barrier); }

  pthread_barrier_t barrier;
  uint64_t cells[2];
  Call own;
  std::vector<Vector> scratch;
};

inline void run_blocks(const LoopbackJob& job) {
  std::vector<std::unique_ptr<HostBlock>> blocks;
  std::vector<std::thread> threads;
  for (int i = 0; i < job.ranks * job.blocks; ++i) {
    blocks.push_back(std::make_unique<HostBlock>(job.scratch));
    HostBlock& block = *blocks.back();
    for (uint32_t t = 0; t < kHostThreads; ++t) {
      threads.emplace_back([&job, &block, i, t] {
        host_thread = {t, kHostThreads, &block.barrier, block.cells};
        loopback_block(job, i, block.own, reinterpret_cast<char*>(block.scratch.data()));
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

#endif

}  // namespace dmuon
