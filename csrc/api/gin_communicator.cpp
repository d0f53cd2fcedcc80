#include "gin_communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "../core/publish.h"
#include "publish.h"

namespace dmuon {
namespace {

// Contexts that a channel's rings are spread over, if NCCL gives them; its own kernels ask for as
// many.
constexpr int kContextsAsked = 4;
constexpr int kLongestQueue = 1024;

std::string version_text(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

// Work requests that can be on the way to one peer over one context, all channels together: a put
// takes two (the write, the signal's add), and no ring has more of them than slots, nor more
// acknowledgements. With fewer contexts than asked for a queue may be full; a put then waits for
// the NIC, which waits for nobody.
int queue_depth(const GinLane (&lanes)[kChannels]) {
  int rings = 0;
  for (const GinLane& lane : lanes) {
    const Channel& channel = lane.channel;
    rings += ((channel.chain_rings() + kContextsAsked - 1) / kContextsAsked +
              channel.star_rings()) *
             channel.slots;
  }
  int depth = 128;
  while (depth < 3 * rings && depth < kLongestQueue) depth *= 2;
  return depth;
}

}  // namespace

OnDevice::OnDevice(int device) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

OnDevice::~OnDevice() { cudaSetDevice(before_); }

std::string describe_failure(const dmuon_communicator& c, Operation operation) {
  const GinLane& lane = c.lanes[static_cast<int>(operation)];
  const dmuon_stuck_report told = told_of(lane.told());
  if (operation == Operation::publish) {
    if (c.publishing != nullptr) return c.publishing->describe_stuck(told);
    return describe(c.mesh, operation, "a table that was given up", told);
  }
  std::string label = "an earlier group";
  for (const auto& [number, name] : lane.labels) {
    if (number == told.number) label = name;
  }
  return describe(c.mesh, operation, label, told);
}

void order(const GinLane& lane, cudaStream_t stream) {
  cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &captured), "cudaStreamIsCapturing");
  if (captured != cudaStreamCaptureStatusNone) {
    refuse("a call cannot be captured in a CUDA graph: each has its own number");
  }
  // On the last call's own stream too, where it costs nothing: a new stream may have the handle of
  // one that is destroyed, so handles do not tell.
  if (lane.calls > 0) {
    check_cuda(cudaStreamWaitEvent(stream, lane.ended, 0), "cudaStreamWaitEvent");
  }
}

}  // namespace dmuon

using namespace dmuon;  // NOLINT: the members below are of a C struct outside the namespace

void dmuon_communicator::open(const ncclUniqueId& id) {
  connect(id);
  check_team();
  // The window: user memory, each channel's rings, each channel's words.
  WindowLayout layout(mesh);
  uint32_t signals = 0, counters = 0;
  for (int i = 0; i < kChannels; ++i) {
    const auto operation = static_cast<Operation>(i);
    GinLane& lane = lanes[i];
    lane.channel = layout.channel(operation);
    const uint64_t words = layout.take(NodeWords::bytes(mesh.rails));
    const Span span = span_of(mesh, operation);
    lane.gin = {nullptr,    NodeWords::place(words, mesh.rails), signals, counters,
                span.first, span.stride,                         0};
    signals += lane.channel.signals();
    counters += lane.channel.counters();
  }
  make_window(layout.bytes());
  taken = layout.memory(0);
  taken.user = memory;
  make_device_communicator(static_cast<int>(signals), static_cast<int>(counters));
  make_lanes();
}

void dmuon_communicator::check_versions() {
  int loaded = 0;
  const ncclResult_t code = ncclGetVersion(&loaded);
  // The layout of what kernels read is that of the headers: NCCL promises no other pairing.
  if (code != ncclSuccess || loaded != NCCL_VERSION_CODE) {
    throw SystemError("gin: compiled with the headers of NCCL " + version_text(NCCL_VERSION_CODE) +
                      ", but NCCL " + version_text(loaded) +
                      " is loaded; both must be those of the package that torch uses");
  }
}

