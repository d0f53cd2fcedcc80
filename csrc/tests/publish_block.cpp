// The publish's kernels with host threads for blocks, so that ThreadSanitizer sees what they do:
// every rank has a block of three threads, a thread that updates and releases, and one that waits
// and reads. Prints one line; exit status 1 and the first difference on standard error if a byte is
// wrong.
//
// publish_block NODES TILE_BYTES SLOTS STEPS SEED
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../core/publish_table.h"
#include "../fabric/loopback.cuh"
#include "../kernels/publish_block.cuh"
#include "stress.h"

namespace dmuon {
namespace {

constexpr uint32_t kThreads = 3;
constexpr uint64_t kLimit = 60'000'000'000;

struct Options {
  int nodes, tile, slots, steps;
  unsigned seed;
};

// The windows of all ranks: tasks, then the words of loopback.cuh.
struct World {
  World(const Options& o, const RandomTasks& table) {
    const Channel any = make_channel(Operation::publish, o.nodes, 1, 0, 0, o.tile, o.slots, 0);
    const uint64_t signals = table.bytes;
    const uint64_t counters = signals + any.signals() * sizeof(uint64_t);
    words = {{0, 0}, signals, counters};
    stride = round_up(counters + any.counters() * sizeof(uint64_t), 64);
    memory = std::make_unique<Vector[]>(stride * o.nodes / sizeof(Vector));
  }
  char* windows() const { return reinterpret_cast<char*>(memory.get()); }

  LoopbackWords words;
  uint64_t stride;
  std::unique_ptr<Vector[]> memory;
};

struct Rank {
  Rank(const Options& o, const RandomTasks& table, const World& world, int node)
      : channel(make_channel(Operation::publish, o.nodes, 1, node, 0, o.tile, o.slots, 0)),
        plan(channel, table.tasks, table.bytes),
        control_words(table.tasks.size() + 1, 0),
        control{control_words.data(), control_words.data() + 1},
        cursors(o.nodes),
        scratch(o.nodes),
        copy(world.windows() + node * world.stride) {
    pthread_barrier_init(&barrier, nullptr, kThreads);
  }
  Guard guard() { return {kLimit, &broken, &report}; }

  Channel channel;
  PublishPlan plan;
  std::vector<uint64_t> control_words;
  PublishControl control;
  std::vector<PublishCursor> cursors, scratch;
  char* copy;
  uint64_t broken = 0;
  Report report{};
  pthread_barrier_t barrier;
  uint64_t cells[2];
};

char pattern(uint64_t step, uint32_t task, uint64_t i) {
  return static_cast<char>(step * 31 + task * 7 + i * 13);
}

void call(const Options& o, const World& world, Rank& rank, uint32_t index,
          pthread_barrier_t* met) {
  host_thread = {index, kThreads, &rank.barrier, rank.cells};
  const uint64_t own = rank.plan.streams()[rank.channel.node].tasks;
  for (uint64_t step = 1; step <= static_cast<uint64_t>(o.steps); ++step) {
    const PublishCall next{rank.plan.view(), rank.channel, 0, step, own * (step - 1)};
    const Guard guard = rank.guard();
    PublishBlockFabric<LoopbackFabric> fabric(rank.control, world.windows(), world.stride,
                                              world.words, rank.channel);
    publish_block(fabric, next, rank.cursors.data(), reinterpret_cast<char*>(rank.scratch.data()),
                  guard);
    pthread_barrier_wait(met);
  }
}

void update(const Options& o, Rank& rank, pthread_barrier_t* met) {
  const PublishStream& own = rank.plan.streams()[rank.channel.node];
  uint64_t count = 0;
  for (uint64_t step = 1; step <= static_cast<uint64_t>(o.steps); ++step) {
    for (uint32_t i = own.first; i < own.first + own.tasks; ++i) {
      const PublishTask& task = rank.plan.tasks()[i];
      for (uint64_t x = 0; x < task.bytes; ++x) {
        rank.copy[task.offset + x] = pattern(step, task.number, x);
      }
      publish_release(rank.control, task.number, step, ++count);
    }
    pthread_barrier_wait(met);
  }
}

void read(const Options& o, const RandomTasks& table, Rank& rank, pthread_barrier_t* met) {
  const Guard guard = rank.guard();
  for (uint64_t step = 1; step <= static_cast<uint64_t>(o.steps); ++step) {
    for (uint32_t i = 0; i < table.tasks.size(); ++i) {
      publish_wait(rank.control, i, 1, step, 0, 1, guard);
      if (load_acquire(&rank.broken) != 0) die("step " + std::to_string(step) + ": stuck");
      // From the end: ThreadSanitizer remembers the last four accesses to eight bytes, and reads of
      // the first four would make it forget the update's last writes.
      for (uint64_t x = round_up(table.tasks[i].bytes, kAlignment); x-- > 0;) {
        if (rank.copy[table.tasks[i].offset + x] == pattern(step, i, x)) continue;
        die("step " + std::to_string(step) + ": rank " + std::to_string(rank.channel.node) +
            " has a wrong byte in task " + std::to_string(i));
      }
    }
    pthread_barrier_wait(met);
  }
}

void run(const Options& o) {
  const RandomTasks table(o.nodes, o.tile, o.seed, 0);
  const World world(o, table);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int node = 0; node < o.nodes; ++node) {
    ranks.push_back(std::make_unique<Rank>(o, table, world, node));
  }
  pthread_barrier_t met;  // the step rule
  pthread_barrier_init(&met, nullptr, (kThreads + 2) * o.nodes);
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    for (uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { call(o, world, *rank, i, &met); });
    }
    threads.emplace_back([&] { update(o, *rank, &met); });
    threads.emplace_back([&] { read(o, table, *rank, &met); });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("steps %d\n", o.steps);
}

}  // namespace
}  // namespace dmuon

int main(int argc, char** argv) {
  if (argc != 6) dmuon::die("expected 5 arguments, see the top of publish_block.cpp");
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  dmuon::run({number(1), number(2), number(3), number(4), static_cast<unsigned>(number(5))});
  return 0;
}
