// Launches the operators of the cluster's fabric. Host side.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device.h>

#include "../core/call.h"
#include "../fabric/gin_channel.h"
#include "control.h"

namespace dmuon {

// Enqueues one call on a stream: a block per thread group. cursors: device memory of the channel,
// Channel::cursors() of them, zero before the first call. The plan's arrays lie in device memory.
cudaError_t launch_operator(const ncclDevComm& communicator, const GinChannel& gin,
                            const Call& call, Cursor* cursors, const Guard& guard,
                            cudaStream_t stream);

}  // namespace dmuon