void dmuon_communicator::settle(ncclResult_t asked, const char* what) {
  using Clock = std::chrono::steady_clock;
  const auto limit = Clock::now() + std::chrono::duration<double>(mesh.timeout_seconds);
  ncclResult_t state = asked;
  while (state == ncclInProgress) {
    if (Clock::now() > limit) {
      throw SystemError(std::string(what) + ": no end after " +
                        std::to_string(mesh.timeout_seconds) +
                        " s; a rank did not come, or the network does not answer");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (ncclCommGetAsyncError(nccl, &state) != ncclSuccess) state = ncclInternalError;
  }
  if (state != ncclSuccess) {
    throw SystemError(std::string(what) + ": " + ncclGetErrorString(state) + " (" +
                      ncclGetLastError(nccl) + ")");
  }
}

void dmuon_communicator::connect(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // so that no wait is without a limit
  settle(ncclCommInitRankConfig(&nccl, mesh.nodes * mesh.rails, id, mesh.rank, &config),
         "ncclCommInitRankConfig");
}

void dmuon_communicator::check_team() const {
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  const ncclResult_t code = ncclCommQueryProperties(nccl, &properties);
  if (code != ncclSuccess || !properties.deviceApiSupport) {
    throw SystemError("gin: NCCL's device API does not work between these GPUs; it needs peer "
                      "access between all GPUs of a node and a CUDA driver with virtual memory "
                      "management");
  }
  const ncclTeam_t team = ncclTeamLsa(nccl);
  const int rail = mesh.rank % mesh.rails;
  if (team.nRanks != mesh.rails || team.rank != rail) {
    throw SystemError("gin: the mesh has " + std::to_string(mesh.rails) +
                      " ranks per node and this rank is number " + std::to_string(rail) +
                      " of its node; NCCL finds " + std::to_string(team.nRanks) +
                      " GPUs that share memory, and number " + std::to_string(team.rank) +
                      "; ranks of a node must be consecutive and nodes equally large");
  }
  if (mesh.nodes > 1 && properties.railedGinType == NCCL_GIN_TYPE_NONE) {
    throw SystemError("gin: NCCL finds no network that GPUs can drive themselves; it needs "
                      "InfiniBand or RoCE NICs with GPUDirect RDMA (see NCCL_DEBUG=INFO, lines with "
                      "GIN)");
  }
}

void dmuon_communicator::make_window(uint64_t bytes) {
  settle(ncclMemAlloc(&memory, bytes), "ncclMemAlloc");
  check_cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
  // Invariant: all words are zero on every rank before any rank's first call; the registration is
  // collective and ends after all ranks came here.
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  settle(ncclCommWindowRegister(nccl, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
         "ncclCommWindowRegister");
  if (window == nullptr) throw SystemError("gin: NCCL does not register symmetric windows here");
}

void dmuon_communicator::make_device_communicator(int signals, int counters) {
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  settle(ncclCommQueryProperties(nccl, &properties), "ncclCommQueryProperties");
  ncclDevCommRequirements_t wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  // A node of one rank has nobody to multicast to.
  wanted.lsaMultimem = properties.multimemSupport && mesh.rails > 1;
  wanted.ginStrongSignalsRequired = false;
  wanted.ginVaSignalsRequired = false;
  if (mesh.nodes > 1) {
    wanted.ginConnectionType = NCCL_GIN_CONNECTION_RAIL;
    wanted.ginContextCount = kContextsAsked;  // a wish: network() is what came of it
    wanted.ginSignalCount = signals;
    wanted.ginCounterCount = counters;
    wanted.ginQueueDepth = queue_depth(lanes);
  }
  settle(ncclDevCommCreate(nccl, &wanted, &device_communicator), "ncclDevCommCreate");
  has_device_communicator = true;
  if (mesh.nodes > 1 && device_communicator.ginContextCount == 0) {
    throw SystemError("gin: NCCL gives no context for puts, expected 1 or more");
  }
  for (GinLane& lane : lanes) {
    lane.gin.window = window;
    lane.gin.multicast = wanted.lsaMultimem ? 1 : 0;
  }
}

void dmuon_communicator::make_lanes() {
  for (GinLane& lane : lanes) {
    lane.cursors = DeviceMemory(
        std::max(lane.channel.cursors() * sizeof(Cursor), lane.channel.nodes * sizeof(PublishCursor)));
    lane.broken = DeviceMemory(sizeof(uint64_t));
    lane.report = DeviceMemory::of_host(sizeof(Report));
    check_cuda(cudaEventCreateWithFlags(&lane.ended, cudaEventDisableTiming), "cudaEventCreate");
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

dmuon_gin_network dmuon_communicator::network() const {
  if (mesh.nodes == 1) return {0, 0};
  return {static_cast<int32_t>(device_communicator.ginContextCount),
          static_cast<int32_t>(device_communicator.ginConnectionCount)};
}

dmuon_communicator::~dmuon_communicator() {
  // Kernels end within their limit. What fails here leaves nothing to do better.
  if (nccl != nullptr) cudaDeviceSynchronize();
  for (GinLane& lane : lanes) {
    if (lane.ended != nullptr) cudaEventDestroy(lane.ended);
  }
  if (has_device_communicator) ncclDevCommDestroy(nccl, &device_communicator);
  if (window != nullptr) ncclCommWindowDeregister(nccl, window);
  // Abort, not destroy: it waits for no other rank.
  if (nccl != nullptr) ncclCommAbort(nccl);
  if (memory != nullptr) ncclMemFree(memory);
}
