// Launches a publish of the cluster's fabric. Host side.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device.h>

#include "../core/publish.h"
#include "../fabric/gin_channel.h"
#include "control.h"

namespace dmuon {

// Loads the kernels. CUDA may wait for running kernels when it loads one at its first launch, and
// the publish kernel runs until the others' have told it what is final.
cudaError_t load_publish();

// Enqueues one call on a stream: one block. cursors: device memory of the channel, one per node,
// zero before the first call. The plan's arrays lie in device memory.
cudaError_t launch_publish(const ncclDevComm& communicator, const GinChannel& gin,
                           const PublishCall& call, const PublishControl& control,
                           PublishCursor* cursors, const Guard& guard, cudaStream_t stream);

// Enqueues a release: task `number` is final for `step`, as the `count`th of all releases.
cudaError_t launch_release(const PublishControl& control, uint32_t number, uint64_t step,
                           uint64_t count, cudaStream_t stream);

// Enqueues a wait for tasks first .. first + count - 1 of `step`: one warp looks at the flags.
cudaError_t launch_wait(const PublishControl& control, uint32_t first, uint32_t count,
                        uint64_t step, const Guard& guard, cudaStream_t stream);

}  // namespace dmuon
