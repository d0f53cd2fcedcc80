// Many calls of both operators at once, ranks and thread groups as threads of one process, so that
// ThreadSanitizer and AddressSanitizer see every access. Prints one line; exit status 1 and the
// first difference on standard error if a byte is wrong.
//
// shm_stress NODES RAILS GATHER_NODES CHUNK_BYTES SLOTS CALLS SEED WORKERS SPINS
//   WORKERS: threads per rank and channel among which the thread groups of a call are divided; 16
//   gives each its own.
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "../core/allgatherv.h"
#include "../core/reducescatterv.h"
#include "../core/table.h"
#include "../fabric/shm_run.h"
#include "stress.h"

namespace dmuon {
namespace {

constexpr double kLimitSeconds = 60;
constexpr unsigned char kUntouched = 0xEE;

struct Options {
  int nodes, rails, gather_nodes, chunk, slots, calls;
  unsigned seed;
  int workers, spins;

  int ranks() const { return nodes * rails; }
};

// A call's table and payload, computed alike by every rank.
struct Scene {
  std::vector<Segment> segments;
  uint64_t bytes = 0;
  Dtype dtype = Dtype::float32;

  Scene(const Channel& channel, const Options& options, uint64_t number) {
    std::mt19937_64 random(options.seed * 1000003ull + number * 2 +
                           static_cast<uint64_t>(channel.operation));
    const auto below = [&](uint64_t n) { return random() % n; };
    dtype = below(2) ? Dtype::float32 : Dtype::bfloat16;
    // One call in three is small enough for the star path.
    const uint64_t longest = below(3) ? options.chunk * 6 : 40;
    const uint64_t count = below(3) ? 1 + below(6) : 1 + below(60);
    const bool one_owner = below(4) == 0;
    const auto only_node = static_cast<int>(below(channel.nodes));
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t length = below(longest);
      if (channel.operation == Operation::reduce_scatter_v) length -= length % 4;
      const int node = one_owner ? only_node : static_cast<int>(below(channel.nodes));
      segments.push_back({bytes, bytes, length, node, static_cast<int>(below(channel.rails))});
      bytes += round_up(length, kAlignment) + kAlignment * below(3);
    }
  }
};

uint64_t user_bytes(const Options& o) { return 60 * (round_up(o.chunk * 6, 16) + 64); }

// One rank's end of one channel.
struct End {
  ShmChannel shm;
  int rank = 0;  // among the ranks that this channel connects
  std::byte* buffer = nullptr;
  std::byte* home = nullptr;
  uint64_t buffer_offset = 0, home_offset = 0;
};

float value_of(int rank, uint64_t element, uint64_t number) {
  return static_cast<float>((rank * 7 + element * 3 + number * 5) % 9) - 4;
}

void store(Dtype dtype, std::byte* place, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto half = static_cast<uint16_t>(bits >> 16);  // small integers: exact
  if (dtype == Dtype::float32) {
    std::memcpy(place, &bits, 4);
  } else {
    std::memcpy(place, &half, 2);
  }
}

bool owns(const Segment& s, const Channel& c) { return s.node == c.node && s.rail == c.rail; }

std::byte pattern(uint64_t number, size_t segment, uint64_t i) {
  return static_cast<std::byte>(number * 31 + segment * 7 + i * 13);
}

void prepare(const Scene& scene, const End& end, uint64_t number) {
  const Channel& c = end.shm.channel;
  std::memset(end.buffer, kUntouched, scene.bytes);
  std::memset(end.home, kUntouched, scene.bytes);
  const uint64_t width = scene.dtype == Dtype::float32 ? 4 : 2;
  for (size_t j = 0; j < scene.segments.size(); ++j) {
    const Segment& s = scene.segments[j];
    if (c.operation == Operation::all_gather_v) {
      if (!owns(s, c)) continue;
      for (uint64_t i = 0; i < s.bytes; ++i) end.buffer[s.offset + i] = pattern(number, j, i);
    } else {
      for (uint64_t i = 0; i < s.bytes; i += width) {
        store(scene.dtype, end.buffer + s.offset + i, value_of(end.rank, i / width, number));
      }
    }
  }
}

void check(const Scene& scene, const End& end, uint64_t number) {
  const Channel& c = end.shm.channel;
  const bool gather = c.operation == Operation::all_gather_v;
  const int ranks = c.nodes * c.rails;
  const uint64_t width = scene.dtype == Dtype::float32 ? 4 : 2;
  const std::byte* at = gather ? end.buffer : end.home;
  uint64_t behind = 0;
  const auto wrong = [&](const char* what, size_t j, uint64_t i) {
    die(std::string(gather ? "gather" : "reduce") + " call " + std::to_string(number) + ": rank " +
        std::to_string(end.rank) + " has " + what + ", segment " + std::to_string(j) + " byte " +
        std::to_string(i));
  };
  for (size_t j = 0; j < scene.segments.size(); ++j) {
    const Segment& s = scene.segments[j];
    for (uint64_t i = behind; i < s.offset; ++i) {
      if (at[i] != std::byte{kUntouched}) wrong("a byte between segments overwritten before", j, i);
    }
    behind = s.offset + round_up(s.bytes, kAlignment);
    if (!gather && !owns(s, c)) {
      for (uint64_t i = s.offset; i < behind; ++i) {
        if (at[i] != std::byte{kUntouched}) wrong("a sum that it does not own", j, i);
      }
      continue;
    }
    for (uint64_t i = 0; gather && i < s.bytes; ++i) {
      if (at[s.offset + i] != pattern(number, j, i)) wrong("a wrong byte", j, i);
    }
    for (uint64_t i = 0; !gather && i < s.bytes; i += width) {
      float total = 0;
      for (int rank = 0; rank < ranks; ++rank) total += value_of(rank, i / width, number);
      std::byte expected[4];
      store(scene.dtype, expected, total);
      if (std::memcmp(expected, at + s.offset + i, width) != 0) wrong("a wrong sum", j, i);
    }
  }
}

template <class Operator>
void work(End& end, const Options& options, int worker, pthread_barrier_t* barrier,
          std::atomic<uint64_t>* late) {
  std::mt19937 random(options.seed + end.rank * 131 + worker);
  uint64_t groups = 0;
  for (int n = 1; n <= options.calls; ++n) {
    const auto number = static_cast<uint64_t>(n);
    const Scene scene(end.shm.channel, options, number);
    const uint32_t element =
        std::is_same_v<Operator, AllGatherV> ? 1 : scene.dtype == Dtype::float32 ? 4 : 2;
    const Plan plan(end.shm.channel, scene.segments, scene.bytes, scene.bytes, element);
    const PlanView view = plan.view();
    groups += view.groups;
    const Call call{view,        end.shm.channel, end.buffer_offset, end.home_offset,
                    scene.dtype, number,          groups};
    if (worker == 0) {
      if (random() % 8 == 0) usleep(random() % 300);
      prepare(scene, end, number);
    }
    pthread_barrier_wait(barrier);  // a stream's order: what was written is there before the call
    const int first = worker * view.groups / options.workers;
    const int behind = (worker + 1) * view.groups / options.workers;
    if (behind > first) {
      ShmRun<Operator> run(end.shm, call, first, behind - first, number % 2 == 0,
                           ShmTag{scene.bytes, number});
      const ShmEnd result = run.run(kLimitSeconds, options.spins);
      if (!result.ended) {
        die("call " + std::to_string(n) + ": stuck, wait " +
            std::to_string(static_cast<int>(result.stuck.wait)) + ", queue " +
            std::to_string(result.stuck.queue) +
            (result.disagreement.found ? ", ranks disagree" : ""));
      }
      *late += result.late;
    }
    pthread_barrier_wait(barrier);
    if (worker == 0) check(scene, end, number);
    // Nobody prepares the next call before this one is checked: worker 0 does both.
  }
}

Channel channel_of(const Options& o, Operation operation, int rank, uint64_t ring_base) {
  const bool gather = operation == Operation::all_gather_v;
  const int nodes = gather ? o.gather_nodes : o.nodes;
  return make_channel(operation, nodes, o.rails, rank / o.rails % nodes, rank % o.rails, o.chunk,
                      o.slots, ring_base);
}

void stress(const Options& o) {
  const uint64_t user = user_bytes(o);
  const uint64_t ring_base = round_up(3 * user, 64);
  const uint64_t gather_rings = channel_of(o, Operation::all_gather_v, 0, 0).ring_bytes();
  const uint64_t reduce_base = ring_base + gather_rings;
  const uint64_t window =
      reduce_base + channel_of(o, Operation::reduce_scatter_v, 0, 0).ring_bytes();
  std::vector<std::unique_ptr<std::byte[]>> windows;
  std::vector<std::unique_ptr<std::byte[]>> words[2];
  const auto aligned = [](std::byte* p) {
    return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(p), 64));
  };
  for (int rank = 0; rank < o.ranks(); ++rank) {
    windows.emplace_back(new std::byte[window + 64]);
    for (int i = 0; i < 2; ++i) {
      const Channel c = channel_of(o, static_cast<Operation>(i), rank, 0);
      words[i].emplace_back(new std::byte[ShmWords::bytes(c) + 64]());
    }
  }
  std::vector<std::unique_ptr<End>> ends;
  std::vector<std::unique_ptr<pthread_barrier_t>> barriers;
  std::vector<std::thread> threads;
  std::atomic<uint64_t> late{0};
  for (int i = 0; i < 2; ++i) {
    const auto operation = static_cast<Operation>(i);
    for (int rank = 0; rank < o.ranks(); ++rank) {
      auto end = std::make_unique<End>();
      end->shm.channel = channel_of(o, operation, rank, i == 0 ? ring_base : reduce_base);
      const Channel& c = end->shm.channel;
      const int first_node = rank / o.rails - c.node;
      const auto view = [&](int node, int rail) {
        const int peer = (first_node + node) * o.rails + rail;
        return ShmRank{aligned(windows[peer].get()),
                       reinterpret_cast<ShmWords*>(aligned(words[i][peer].get()))};
      };
      for (int k = 0; k < c.rails; ++k) end->shm.rails.push_back(view(c.node, k));
      for (int r = 0; r < c.nodes; ++r) end->shm.nodes.push_back(view(r, c.rail));
      end->shm.cursors.resize(c.cursors());
      end->shm.counters.resize(c.counters());
      end->shm.compared.resize(c.signals());
      end->rank = c.node * c.rails + c.rail;
      end->buffer_offset = i == 0 ? 0 : user;
      end->home_offset = i == 0 ? 0 : 2 * user;
      end->buffer = end->shm.own().window + end->buffer_offset;
      end->home = end->shm.own().window + end->home_offset;
      barriers.push_back(std::make_unique<pthread_barrier_t>());
      pthread_barrier_init(barriers.back().get(), nullptr, o.workers);
      for (int worker = 0; worker < o.workers; ++worker) {
        threads.emplace_back(i == 0 ? work<AllGatherV> : work<ReduceScatterV>, std::ref(*end), o,
                             worker, barriers.back().get(), &late);
      }
      ends.push_back(std::move(end));
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("calls %d late %llu\n", o.calls, static_cast<unsigned long long>(late));
}

}  // namespace
}  // namespace dmuon

int main(int argc, char** argv) {
  if (argc != 10) dmuon::die("expected 9 arguments, see the top of shm_stress.cpp");
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  dmuon::stress({number(1), number(2), number(3), number(4), number(5), number(6),
                 static_cast<unsigned>(number(7)), number(8), number(9)});
  return 0;
}
