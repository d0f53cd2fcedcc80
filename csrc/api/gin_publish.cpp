// The C functions of a publish over the cluster's fabric.
#include <memory>
#include <utility>

#include "../kernels/publish.h"
#include "gin_communicator.h"
#include "publish.h"

struct dmuon_publish {
  dmuon_communicator* communicator;
  dmuon::PublishTable table;
  dmuon::DeviceMemory memory;  // tasks, streams, then the control words
  dmuon::PublishView plan;     // on the device
  dmuon::PublishControl control;
  bool stopped = false;

  dmuon::GinLane& lane() const {
    return communicator->lanes[static_cast<int>(dmuon::Operation::publish)];
  }
};

namespace dmuon {
namespace {

int broken(const dmuon_publish& p) {
  return fail(DMUON_BROKEN,
              "after a failed call: " + describe_failure(*p.communicator, Operation::publish));
}

Guard guard_of(const dmuon_publish& p) {
  const GinLane& lane = p.lane();
  return {static_cast<uint64_t>(p.communicator->mesh.timeout_seconds * 1e9),
          lane.broken.as<uint64_t>(), lane.report.as<Report>()};
}

std::unique_ptr<dmuon_publish> create(dmuon_communicator& c, PublishTable table, uint64_t count) {
  auto p = std::unique_ptr<dmuon_publish>(new dmuon_publish{&c, std::move(table), {}, {}, {}});
  check_cuda(load_publish(), "the publish kernels");
  const PublishPlan& plan = p->table.plan();
  const uint64_t streams_at = round_up(plan.tasks().size() * sizeof(PublishTask), kAlignment);
  const uint64_t words_at =
      streams_at + round_up(plan.streams().size() * sizeof(PublishStream), kAlignment);
  p->memory = DeviceMemory(words_at + (count + 1) * sizeof(uint64_t));
  p->memory.write(0, plan.tasks().data(), plan.tasks().size() * sizeof(PublishTask));
  p->memory.write(streams_at, plan.streams().data(),
                  plan.streams().size() * sizeof(PublishStream));
  p->plan = {p->memory.as<PublishTask>(), p->memory.as<PublishStream>(streams_at)};
  p->control = {p->memory.as<uint64_t>(words_at),
                p->memory.as<uint64_t>(words_at + sizeof(uint64_t))};
  return p;
}

int run(dmuon_publish& p, uint64_t step, cudaStream_t stream) {
  dmuon_communicator& c = *p.communicator;
  GinLane& lane = p.lane();
  if (has_failed(lane)) return broken(p);
  if (p.stopped) return fail(DMUON_BROKEN, p.table.where() + "is closed");
  const OnDevice here(c.device);
  order(lane, stream);
  PublishCall call = p.table.next(lane.channel, step);
  call.plan = p.plan;
  check_cuda(launch_publish(c.device_communicator, lane.gin, call, p.control,
                            lane.cursors.as<PublishCursor>(), guard_of(p), stream),
             "publish");
  ++lane.calls;
  c.publishing = &p.table;
  check_cuda(cudaEventRecord(lane.ended, stream), "cudaEventRecord");
  return DMUON_OK;
}

int release(dmuon_publish& p, uint64_t task, cudaStream_t stream) {
  if (has_failed(p.lane())) return broken(p);
  const OnDevice here(p.communicator->device);
  // Whether the last step's call has ended is the stream's to know, not the host's.
  const PublishTable::Release release = p.table.release(task, p.table.steps());
  check_cuda(launch_release(p.control, static_cast<uint32_t>(task), release.step, release.count,
                            stream),
             "release");
  return DMUON_OK;
}

int wait(dmuon_publish& p, uint64_t first, uint64_t count, uint64_t step, cudaStream_t stream) {
  p.table.check_range(first, count);
  if (has_failed(p.lane())) return broken(p);
  if (count == 0) return DMUON_OK;
  const OnDevice here(p.communicator->device);
  p.communicator->publishing = &p.table;
  check_cuda(launch_wait(p.control, static_cast<uint32_t>(first), static_cast<uint32_t>(count),
                         step, guard_of(p), stream),
             "wait");
  return DMUON_OK;
}

// A kernel that waits for a release that will not come ends as after a failure.
void stop(dmuon_publish& p, bool at_once) {
  p.stopped = true;
  if ((p.table.is_released() && !at_once) || has_failed(p.lane())) return;
  const OnDevice here(p.communicator->device);
  const uint64_t given_up = 1;
  cudaStream_t beside = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "cudaStreamCreate");
  const cudaError_t copied =
      cudaMemcpyAsync(p.lane().broken.as<uint64_t>(), &given_up, sizeof given_up,
                      cudaMemcpyHostToDevice, beside);
  const cudaError_t done = copied == cudaSuccess ? cudaStreamSynchronize(beside) : copied;
  cudaStreamDestroy(beside);
  check_cuda(done, "stop of a publish");
}

}  // namespace
}  // namespace dmuon

extern "C" {

int dmuon_publish_create(dmuon_communicator* communicator, const char* label,
                         const char* const* names, const dmuon_segment* tasks, uint64_t count,
                         uint64_t buffer, uint64_t buffer_bytes, dmuon_publish** publish) {
  return dmuon::guarded([&] {
    const dmuon::OnDevice here(communicator->device);
    const auto channel = static_cast<int>(dmuon::Operation::publish);
    dmuon::PublishTable table(communicator->lanes[channel].channel, communicator->mesh, label,
                              names, tasks, count, buffer, buffer_bytes);
    *publish = dmuon::create(*communicator, std::move(table), count).release();
    ++communicator->groups;
    return DMUON_OK;
  });
}

int dmuon_publish_run(dmuon_publish* publish, uint64_t step, void* stream) {
  return dmuon::guarded(
      [&] { return dmuon::run(*publish, step, static_cast<cudaStream_t>(stream)); });
}

int dmuon_publish_release(dmuon_publish* publish, uint64_t task, void* stream) {
  return dmuon::guarded(
      [&] { return dmuon::release(*publish, task, static_cast<cudaStream_t>(stream)); });
}

int dmuon_publish_wait(dmuon_publish* publish, uint64_t first, uint64_t count, uint64_t step,
                       void* stream) {
  return dmuon::guarded(
      [&] { return dmuon::wait(*publish, first, count, step, static_cast<cudaStream_t>(stream)); });
}

int dmuon_publish_stop(dmuon_publish* publish, int32_t at_once) {
  return dmuon::guarded([&] {
    dmuon::stop(*publish, at_once != 0);
    return DMUON_OK;
  });
}

int dmuon_publish_destroy(dmuon_publish* publish) {
  return dmuon::guarded([&] {
    dmuon_communicator& c = *publish->communicator;
    const dmuon::OnDevice here(c.device);
    if (c.publishing == &publish->table) c.publishing = nullptr;
    --c.groups;
    delete publish;
    return DMUON_OK;
  });
}

}  // extern "C"
