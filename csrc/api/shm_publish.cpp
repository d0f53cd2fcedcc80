// The C functions of a publish over the shm fabric.
#include <string>
#include <utility>

#include "../fabric/shm_publish.h"
#include "../fabric/shm_run.h"
#include "publish.h"
#include "shm_communicator.h"

struct dmuon_publish {
  dmuon_communicator* communicator;
  dmuon::PublishTable table;
  dmuon::ShmFlags flags;

  dmuon::Lane& lane() const {
    return communicator->lanes[static_cast<int>(dmuon::Operation::publish)];
  }
};

namespace dmuon {
namespace {

void check_no_stream(const void* stream) {
  if (stream != nullptr) refuse("shm has no streams: stream must be null");
}

int broken(const dmuon_publish& p) {
  return fail(DMUON_BROKEN, "after a failed call: " + p.lane().text);
}

int run(dmuon_publish& p, uint64_t step) {
  Lane& lane = p.lane();
  const LaneUse use(lane, p.table.where() + "step " + std::to_string(step));
  if (!lane.text.empty()) return broken(p);
  const PublishCall call = p.table.next(lane.shm.channel, step);
  dmuon_communicator& c = *p.communicator;
  ShmPublishFabric fabric(lane.shm, p.flags, call.released + p.table.own_tasks());
  using GroupType = PublishGroup<ShmPublishFabric>;
  ShmDriver<GroupType, ShmPublishFabric> driver(fabric, {GroupType(call, c.streams.data())});
  if (driver.run(c.mesh.timeout_seconds, c.spins).ended) {
    p.flags.ended = step;
    return DMUON_OK;
  }
  const Stuck stuck = driver.group(0).stuck();
  lane.report = {static_cast<int32_t>(stuck.wait), stuck.queue, stuck.peer, 0, stuck.chunk, step};
  if (p.flags.given_up) {
    lane.text = p.table.where() + "given up by rank " + named(c.mesh, c.mesh.rank) + " in step " +
                std::to_string(step);
  } else if (fabric.hopeless()) {
    lane.text = p.table.where() + "closed before all tasks of rank " + named(c.mesh, c.mesh.rank) +
                " were released, step " + std::to_string(step);
  } else {
    lane.text = p.table.describe_stuck(lane.report);
  }
  // Invariant: the text is written before: who sees the failure reads it.
  p.flags.failed = true;
  p.flags.bell.ring();
  return fail(fabric.hopeless() ? DMUON_BROKEN : DMUON_TIMEOUT, lane.text);
}

int release(dmuon_publish& p, uint64_t task) {
  if (p.flags.failed) return broken(p);
  const PublishTable::Release release = p.table.release(task, p.flags.ended);
  p.flags.release(static_cast<uint32_t>(task), release.step, release.count,
                  p.lane().shm.own().words->bell);
  return DMUON_OK;
}

// kept: of a wait that may pause; null: it goes on to its end.
int wait(dmuon_publish& p, uint64_t first, uint64_t count, uint64_t step, dmuon_shm_wait* kept) {
  p.table.check_range(first, count);
  using Since = ShmFlags::Clock::duration;
  ShmFlags::Waiting waiting = p.flags.waiting(first, first + count, step);
  if (kept != nullptr && kept->paused != 0) {
    waiting.next = kept->next;
    waiting.raised = kept->raised;
    waiting.progress = ShmFlags::Clock::time_point(Since(kept->since));
  }
  const auto end = p.flags.wait(waiting, p.communicator->mesh.timeout_seconds, kept != nullptr);
  if (kept != nullptr) {
    *kept = {end == ShmFlags::Wait::paused, waiting.next, waiting.raised,
             waiting.progress.time_since_epoch().count()};
  }
  switch (end) {
    case ShmFlags::Wait::over:
    case ShmFlags::Wait::paused:
      return DMUON_OK;
    case ShmFlags::Wait::failed:
      return broken(p);
    case ShmFlags::Wait::late:
      break;
  }
  return fail(DMUON_TIMEOUT, p.table.describe_wait(static_cast<uint32_t>(waiting.next), step));
}

}  // namespace
}  // namespace dmuon

extern "C" {

int dmuon_publish_create(dmuon_communicator* communicator, const char* label,
                         const char* const* names, const dmuon_segment* tasks, uint64_t count,
                         uint64_t buffer, uint64_t buffer_bytes, dmuon_publish** publish) {
  return dmuon::guarded([&] {
    const auto channel = static_cast<int>(dmuon::Operation::publish);
    dmuon::PublishTable table(communicator->lanes[channel].shm.channel, communicator->mesh, label,
                              names, tasks, count, buffer, buffer_bytes);
    *publish = new dmuon_publish{communicator, std::move(table),
                                 dmuon::ShmFlags(static_cast<uint32_t>(count))};
    ++communicator->groups;
    return DMUON_OK;
  });
}

int dmuon_publish_run(dmuon_publish* publish, uint64_t step, void* stream) {
  return dmuon::guarded([&] {
    dmuon::check_no_stream(stream);
    return dmuon::run(*publish, step);
  });
}

int dmuon_publish_release(dmuon_publish* publish, uint64_t task, void* stream) {
  return dmuon::guarded([&] {
    dmuon::check_no_stream(stream);
    return dmuon::release(*publish, task);
  });
}

int dmuon_publish_wait(dmuon_publish* publish, uint64_t first, uint64_t count, uint64_t step,
                       void* stream) {
  return dmuon::guarded([&] {
    dmuon::check_no_stream(stream);
    return dmuon::wait(*publish, first, count, step, nullptr);
  });
}

int dmuon_shm_publish_wait(dmuon_publish* publish, uint64_t first, uint64_t count, uint64_t step,
                           dmuon_shm_wait* wait) {
  return dmuon::guarded([&] { return dmuon::wait(*publish, first, count, step, wait); });
}

int dmuon_publish_stop(dmuon_publish* publish, int32_t at_once) {
  if (at_once != 0) publish->flags.given_up = true;
  publish->flags.stopped = true;
  publish->lane().shm.own().words->bell.ring();
  return DMUON_OK;
}

int dmuon_publish_destroy(dmuon_publish* publish) {
  --publish->communicator->groups;
  delete publish;
  return DMUON_OK;
}

}  // extern "C"
