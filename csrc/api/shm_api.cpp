// The C functions of dmuon.h over the shm fabric.
#include <sched.h>

#include <memory>
#include <string>

#include "../core/allgatherv.h"
#include "../core/reducescatterv.h"
#include "dmuon.h"
#include "shm_communicator.h"

namespace dmuon {
namespace {

// Fewer than elsewhere: a copy has no latency to hide, and a small ring stays in a cache.
constexpr int kShmSlots = 2;
// What the last cache of a processor holds, roughly: if all ranks' buffers together have more bytes,
// what is written would be gone from it before it is read.
constexpr uint64_t kCacheBytes = 32 << 20;

// More ranks than processors: who looks again and again only keeps the others from working.
int spins_for(int ranks) {
  cpu_set_t set;
  const int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return ranks <= processors ? 2000 : 20;
}

}  // namespace
}  // namespace dmuon

struct dmuon_group {
  dmuon_communicator* communicator;
  dmuon::GroupTable table;
  uint64_t digest;  // what ranks compare of it

  dmuon::Lane& lane() const { return communicator->lanes[static_cast<int>(table.operation)]; }
};

namespace dmuon {
namespace {

void check_job(const std::string& job) {
  bool right = !job.empty() && job.size() <= 64;
  for (const char c : job) {
    right &= (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
  }
  if (!right) refuse("job \"" + job + "\": expected 1 to 64 letters, digits or hyphens");
}

// Ranks whose memory `mesh.rank` reaches: its node's and its rail's.
std::vector<int> peers_of(const dmuon_mesh& mesh) {
  std::vector<int> peers;
  const int node = mesh.rank / mesh.rails, rail = mesh.rank % mesh.rails;
  for (int k = 0; k < mesh.rails; ++k) {
    if (k != rail) peers.push_back(node * mesh.rails + k);
  }
  for (int r = 0; r < mesh.nodes; ++r) {
    if (r != node) peers.push_back(r * mesh.rails + rail);
  }
  return peers;
}

// Lays all channels out; returns the bytes of their words, which lie before the window.
uint64_t lay_out(WindowLayout& layout, dmuon_communicator& c) {
  uint64_t words_bytes = 0;
  for (int i = 0; i < kChannels; ++i) {
    c.lanes[i].shm.channel = layout.channel(static_cast<Operation>(i));
    words_bytes += ShmWords::bytes(c.lanes[i].shm.channel);
  }
  return round_up(words_bytes, kPageBytes);
}

void open(const std::string& job, const int32_t* stop, dmuon_communicator& c) {
  const dmuon_mesh& mesh = c.mesh;
  WindowLayout layout(mesh);
  const uint64_t words_bytes = lay_out(layout, c);
  char settings[256];
  std::snprintf(settings, sizeof settings,
                "%d nodes of %d ranks, gathers over %d nodes, %llu window bytes, chunks of %u "
                "bytes, %d slots",
                mesh.nodes, mesh.rails, mesh.gather_nodes,
                static_cast<unsigned long long>(mesh.user_bytes), mesh.chunk_bytes, mesh.slots);
  c.pool = std::make_unique<ShmPool>(job, mesh.rank, words_bytes + layout.bytes(), settings,
                                     mesh.timeout_seconds, stop, mesh.names);
}

void attach(dmuon_communicator& c) {
  const dmuon_mesh& mesh = c.mesh;
  c.pool->attach(peers_of(mesh));
  WindowLayout layout(mesh);
  const uint64_t words_bytes = lay_out(layout, c);
  uint64_t words = 0;
  for (Lane& lane : c.lanes) {
    const Channel& channel = lane.shm.channel;
    const Span span = span_of(mesh, channel.operation);
    const auto view = [&](int node, int rail) {
      const int rank = (span.first + node * span.stride) * mesh.rails + rail;
      std::byte* memory = c.pool->memory(rank);
      return ShmRank{memory + words_bytes, reinterpret_cast<ShmWords*>(memory + words)};
    };
    for (int k = 0; k < channel.rails; ++k) lane.shm.rails.push_back(view(channel.node, k));
    for (int r = 0; r < channel.nodes; ++r) lane.shm.nodes.push_back(view(r, channel.rail));
    lane.shm.cursors.resize(channel.cursors());
    lane.shm.counters.resize(channel.counters());
    lane.shm.compared.resize(channel.signals());
    words += ShmWords::bytes(channel);
  }
  c.memory = layout.memory(words_bytes);
  c.memory.user = c.pool->memory(mesh.rank) + words_bytes;
  c.streams.resize(c.lanes[static_cast<int>(Operation::publish)].shm.channel.nodes);
}

template <class Operator>
class RunningOf : public RunningCall {
 public:
  RunningOf(ShmChannel& channel, const Call& call, bool streaming, const ShmTag& tag)
      : call_(call), tag_(tag), run_(channel, call_, 0, call.plan.groups, streaming, tag) {}
  ShmEnd run(double limit_seconds, int spins, bool pausing) override {
    return run_.run(limit_seconds, spins, pausing);
  }
  const ShmTag& tag() const override { return tag_; }

 private:
  const Call call_;
  const ShmTag tag_;
  ShmRun<Operator> run_;
};

void begin(const dmuon_group& group, Lane& lane, uint64_t buffer, uint64_t home) {
  const GroupTable& table = group.table;
  const dmuon_mesh& mesh = group.communicator->mesh;
  const PlanView plan = table.plan.view();
  ++lane.calls;
  lane.groups += plan.groups;
  const Call call{plan,        lane.shm.channel, buffer,     home,
                  table.dtype, lane.calls,       lane.groups};
  const uint64_t ranks = static_cast<uint64_t>(mesh.nodes) * mesh.rails;
  const bool streaming = table.buffer_bytes * ranks > kCacheBytes;
  const ShmTag tag = tag_of(table, group.digest, buffer, home);
  if (table.operation == Operation::all_gather_v) {
    lane.running = std::make_unique<RunningOf<AllGatherV>>(lane.shm, call, streaming, tag);
  } else {
    lane.running = std::make_unique<RunningOf<ReduceScatterV>>(lane.shm, call, streaming, tag);
  }
}

// Runs the lane's call on. paused: null: to its end; else set to whether it paused.
int go_on(const dmuon_group& group, Lane& lane, int32_t* paused) {
  dmuon_communicator& c = *group.communicator;
  const ShmEnd end = lane.running->run(c.mesh.timeout_seconds, c.spins, paused != nullptr);
  if (end.paused) {
    *paused = 1;
    return DMUON_OK;
  }
  if (paused != nullptr) *paused = 0;
  const std::unique_ptr<RunningCall> running = std::move(lane.running);
  if (!end.ended) {
    lane.report = {static_cast<int32_t>(end.stuck.wait), end.stuck.queue, end.stuck.peer, end.group,
                   end.stuck.chunk, lane.calls};
    lane.text = end.disagreement.found
                    ? describe(c.mesh, group.table, lane.calls, running->tag(), end.disagreement,
                               c.names)
                    : describe(c.mesh, group.table.operation, group.table.label, lane.report);
  }
  // Invariant: all of the lane is written before: another thread may take it now.
  lane.busy = false;
  if (end.ended) return DMUON_OK;
  return fail(end.disagreement.found ? DMUON_BROKEN : DMUON_TIMEOUT, lane.text);
}

int call(const dmuon_group& group, uint64_t buffer, uint64_t home, int32_t* paused) {
  const GroupTable& table = group.table;
  const std::string where = std::string(name_of(table.operation)) + " of " + table.label;
  Lane& lane = group.lane();
  if (paused != nullptr && *paused != 0) {
    if (lane.running == nullptr) refuse(where + ": no call has paused");
    return go_on(group, lane, paused);
  }
  check_places(table, group.communicator->mesh, buffer, home);
  LaneUse use(lane, where);
  if (!lane.text.empty()) return fail(DMUON_BROKEN, "after a failed call: " + lane.text);
  begin(group, lane, buffer, home);
  use.keep();
  return go_on(group, lane, paused);
}

// A call that has paused does not go on: the other ranks wait for it until their limit.
void give_up(const dmuon_group& group) {
  Lane& lane = group.lane();
  if (lane.running == nullptr) return;
  lane.running.reset();
  lane.report = {0, -1, -1, -1, 0, lane.calls};
  const dmuon_mesh& mesh = group.communicator->mesh;
  lane.text = std::string(name_of(group.table.operation)) + " of " + group.table.label + ": rank " +
              named(mesh, mesh.rank) + " was interrupted in call " + std::to_string(lane.calls);
  lane.busy = false;
}

}  // namespace
}  // namespace dmuon

extern "C" {

const char* dmuon_error(void) { return dmuon::last_error().c_str(); }

int dmuon_shm_open(const char* job, const int32_t* stop, const dmuon_mesh* mesh,
                   dmuon_communicator** communicator) {
  return dmuon::guarded([&] {
    auto c = std::make_unique<dmuon_communicator>();
    c->mesh = *mesh;
    if (c->mesh.chunk_bytes == 0) c->mesh.chunk_bytes = dmuon::kChunkBytes;
    if (c->mesh.slots == 0) c->mesh.slots = dmuon::kShmSlots;
    dmuon::check_job(job);
    dmuon::check_mesh(c->mesh);
    dmuon::keep_names(c->mesh, c->ranks);
    c->spins = dmuon::spins_for(mesh->nodes * mesh->rails);
    dmuon::open(job, stop, *c);
    *communicator = c.release();
    return static_cast<int>(DMUON_OK);
  });
}

int dmuon_shm_attach(dmuon_communicator* communicator) {
  return dmuon::guarded([&] {
    try {
      dmuon::attach(*communicator);
    } catch (const dmuon::ShmTimeout& error) {
      return dmuon::fail(DMUON_TIMEOUT, error.what());
    }
    return static_cast<int>(DMUON_OK);
  });
}

int dmuon_memory_of(const dmuon_communicator* communicator, dmuon_memory* memory) {
  *memory = communicator->memory;
  return DMUON_OK;
}

int dmuon_group_create(dmuon_communicator* communicator, const char* label, int32_t operation,
                       int32_t dtype, const dmuon_segment* segments, uint64_t count,
                       uint64_t buffer_bytes, uint64_t home_bytes, dmuon_group** group) {
  return dmuon::guarded([&] {
    dmuon::check_operation(operation);
    *group = new dmuon_group{
        communicator,
        dmuon::make_table(communicator->lanes[operation].shm.channel, communicator->mesh, label,
                          dtype, segments, count, buffer_bytes, home_bytes),
        dmuon::digest_of(static_cast<dmuon::Operation>(operation), label, dtype, segments, count,
                         buffer_bytes, home_bytes)};
    communicator->names.add(label);
    ++communicator->groups;
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
  return dmuon::guarded([&] {
    if (stream != nullptr) dmuon::refuse("shm has no streams: stream must be null");
    return dmuon::call(*group, buffer, home, nullptr);
  });
}

int dmuon_shm_call(dmuon_group* group, uint64_t buffer, uint64_t home, int32_t* paused) {
  return dmuon::guarded([&] { return dmuon::call(*group, buffer, home, paused); });
}

int dmuon_shm_give_up(dmuon_group* group) {
  return dmuon::guarded([&] {
    dmuon::give_up(*group);
    return DMUON_OK;
  });
}

int dmuon_stuck(const dmuon_communicator* communicator, int32_t operation,
                dmuon_stuck_report* report) {
  return dmuon::guarded([&] {
    dmuon::check_channel(operation);
    const dmuon::Lane& lane = communicator->lanes[operation];
    *report = lane.report;
    if (lane.text.empty()) return static_cast<int>(DMUON_OK);
    return dmuon::fail(DMUON_TIMEOUT, lane.text);
  });
}

int dmuon_group_destroy(dmuon_group* group) {
  --group->communicator->groups;
  delete group;
  return DMUON_OK;
}

int dmuon_close(dmuon_communicator* communicator) {
  if (communicator->groups > 0) {
    return dmuon::fail(DMUON_BAD_ARGUMENT, "close: " + std::to_string(communicator->groups) +
                                               " groups are still there; destroy them first");
  }
  delete communicator;
  return DMUON_OK;
}

}  // extern "C"
