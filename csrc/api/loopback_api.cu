// The C functions of loopback.h.
#include "loopback.h"

#include <memory>
#include <vector>

#include "../kernels/plan_image.h"
#include "loopback_device.h"

namespace dmuon {
namespace {

uint64_t draw(uint64_t seed, uint64_t rank, uint64_t call) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ull + rank * 0xbf58476d1ce4e5b9ull + call + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// One rank's end of one channel.
struct Lane {
  Channel channel;
  LoopbackWords words;
  DeviceMemory cursors;
  DeviceMemory guard;  // Report, then the word `broken`
};

struct RankTable {
  DeviceMemory memory;
  PlanView plan;
};

struct Table {
  std::string label;
  Operation operation;
  std::vector<GroupTable> frozen;  // by rank
  std::vector<RankTable> placed;
};

}  // namespace
}  // namespace dmuon

struct dmuon_loopback {
  dmuon_mesh mesh;
  uint64_t stride = 0;
  dmuon::DeviceMemory windows;
  std::vector<dmuon::Lane> lanes[dmuon::kOperations];  // by rank
  std::vector<dmuon::Table> tables;
  uint64_t calls[dmuon::kOperations] = {0, 0};
  uint64_t groups[dmuon::kOperations] = {0, 0};
  bool broken = false;

  int ranks() const { return mesh.nodes * mesh.rails; }
  dmuon_mesh mesh_of(int rank) const {
    dmuon_mesh own = mesh;
    own.rank = rank;
    return own;
  }
};

namespace dmuon {
namespace {

void open(dmuon_loopback& l) {
  // The window: user memory, each channel's rings, each channel's words.
  WindowLayout layout(l.mesh);
  for (int i = 0; i < kOperations; ++i) {
    const auto operation = static_cast<Operation>(i);
    const Channel any = layout.channel(operation);
    const uint64_t node_bytes = NodeWords::bytes(any.rails);
    const uint64_t signal_bytes = any.signals() * sizeof(uint64_t);
    const uint64_t words =
        layout.take(node_bytes + signal_bytes + any.counters() * sizeof(uint64_t));
    for (int rank = 0; rank < l.ranks(); ++rank) {
      const Channel channel = channel_of(l.mesh_of(rank), operation, any.ring_base);
      l.lanes[i].push_back({channel,
                            {NodeWords::place(words, channel.rails), words + node_bytes,
                             words + node_bytes + signal_bytes},
                            DeviceMemory(channel.cursors() * sizeof(Cursor)),
                            DeviceMemory(sizeof(Report) + sizeof(uint64_t))});
    }
  }
  l.stride = layout.bytes();
  l.windows = DeviceMemory(l.stride * l.ranks());
}

int add_table(dmuon_loopback& l, const char* label, int32_t operation, int32_t dtype,
              const dmuon_segment* segments, uint64_t count, uint64_t buffer_bytes,
              uint64_t home_bytes) {
  check_operation(operation);
  Table table{label, static_cast<Operation>(operation), {}, {}};
  for (int rank = 0; rank < l.ranks(); ++rank) {
    table.frozen.push_back(make_table(l.lanes[operation][rank].channel, l.mesh, label, dtype,
                                      segments, count, buffer_bytes, home_bytes));
    const PlanImage image(table.frozen.back().plan.view());
    DeviceMemory memory(image.bytes().size());
    memory.write(0, image.bytes().data(), image.bytes().size());
    const PlanView plan = image.at(memory.as<char>());
    table.placed.push_back({std::move(memory), plan});
  }
  l.tables.push_back(std::move(table));
  return DMUON_OK;
}

// The calls of all ranks, [rank][call], and what one block needs for any of them.
std::vector<LoopbackCall> make_calls(dmuon_loopback& l, const dmuon_loopback_call* calls,
                                     uint64_t count, uint64_t seed, uint64_t skew,
                                     LoopbackJob& job) {
  const auto limit = static_cast<uint64_t>(l.mesh.timeout_seconds * 1e9);
  std::vector<LoopbackCall> all(l.ranks() * count);
  for (uint64_t i = 0; i < count; ++i) {
    if (calls[i].table < 0 || calls[i].table >= static_cast<int>(l.tables.size())) {
      refuse("table " + std::to_string(calls[i].table) + ", expected one that was made");
    }
    const Table& table = l.tables[calls[i].table];
    const int operation = static_cast<int>(table.operation);
    check_places(table.frozen[0], l.mesh, calls[i].buffer, calls[i].home);
    ++l.calls[operation];
    l.groups[operation] += table.placed[0].plan.groups;
    for (int rank = 0; rank < l.ranks(); ++rank) {
      const Lane& lane = l.lanes[operation][rank];
      const Guard guard{limit, lane.guard.as<uint64_t>(sizeof(Report)), lane.guard.as<Report>()};
      const PlanView& plan = table.placed[rank].plan;
      all[rank * count + i] = {
          {plan, lane.channel, calls[i].buffer, calls[i].home, table.frozen[0].dtype,
           l.calls[operation], l.groups[operation]},
          span_of(l.mesh_of(rank), table.operation).first,
          lane.words,
          lane.cursors.as<Cursor>(),
          guard,
          skew == 0 ? 0 : draw(seed, rank, i) % skew};
      job.blocks = std::max(job.blocks, plan.groups);
      job.scratch = std::max(job.scratch, scratch_bytes(lane.channel, plan));
    }
  }
  return all;
}

int find_stuck(dmuon_loopback& l, const dmuon_loopback_call* calls, uint64_t count,
               dmuon_stuck_report* report) {
  for (int operation = 0; operation < kOperations; ++operation) {
    for (int rank = 0; rank < l.ranks(); ++rank) {
      Report found;
      l.lanes[operation][rank].guard.read(0, &found, sizeof found);
      if (found.written == 0) continue;
      l.broken = true;
      *report = {static_cast<int32_t>(found.stuck.wait), found.stuck.queue, found.stuck.peer,
                 found.group, found.stuck.chunk, found.number};
      std::string label = "?";
      uint64_t number = l.calls[operation];
      for (uint64_t i = count; i-- > 0;) {
        const Table& table = l.tables[calls[i].table];
        if (static_cast<int>(table.operation) != operation) continue;
        if (number-- == found.number) label = table.label;
      }
      return fail(DMUON_TIMEOUT,
                  describe(l.mesh_of(rank), static_cast<Operation>(operation), label, *report));
    }
  }
  return DMUON_OK;
}

int run(dmuon_loopback& l, const dmuon_loopback_call* calls, uint64_t count, uint64_t seed,
        uint64_t skew, int32_t absent, dmuon_stuck_report* report) {
  *report = {0, -1, -1, -1, 0, 0};
  if (l.broken) return fail(DMUON_BROKEN, "after a failed run");
  LoopbackJob job{};
  const auto all = make_calls(l, calls, count, seed, skew, job);
  DeviceMemory placed(all.size() * sizeof(LoopbackCall) + 1);
  placed.write(0, all.data(), all.size() * sizeof(LoopbackCall));
  DeviceMemory ended(l.ranks() * sizeof(uint64_t));
  job.calls = placed.as<LoopbackCall>();
  job.ended = ended.as<uint64_t>();
  job.windows = l.windows.as<char>();
  job.stride = l.stride;
  job.ranks = l.ranks();
  job.count = static_cast<int32_t>(count);
  job.absent = absent;
  run_blocks(job);
  return find_stuck(l, calls, count, report);
}

void check_range(const dmuon_loopback& l, int32_t rank, uint64_t offset, uint64_t bytes) {
  if (rank < 0 || rank >= l.ranks() || offset > l.mesh.user_bytes ||
      bytes > l.mesh.user_bytes - offset) {
    refuse("rank " + std::to_string(rank) + ", offset " + std::to_string(offset) + ", " +
           std::to_string(bytes) + " bytes: expected a rank of the mesh and a part of its memory");
  }
}

}  // namespace
}  // namespace dmuon

