// The table of allocation signatures under threads: backwards of several tables at once, tensors
// that other threads free, threads without a scope. Prints "ok", or what is wrong.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../allocator/signatures.h"

using namespace dmuon::allocator;

namespace {

constexpr int kLayers = 4;
constexpr int kParameters = 6;  // of a layer
constexpr uint64_t kBytes = 64;

[[noreturn]] void fail(const char* text, int64_t value) {
  std::printf("%s: %lld\n", text, static_cast<long long>(value));
  std::exit(1);
}

// Frees on a thread of its own, as autograd's and the caller's threads do.
class Freer {
 public:
  ~Freer() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    thread_.join();
  }

  void add(Ticket* ticket) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(ticket);
  }

  bool empty() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }

 private:
  void run() {
    for (;;) {
      Ticket* ticket = nullptr;
      {
        const std::lock_guard lock(mutex_);
        if (queue_.empty() && done_) return;
        if (!queue_.empty()) {
          ticket = queue_.front();
          queue_.pop_front();
          busy_ = true;
        }
      }
      if (ticket == nullptr) {
        std::this_thread::yield();
        continue;
      }
      Table::end(ticket);
      const std::lock_guard lock(mutex_);
      busy_ = false;
    }
  }

  std::mutex mutex_;
  std::deque<Ticket*> queue_;
  bool busy_ = false;
  bool done_ = false;
  std::thread thread_{[this] { run(); }};
};

// One backward: temporaries of changing sizes between the gradients. A layer's tensors are freed
// while the next ones' are made.
void backward(Table& table, Freer& freer, char* memory, std::mt19937& random, bool first) {
  std::vector<std::unique_ptr<char[]>> ordinary;
  std::vector<int> nodes(kLayers * kParameters);
  // What still lives in a place keeps the next gradient out of it.
  while (!freer.empty()) std::this_thread::yield();
  table.begin();
  for (int layer = 0; layer < kLayers; ++layer) {
    char* own = memory + layer * kParameters * kBytes;
    std::vector<Place> places;
    for (int i = 0; i < kParameters; ++i) {
      char* place = own + i * kBytes;
      places.push_back({layer * kParameters + i, place, kBytes, std::make_shared<int>(i)});
    }
    table.enter(layer, std::move(places));
    std::vector<Ticket*> held;
    for (int i = 0; i < kParameters; ++i) {
      const Node node{&nodes[layer * kParameters + i], 0, &nodes};
      const auto allocate = [&](uint64_t bytes) -> const void* {
        const auto current = Table::current();
        if (current.get() != &table) fail("not the table of this thread", layer);
        uint64_t record;
        if (Ticket* ticket = current->claim(bytes, node, &record)) {
          held.push_back(ticket);
          return ticket->data;
        }
        ordinary.push_back(std::make_unique<char[]>(bytes));
        current->note(record, ordinary.back().get());
        return ordinary.back().get();
      };
      allocate(kBytes + 1 + random() % 100);
      const void* gradient = allocate(kBytes);
      allocate(kBytes);
      const Outcome outcome = table.deliver({layer * kParameters + i, gradient, kBytes, true});
      const Outcome wanted = first ? Outcome::learned : Outcome::in_place;
      if (outcome != wanted) fail("outcome", static_cast<int64_t>(outcome));
      table.withdraw(layer * kParameters + i);
    }
    table.leave();
    if (table.living(own, kParameters * kBytes).size() != held.size()) fail("living", layer);
    for (Ticket* ticket : held) freer.add(ticket);
  }
}

void train(int seed, int steps) {
  std::mt19937 random(seed);
  Freer freer;
  std::vector<char> memory(kLayers * kParameters * kBytes);
  const auto table = std::make_shared<Table>(kLayers * kParameters, 0);
  for (int step = 0; step < steps; ++step) {
    backward(*table, freer, memory.data(), random, step == 0);
  }
  const int64_t hits = table->counters().hits;
  if (hits != int64_t{kLayers} * kParameters * (steps - 1)) fail("hits", hits);
  table->enter(0, {});  // left open: the next thread's scopes must not care
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 50;
  std::atomic<bool> done{false};
  std::thread idle([&] {
    while (!done) {
      if (Table::current() != nullptr) fail("a thread without a scope has a table", 0);
    }
  });
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back(train, 10 * round + i, steps);
    for (std::thread& thread : threads) thread.join();
  }
  done = true;
  idle.join();
  if (Table::current() != nullptr) fail("a table at the end", 0);
  std::printf("ok\n");
}
