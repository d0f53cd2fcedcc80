// The C functions of dmuon.h over the cluster's fabric.
#include <cstring>
#include <memory>

#include "../kernels/operators.h"
#include "../kernels/plan_image.h"
#include "gin_communicator.h"

struct dmuon_group {
  dmuon_communicator* communicator;
  dmuon::GroupTable table;
  dmuon::DeviceMemory memory;
  dmuon::PlanView plan;  // on the device
};

namespace dmuon {
namespace {

// Labels that are kept for reports: more calls than a program has on the way at a time.
constexpr size_t kLabels = 4096;

int call(dmuon_group& group, uint64_t buffer, uint64_t home, cudaStream_t stream) {
  dmuon_communicator& c = *group.communicator;
  const Operation operation = group.table.operation;
  check_places(group.table, c.mesh, buffer, home);
  GinLane& lane = c.lanes[static_cast<int>(operation)];
  if (has_failed(lane)) {
    return fail(DMUON_BROKEN, "after a failed call: " + describe_failure(c, operation));
  }
  const OnDevice here(c.device);
  order(lane, stream);
  const Call next{group.plan,        lane.channel,   buffer, home, group.table.dtype,
                  lane.calls + 1, lane.groups + group.plan.groups};
  const Guard guard{static_cast<uint64_t>(c.mesh.timeout_seconds * 1e9),
                    lane.broken.as<uint64_t>(),
                    lane.report.as<Report>()};
  check_cuda(launch_operator(c.device_communicator, lane.gin, next,
                             lane.cursors.as<Cursor>(), guard, stream),
             name_of(operation));
  lane.calls = next.number;
  lane.groups = next.groups_finished;
  lane.labels.emplace_back(next.number, group.table.label);
  if (lane.labels.size() > kLabels) lane.labels.pop_front();
  check_cuda(cudaEventRecord(lane.ended, stream), "cudaEventRecord");
  return DMUON_OK;
}

}  // namespace
}  // namespace dmuon

extern "C" {

const char* dmuon_error(void) { return dmuon::last_error().c_str(); }

int dmuon_gin_unique_id(void* id, uint64_t bytes) {
  return dmuon::guarded([&] {
    if (bytes != sizeof(ncclUniqueId)) {
      dmuon::refuse("id of " + std::to_string(bytes) + " bytes, expected " +
                    std::to_string(sizeof(ncclUniqueId)));
    }
    dmuon_communicator::check_versions();
    const ncclResult_t code = ncclGetUniqueId(static_cast<ncclUniqueId*>(id));
    if (code != ncclSuccess) {
      throw dmuon::SystemError(std::string("ncclGetUniqueId: ") + ncclGetErrorString(code));
    }
    return DMUON_OK;
  });
}

int dmuon_gin_open(const void* id, uint64_t bytes, int32_t device, const dmuon_mesh* mesh,
                   dmuon_communicator** communicator) {
  return dmuon::guarded([&] {
    ncclUniqueId unique;
    if (bytes != sizeof unique) {
      dmuon::refuse("id of " + std::to_string(bytes) + " bytes, expected " +
                    std::to_string(sizeof unique));
    }
    std::memcpy(&unique, id, sizeof unique);
    auto c = std::make_unique<dmuon_communicator>();
    c->mesh = *mesh;
    c->device = device;
    if (c->mesh.chunk_bytes == 0) c->mesh.chunk_bytes = dmuon::kChunkBytes;
    if (c->mesh.slots == 0) c->mesh.slots = dmuon::kSlots;
    dmuon::check_mesh(c->mesh);
    dmuon::keep_names(c->mesh, c->ranks);
    dmuon_communicator::check_versions();
    const dmuon::OnDevice here(device);
    c->open(unique);
    *communicator = c.release();
    return DMUON_OK;
  });
}

int dmuon_gin_network_of(const dmuon_communicator* communicator, dmuon_gin_network* network) {
  *network = communicator->network();
  return DMUON_OK;
}

int dmuon_memory_of(const dmuon_communicator* communicator, dmuon_memory* memory) {
  *memory = communicator->taken;
  return DMUON_OK;
}

int dmuon_group_create(dmuon_communicator* communicator, const char* label, int32_t operation,
                       int32_t dtype, const dmuon_segment* segments, uint64_t count,
                       uint64_t buffer_bytes, uint64_t home_bytes, dmuon_group** group) {
  return dmuon::guarded([&] {
    dmuon::check_operation(operation);
    const dmuon::OnDevice here(communicator->device);
    std::unique_ptr<dmuon_group> made(new dmuon_group{
        communicator,
        dmuon::make_table(communicator->lanes[operation].channel, communicator->mesh, label, dtype,
                          segments, count, buffer_bytes, home_bytes),
        {},
        {}});
    const dmuon::PlanImage image(made->table.plan.view());
    made->memory = dmuon::DeviceMemory(image.bytes().size());
    made->memory.write(0, image.bytes().data(), image.bytes().size());
    made->plan = image.at(made->memory.as<char>());
    ++communicator->groups;
    *group = made.release();
    return DMUON_OK;
  });
}

int dmuon_check(const dmuon_group* group, uint64_t buffer, uint64_t home) {
  return dmuon::guarded([&] {
    dmuon::check_places(group->table, group->communicator->mesh, buffer, home);
    return DMUON_OK;
  });
}

int dmuon_call(dmuon_group* group, uint64_t buffer, uint64_t home, void* stream) {
  return dmuon::guarded(
      [&] { return dmuon::call(*group, buffer, home, static_cast<cudaStream_t>(stream)); });
}

int dmuon_stuck(const dmuon_communicator* communicator, int32_t operation,
                dmuon_stuck_report* report) {
  return dmuon::guarded([&] {
    dmuon::check_channel(operation);
    const dmuon::GinLane& lane = communicator->lanes[operation];
    *report = {0, -1, -1, -1, 0, 0};
    if (!dmuon::has_failed(lane)) return static_cast<int>(DMUON_OK);
    *report = dmuon::told_of(lane.told());
    return dmuon::fail(
        DMUON_TIMEOUT,
        dmuon::describe_failure(*communicator, static_cast<dmuon::Operation>(operation)));
  });
}

int dmuon_group_destroy(dmuon_group* group) {
  return dmuon::guarded([&] {
    const dmuon::OnDevice here(group->communicator->device);
    --group->communicator->groups;
    delete group;
    return DMUON_OK;
  });
}

int dmuon_close(dmuon_communicator* communicator) {
  return dmuon::guarded([&] {
    if (communicator->groups > 0) {
      dmuon::refuse("close: " + std::to_string(communicator->groups) +
                    " groups of the communicator still exist");
    }
    const dmuon::OnDevice here(communicator->device);
    delete communicator;
    return DMUON_OK;
  });
}

}  // extern "C"
