// The kernels of the cluster's fabric: one per operator, one block per thread group.
#include "operators.h"

#include "../core/allgatherv.h"
#include "../core/reducescatterv.h"
#include "../fabric/gin.cuh"
#include "run.cuh"

namespace dmuon {
namespace {

template <class Operator>
__device__ void run(const ncclDevComm& communicator, const GinChannel& gin, const Call& call,
                    Cursor* cursors, const Guard& guard) {
  extern __shared__ __align__(16) char scratch[];
  __shared__ Call own;  // read through shared memory by all threads: no copy per thread
  if (thread() == 0) own = call;
  barrier();
  GinFabric fabric(communicator, gin, own.channel);
  run_group<Operator>(fabric, own, static_cast<int>(blockIdx.x), cursors, scratch, guard);
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    all_gather_v_kernel(__grid_constant__ const ncclDevComm communicator,
                        __grid_constant__ const GinChannel gin, __grid_constant__ const Call call,
                        Cursor* cursors, __grid_constant__ const Guard guard) {
  run<AllGatherV>(communicator, gin, call, cursors, guard);
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    reduce_scatter_v_kernel(__grid_constant__ const ncclDevComm communicator,
                            __grid_constant__ const GinChannel gin,
                            __grid_constant__ const Call call, Cursor* cursors,
                            __grid_constant__ const Guard guard) {
  run<ReduceScatterV>(communicator, gin, call, cursors, guard);
}

}  // namespace

cudaError_t launch_operator(const ncclDevComm& communicator, const GinChannel& gin,
                            const Call& call, Cursor* cursors, const Guard& guard,
                            cudaStream_t stream) {
  auto* kernel = call.channel.operation == Operation::all_gather_v ? all_gather_v_kernel
                                                                   : reduce_scatter_v_kernel;
  const uint64_t scratch = scratch_bytes(call.channel, call.plan);
  // More than 48 KiB of dynamic shared memory must be asked for.
  const cudaError_t asked = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(scratch));
  if (asked != cudaSuccess) return asked;
  kernel<<<call.plan.groups, kBlockThreads, scratch, stream>>>(communicator, gin, call, cursors,
                                                              guard);
  return cudaGetLastError();
}

}  // namespace dmuon