extern "C" {

const char* dmuon_error(void) { return dmuon::last_error().c_str(); }

int dmuon_loopback_open(const dmuon_mesh* mesh, dmuon_loopback** loopback) {
  return dmuon::guarded([&] {
    auto l = std::make_unique<dmuon_loopback>();
    l->mesh = *mesh;
    l->mesh.rank = 0;
    if (l->mesh.chunk_bytes == 0) l->mesh.chunk_bytes = dmuon::kChunkBytes;
    if (l->mesh.slots == 0) l->mesh.slots = dmuon::kSlots;
    dmuon::check_mesh(l->mesh);
    l->mesh.names = nullptr;  // threads have none
    dmuon::open(*l);
    *loopback = l.release();
    return DMUON_OK;
  });
}

int dmuon_loopback_table(dmuon_loopback* loopback, const char* label, int32_t operation,
                         int32_t dtype, const dmuon_segment* segments, uint64_t count,
                         uint64_t buffer_bytes, uint64_t home_bytes) {
  return dmuon::guarded([&] {
    return dmuon::add_table(*loopback, label, operation, dtype, segments, count, buffer_bytes,
                            home_bytes);
  });
}

int dmuon_loopback_write(dmuon_loopback* loopback, int32_t rank, uint64_t offset, const void* from,
                         uint64_t bytes) {
  return dmuon::guarded([&] {
    dmuon::check_range(*loopback, rank, offset, bytes);
    loopback->windows.write(rank * loopback->stride + offset, from, bytes);
    return DMUON_OK;
  });
}

int dmuon_loopback_read(dmuon_loopback* loopback, int32_t rank, uint64_t offset, void* to,
                        uint64_t bytes) {
  return dmuon::guarded([&] {
    dmuon::check_range(*loopback, rank, offset, bytes);
    loopback->windows.read(rank * loopback->stride + offset, to, bytes);
    return DMUON_OK;
  });
}

int dmuon_loopback_run(dmuon_loopback* loopback, const dmuon_loopback_call* calls, uint64_t count,
                       uint64_t seed, uint64_t skew, int32_t absent, dmuon_stuck_report* report) {
  return dmuon::guarded(
      [&] { return dmuon::run(*loopback, calls, count, seed, skew, absent, report); });
}

int dmuon_loopback_close(dmuon_loopback* loopback) {
  delete loopback;
  return DMUON_OK;
}

}  // extern "C"
