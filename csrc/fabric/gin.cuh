// The fabric of a cluster: NVLink inside the node, RDMA that the kernel starts itself across nodes,
// both through NCCL's device API. One object serves one thread block.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "../core/channel.h"
#include "../kernels/node.cuh"
#include "gin_channel.h"

namespace dmuon {

// The windows of the node's ranks, side by side in this rank's address space.
class GinMemory {
 public:
  static constexpr bool kMulticast = true;

  DMUON_DEVICE GinMemory(const ncclDevComm& communicator, const GinChannel& channel)
      : communicator_(communicator), channel_(channel) {}

  DMUON_DEVICE char* at(int rail, uint64_t offset) const {
    return static_cast<char*>(ncclGetLsaPointer(channel_.window, offset, rail));
  }
  DMUON_DEVICE char* everyone(uint64_t offset) const {
    return static_cast<char*>(ncclGetLsaMultimemPointer(channel_.window, offset, communicator_));
  }
  DMUON_DEVICE bool multicast() const { return channel_.multicast != 0; }
  DMUON_DEVICE int rails() const { return communicator_.lsaSize; }
  DMUON_DEVICE int rail() const { return communicator_.lsaRank; }

 private:
  const ncclDevComm& communicator_;
  const GinChannel& channel_;
};

// NCCL's calls, for one thread. Not inlined: each holds the code of all of NCCL's network backends,
// whose registers would be kept from the loops that move bytes.
struct GinCalls {
  __device__ __noinline__ static void put(const ncclDevComm& communicator,
                                          const GinChannel& channel, int context, int node,
                                          uint64_t to, uint64_t from, uint32_t bytes, int signal,
                                          int counter) {
    // The weak kinds: the signal says that this put has landed, the counter that this put has read
    // its source; neither says anything about other puts. Enough, since every slot has an arrival
    // word and a counter of its own.
    ncclGin(communicator, context)
        .put(ncclTeamRail(communicator), channel.rank(node), channel.window, to,
             channel.window, from, bytes, ncclGin_WeakSignalInc{channel.signals + signal},
             ncclGin_WeakCounterInc{channel.counters + counter});
  }
  __device__ __noinline__ static void signal(const ncclDevComm& communicator,
                                             const GinChannel& channel, int context, int node,
                                             int signal) {
    ncclGin(communicator, context)
        .signal(ncclTeamRail(communicator), channel.rank(node),
                ncclGin_WeakSignalInc{channel.signals + signal});
  }
  __device__ __noinline__ static uint64_t read_signal(const ncclDevComm& communicator,
                                                      const GinChannel& channel, int context,
                                                      int signal) {
    return ncclGin(communicator, context)
        .readSignal(channel.signals + signal, 64, cuda::memory_order_acquire);
  }
  __device__ __noinline__ static uint64_t read_counter(const ncclDevComm& communicator,
                                                       const GinChannel& channel, int context,
                                                       int counter) {
    return ncclGin(communicator, context)
        .readCounter(channel.counters + counter, 56, cuda::memory_order_acquire);
  }
};

class GinFabric : public NodeFabric<GinMemory> {
 public:
  DMUON_DEVICE GinFabric(const ncclDevComm& communicator, const GinChannel& gin,
                         const Channel& channel)
      : NodeFabric(GinMemory(communicator, gin), gin.words),
        communicator_(communicator),
        gin_(gin),
        channel_(channel) {}

  DMUON_DEVICE void put(int node, uint64_t to, uint64_t from, uint32_t bytes, int signal,
                        int counter) {
    // Invariant: all threads' stores to the source come before the barrier, so NCCL's release at
    // device scope, which it makes before the NIC learns of the put, covers them. The source always
    // lies in this GPU's memory: device scope is enough.
    barrier();
    if (thread() == 0) {
      GinCalls::put(communicator_, gin_, context(channel_.chain_ring_of_counter(counter)), node, to,
                    from, bytes, signal, counter);
    }
  }

  DMUON_DEVICE void signal(int node, int signal) {
    // Invariant: behind the barrier all threads have used what they read in the slot; what the
    // receiver puts there on seeing the signal cannot be read in its place.
    barrier();
    if (thread() == 0) {
      GinCalls::signal(communicator_, gin_, context(channel_.chain_ring_of_signal(signal)), node,
                       signal);
    }
  }

  DMUON_DEVICE uint64_t read_signal(int signal) {
    uint64_t value = 0;
    if (thread() == 0) {
      value = GinCalls::read_signal(communicator_, gin_,
                                    context(channel_.chain_ring_of_signal(signal)), signal);
    }
    return uniform(value);
  }

  DMUON_DEVICE uint64_t read_counter(int counter) {
    uint64_t value = 0;
    if (thread() == 0) {
      value = GinCalls::read_counter(communicator_, gin_,
                                     context(channel_.chain_ring_of_counter(counter)), counter);
    }
    return uniform(value);
  }

 private:
  // NCCL spreads puts over contexts (queue pairs, and NICs where a GPU has several); signals and
  // counters are a context's own. Invariant: the sender picks by the put's counter, the receiver by
  // its signal, and both get the same one: they have the same numbers of contexts and connections,
  // which open_window() of comm/gin.py compares.
  DMUON_DEVICE int context(int chain_ring) const {
    const int contexts = static_cast<int>(communicator_.ginContextCount);
    return chain_ring < 0 ? 0 : chain_ring % contexts;
  }

  const ncclDevComm& communicator_;
  const GinChannel& gin_;
  const Channel& channel_;
};

}  // namespace dmuon
