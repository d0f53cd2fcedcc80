// The publish on the cluster's fabric: the persistent kernel, and the small ones that tell it what
// is final and wait for what it brought.
#include "publish.h"

#include "../fabric/gin.cuh"
#include "publish_block.cuh"

namespace dmuon {
namespace {

constexpr int kWaitThreads = 32;

__global__ void __launch_bounds__(kBlockThreads, 1)
    publish_kernel(__grid_constant__ const ncclDevComm communicator,
                   __grid_constant__ const GinChannel gin, __grid_constant__ const PublishCall call,
                   __grid_constant__ const PublishControl control, PublishCursor* cursors,
                   __grid_constant__ const Guard guard) {
  extern __shared__ __align__(16) char scratch[];
  PublishBlockFabric<GinFabric> fabric(control, communicator, gin, call.channel);
  publish_block(fabric, call, cursors, scratch, guard);
}

__global__ void release_kernel(PublishControl control, uint32_t number, uint64_t step,
                               uint64_t count) {
  publish_release(control, number, step, count);
}

__global__ void __launch_bounds__(kWaitThreads, 1)
    wait_kernel(PublishControl control, uint32_t first, uint32_t count, uint64_t step,
                __grid_constant__ const Guard guard) {
  publish_wait(control, first, count, step, thread(), kWaitThreads, guard);
}

}  // namespace

cudaError_t load_publish() {
  const void* const kernels[] = {reinterpret_cast<const void*>(publish_kernel),
                                 reinterpret_cast<const void*>(release_kernel),
                                 reinterpret_cast<const void*>(wait_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

cudaError_t launch_publish(const ncclDevComm& communicator, const GinChannel& gin,
                           const PublishCall& call, const PublishControl& control,
                           PublishCursor* cursors, const Guard& guard, cudaStream_t stream) {
  const uint64_t scratch = call.channel.nodes * sizeof(PublishCursor);
  // More than 48 KiB of dynamic shared memory must be asked for.
  const cudaError_t asked = cudaFuncSetAttribute(
      publish_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(scratch));
  if (asked != cudaSuccess) return asked;
  publish_kernel<<<1, kBlockThreads, scratch, stream>>>(communicator, gin, call, control, cursors,
                                                       guard);
  return cudaGetLastError();
}

cudaError_t launch_release(const PublishControl& control, uint32_t number, uint64_t step,
                           uint64_t count, cudaStream_t stream) {
  release_kernel<<<1, 1, 0, stream>>>(control, number, step, count);
  return cudaGetLastError();
}

cudaError_t launch_wait(const PublishControl& control, uint32_t first, uint32_t count,
                        uint64_t step, const Guard& guard, cudaStream_t stream) {
  wait_kernel<<<1, kWaitThreads, 0, stream>>>(control, first, count, step, guard);
  return cudaGetLastError();
}

}  // namespace dmuon
