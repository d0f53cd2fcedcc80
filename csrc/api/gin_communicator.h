// A rank's end of the cluster's fabric: NCCL communicator, window, and what kernels keep between
// calls. Host side.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device.h>

#include <deque>
#include <string>
#include <utility>

#include "../fabric/gin_channel.h"
#include "common.h"
#include "device_memory.h"

struct dmuon_communicator;

namespace dmuon {

// One operation's channel and the numbers that order its calls.
struct GinLane {
  Channel channel;
  GinChannel gin;
  DeviceMemory cursors;
  DeviceMemory broken;
  DeviceMemory report;
  uint64_t calls = 0;
  uint64_t groups = 0;
  cudaEvent_t ended = nullptr;    // the last call's end
  std::deque<std::pair<uint64_t, std::string>> labels;  // of the last calls, by number

  const Report& told() const { return *report.as<Report>(); }
};

class PublishTable;

// Whether a call of the channel has waited for too long.
inline bool has_failed(const GinLane& lane) {
  return __atomic_load_n(&lane.told().written, __ATOMIC_ACQUIRE) != 0;
}

inline dmuon_stuck_report told_of(const Report& told) {
  return {static_cast<int32_t>(told.stuck.wait), told.stuck.queue, told.stuck.peer, told.group,
          told.stuck.chunk, told.number};
}

// One line on the failed call of a channel.
std::string describe_failure(const dmuon_communicator& c, Operation operation);

// Calls are made in one order and must run in it: the stream waits for the channel's last call.
void order(const GinLane& lane, cudaStream_t stream);

// Makes a device the calling thread's until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();

 private:
  int before_ = 0;
};

}  // namespace dmuon

struct dmuon_communicator {
  dmuon_mesh mesh{};
  std::vector<int32_t> ranks;  // mesh.names
  int device = 0;
  ncclComm_t nccl = nullptr;
  void* memory = nullptr;
  dmuon_memory taken{};
  ncclWindow_t window = nullptr;
  bool has_device_communicator = false;
  ncclDevComm device_communicator{};
  dmuon::GinLane lanes[dmuon::kChannels];
  int groups = 0;  // and publishes
  const dmuon::PublishTable* publishing = nullptr;  // what last waited or ran on its channel

  dmuon_communicator() = default;
  dmuon_communicator(const dmuon_communicator&) = delete;
  dmuon_communicator& operator=(const dmuon_communicator&) = delete;
  ~dmuon_communicator();

  // Raises unless the NCCL that this process has loaded is the one of the headers. Needs no GPU.
  static void check_versions();
  // Collective; ends within the mesh's time-out, or raises.
  void open(const ncclUniqueId& id);
  // What puts go over; 0 on a single node.
  dmuon_gin_network network() const;

 private:
  void connect(const ncclUniqueId& id);
  void check_team() const;
  void make_window(uint64_t bytes);
  void make_device_communicator(int signals, int counters);
  void make_lanes();
  // Waits until the communicator has done what was asked of it.
  void settle(ncclResult_t asked, const char* what);
};
