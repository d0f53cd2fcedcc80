// Many steps of a publish, ranks as threads of one process, so that ThreadSanitizer and
// AddressSanitizer see every access. Each rank has three threads: its update, its publish call and
// its gather. Prints one line; exit status 1 and the first difference on standard error if a byte is
// wrong.
//
// publish_stress NODES TILE_BYTES SLOTS STEPS SEED SPINS PAUSE
//   PAUSE: most microseconds that an update, or a gather, pauses before one task in six.
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "../core/publish_table.h"
#include "../fabric/shm_publish.h"
#include "../fabric/shm_run.h"
#include "stress.h"

namespace dmuon {
namespace {

constexpr double kLimitSeconds = 60;
constexpr unsigned char kUntouched = 0xEE;

struct Options {
  int nodes, tile, slots, steps;
  unsigned seed;
  int spins, pause;
};

struct Rank {
  Rank(const Options& o, const RandomTasks& table, int node)
      : channel(make_channel(Operation::publish, o.nodes, 1, node, 0, o.tile, o.slots, 0)),
        plan(channel, table.tasks, table.bytes),
        flags(static_cast<uint32_t>(table.tasks.size())),
        window(new std::byte[table.bytes + 64]),
        words(new std::byte[ShmWords::bytes(channel) + 64]()),
        cursors(o.nodes) {
    std::memset(at(), kUntouched, table.bytes);
  }
  static std::byte* aligned(std::byte* p) {
    return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(p), 64));
  }
  std::byte* at() const { return aligned(window.get()); }
  ShmRank view() const { return {at(), reinterpret_cast<ShmWords*>(aligned(words.get()))}; }

  Channel channel;
  PublishPlan plan;
  ShmFlags flags;
  std::unique_ptr<std::byte[]> window, words;
  std::vector<PublishCursor> cursors;
  ShmChannel shm;
};

std::byte pattern(uint64_t step, uint32_t task, uint64_t i) {
  return static_cast<std::byte>(step * 31 + task * 7 + i * 13);
}

void pause(const Options& o, std::mt19937& random) {
  if (random() % 6 == 0) usleep(random() % o.pause);
}

void update(const Options& o, Rank& rank, pthread_barrier_t* met) {
  std::mt19937 random(o.seed * 7 + rank.channel.node);
  const PublishStream& own = rank.plan.streams()[rank.channel.node];
  for (int step = 1; step <= o.steps; ++step) {
    for (uint32_t i = 0; i < own.tasks; ++i) {
      const PublishTask& task = rank.plan.tasks()[own.first + i];
      pause(o, random);
      for (uint64_t x = 0; x < task.bytes; ++x) {
        rank.at()[task.offset + x] = pattern(step, task.number, x);
      }
      rank.flags.release(task.number, step, static_cast<uint64_t>(own.tasks) * (step - 1) + i + 1,
                         rank.shm.own().words->bell);
    }
    pthread_barrier_wait(met);  // the step rule: all threads of all ranks
  }
}

void publish(const Options& o, Rank& rank, pthread_barrier_t* met, std::atomic<uint64_t>* late) {
  const PublishStream& own = rank.plan.streams()[rank.channel.node];
  for (int step = 1; step <= o.steps; ++step) {
    const auto number = static_cast<uint64_t>(step);
    const PublishCall call{rank.plan.view(), rank.channel, 0, number, own.tasks * (number - 1)};
    ShmPublishFabric fabric(rank.shm, rank.flags, own.tasks * number);
    using GroupType = PublishGroup<ShmPublishFabric>;
    ShmDriver<GroupType, ShmPublishFabric> driver(fabric, {GroupType(call, rank.cursors.data())});
    const auto outcome = driver.run(kLimitSeconds, o.spins);
    if (!outcome.ended) die("step " + std::to_string(step) + ": stuck");
    *late += outcome.late;
    pthread_barrier_wait(met);
  }
}

void gather(const Options& o, Rank& rank, const RandomTasks& table, pthread_barrier_t* met) {
  std::mt19937 random(o.seed * 11 + rank.channel.node);
  for (int step = 1; step <= o.steps; ++step) {
    for (uint64_t first = 0; first < table.tasks.size();) {
      const uint64_t end = std::min<uint64_t>(table.tasks.size(), first + 1 + random() % 5);
      ShmFlags::Waiting waiting = rank.flags.waiting(first, end, step);
      if (rank.flags.wait(waiting, kLimitSeconds, false) != ShmFlags::Wait::over) {
        die("step " + std::to_string(step) + ": task " + std::to_string(waiting.next) +
            " did not come");
      }
      pause(o, random);
      for (uint64_t i = first; i < end; ++i) {
        const Segment& task = table.tasks[i];
        const uint64_t padded = round_up(task.bytes, kAlignment);
        // From the end: see publish_block.cpp.
        for (uint64_t x = padded; x-- > 0;) {
          if (rank.at()[task.offset + x] != pattern(step, static_cast<uint32_t>(i), x)) {
            die("step " + std::to_string(step) + ": rank " + std::to_string(rank.channel.node) +
                " has a wrong byte in task " + std::to_string(i));
          }
        }
        for (uint64_t x = padded; x < padded + kAlignment; ++x) {
          if (rank.at()[task.offset + x] != std::byte{kUntouched}) {
            die("step " + std::to_string(step) + ": byte behind task " + std::to_string(i));
          }
        }
      }
      first = end;
    }
    pthread_barrier_wait(met);
  }
}

void stress(const Options& o) {
  const RandomTasks table(o.nodes, o.tile, o.seed, kAlignment);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int node = 0; node < o.nodes; ++node) {
    ranks.push_back(std::make_unique<Rank>(o, table, node));
  }
  for (auto& rank : ranks) {
    rank->shm.channel = rank->channel;
    rank->shm.rails.push_back(rank->view());
    for (const auto& peer : ranks) rank->shm.nodes.push_back(peer->view());
    rank->shm.counters.resize(rank->channel.counters());
  }
  pthread_barrier_t met;
  pthread_barrier_init(&met, nullptr, 3 * o.nodes);
  std::atomic<uint64_t> late{0};
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&] { update(o, *rank, &met); });
    threads.emplace_back([&] { publish(o, *rank, &met, &late); });
    threads.emplace_back([&] { gather(o, *rank, table, &met); });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("steps %d late %llu\n", o.steps, static_cast<unsigned long long>(late));
}

}  // namespace
}  // namespace dmuon

int main(int argc, char** argv) {
  if (argc != 8) dmuon::die("expected 7 arguments, see the top of publish_stress.cpp");
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  dmuon::stress({number(1), number(2), number(3), number(4), static_cast<unsigned>(number(5)),
                 number(6), number(7)});
  return 0;
}
