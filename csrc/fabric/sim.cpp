#include "fabric/sim.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "fabric/sim_clock.h"
#include "fabric/sim_group.h"
#include "fabric/sim_memory.h"
#include "fabric/sim_watch.h"
#include "fabric/sim_wire.h"

namespace dmuon::sim {
namespace {

class World;

enum class Kind : uint8_t { step, add, leave, capture, move };
using Event = EventOf<Kind>;

// The operations of one thread group. Words are read as they are when its step begins: a change
// during a step is seen in the next. Ports give their time in the order in which steps begin.
class GroupFabric final : public Fabric {
 public:
  bool entered(int rail, uint64_t number) override;
  void enter(uint64_t number) override;
  bool finished(uint64_t count) override;
  void finish() override;
  void fetch(uint64_t to, int rail, uint64_t from, uint64_t n) override;
  void multicast(uint64_t to, int rail, uint64_t from, uint64_t n, int except) override;
  void reduce(int rail, uint64_t to, uint64_t from, uint64_t n, Dtype dtype, uint64_t partials,
              int count, uint64_t stride) override;
  void put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) override;
  void signal(int node, int signal) override;
  uint64_t read_signal(int signal) override;
  uint64_t read_counter(int counter) override;

  World* world = nullptr;
  int32_t rank = 0;
  int32_t group = 0;  // of all ranks' groups, for the memory
  uint64_t number = 0;
  Time clock = 0;
};

struct GroupState {
  GroupFabric fabric;
  std::unique_ptr<Actor> actor;
  bool asleep = false;
};

struct Rank {
  Port nic_out, nic_in, nvlink_out, nvlink_in;
  Time left = 0;
  size_t calls = 0;  // launched
  int open = 0;      // groups of the present call that have not finished
  Call call{};
  std::vector<uint32_t> words;
  std::vector<Cursor> cursors;
  std::vector<GroupState> groups;  // their places do not change during a call
};

// A table as one rail sees it; the same at all nodes.
struct Table {
  explicit Table(Plan p) : plan(std::move(p)) {}
  Plan plan;
  std::vector<int32_t> waiter;  // per word the group that waits for it; -1: all
};

class World {
 public:
  World(const Config& config, const std::vector<std::vector<Segment>>& calls,
        MakeActor make_actor, Watch* watch);
  Result run();

 private:
  friend class GroupFabric;

  // Words of a rank: signals, counters, and per rail of the node calls entered, groups finished.
  uint32_t counter_word(int counter) const { return channel_.signals() + counter; }
  uint32_t enter_word(int rail) const {
    return channel_.signals() + channel_.counters() + rail;
  }
  uint32_t finish_word(int rail) const { return enter_word(rail) + channel_.rails; }

  void make_tables();
  void launch(int32_t rank, Time now);
  void step(const Event& event);
  void add(const Event& event);
  void leave(int32_t rank, Time now);
  void spend(GroupFabric& fabric, double us) { fabric.clock += picoseconds(us) + delays_.next(); }
  void add_later(Time time, int32_t rank, uint32_t word) {
    events_.push(time, Kind::add, rank, word);
  }
  void move(const GroupFabric& fabric, Memory::Move move);
  void release(const GroupFabric& fabric, Dropped unless);
  // When n bytes that start now or later have passed a rank's NVLink port.
  Time go_out(Time start, int32_t rank, uint64_t n, double gbs) {
    return ranks_[rank].nvlink_out.pass(now_, start, n, gbs);
  }
  Time come_in(Time start, int32_t rank, uint64_t n, double gbs) {
    return ranks_[rank].nvlink_in.pass(now_, start, n, gbs);
  }
  // The same of a copy from a rank to one of its node; inside one rank it passes none.
  Time copy(Time start, int32_t from, int32_t to, uint64_t n) {
    if (from == to) return start;
    return std::max(go_out(start, from, n, costs_.port_gbs),
                    come_in(start, to, n, costs_.port_gbs));
  }
  int32_t peer_rank(int32_t rank, int rail) const { return rank / rails_ * rails_ + rail; }
  [[noreturn]] void report_deadlock() const;

  const Config config_;
  const Costs& costs_;
  const std::vector<std::vector<Segment>>& segments_;
  const MakeActor make_actor_;
  const int rails_;
  Channel channel_;  // of rank 0
  Delays delays_;
  Watcher watcher_;  // counts pieces: each is multicast, or added, once per node
  std::unique_ptr<Memory> memory_;
  std::vector<std::vector<Table>> tables_;  // per call and rail
  std::vector<Rank> ranks_;
  EventsOf<Kind> events_;
  uint64_t steps_ = 0;
  Time now_ = 0;
};

// ---- operations ----

bool GroupFabric::entered(int rail, uint64_t call) {
  world->spend(*this, world->costs_.read_us);
  return world->ranks_[rank].words[world->enter_word(rail)] >= call;
}

bool GroupFabric::finished(uint64_t count) {
  world->spend(*this, world->costs_.read_us);
  for (int rail = 0; rail < world->rails_; ++rail) {
    if (world->ranks_[rank].words[world->finish_word(rail)] < count) return false;
  }
  return true;
}

uint64_t GroupFabric::read_signal(int signal) {
  world->spend(*this, world->costs_.read_us);
  return world->ranks_[rank].words[signal];
}

uint64_t GroupFabric::read_counter(int counter) {
  world->spend(*this, world->costs_.read_us);
  return world->ranks_[rank].words[world->counter_word(counter)];
}

void GroupFabric::enter(uint64_t call) {
  if (world->memory_) {
    if (world->config_.dropped != static_cast<int32_t>(Dropped::enter)) {
      world->memory_->release(-2 - rank);
    }
    world->memory_->enter(rank, call);
  }
  const int own = rank % world->rails_;
  for (int rail = 0; rail < world->rails_; ++rail) {
    world->add_later(clock + picoseconds(world->costs_.flag_us) + world->delays_.next(),
                     world->peer_rank(rank, rail), world->enter_word(own));
  }
}

void GroupFabric::finish() {
  world->release(*this, Dropped::finish);
  world->spend(*this, world->costs_.fence_us);
  const int own = rank % world->rails_;
  for (int rail = 0; rail < world->rails_; ++rail) {
    world->add_later(clock + picoseconds(world->costs_.flag_us) + world->delays_.next(),
                     world->peer_rank(rank, rail), world->finish_word(own));
  }
}

void GroupFabric::fetch(uint64_t to, int rail, uint64_t from, uint64_t n) {
  const Costs& costs = world->costs_;
  const Time ports = world->copy(clock, world->peer_rank(rank, rail), rank, n);
  clock = std::max(clock + picoseconds(n * 1e-3 / costs.copy_gbs), ports);
  world->spend(*this, costs.load_us);
  if (!world->memory_) return;
  Memory::Move move;
  move.reads.push_back({world->peer_rank(rank, rail), from, from + n});
  move.write = {rank, to, to + n};
  world->move(*this, std::move(move));
}

void GroupFabric::multicast(uint64_t to, int rail, uint64_t from, uint64_t n, int except) {
  const Costs& costs = world->costs_;
  const int32_t source = world->peer_rank(rank, rail);
  Time ports = world->copy(clock, source, rank, n);
  if (world->rails_ > 1) {
    // The switch writes to all ranks of the node, the sender included.
    ports = std::max(ports, world->go_out(clock, rank, n, costs.port_gbs));
    for (int k = 0; k < world->rails_; ++k) {
      const int32_t target = world->peer_rank(rank, k);
      ports = std::max(ports, world->come_in(clock, target, n, costs.port_gbs));
    }
  }
  clock = std::max(clock + picoseconds(n * 1e-3 / costs.multicast_gbs), ports);
  world->spend(*this, costs.store_us);
  world->watcher_.add();
  if (!world->memory_) return;
  const bool skip = world->delays_.toss();
  for (int k = 0; k < world->rails_; ++k) {
    if (k == except && skip) continue;
    Memory::Move move;
    move.reads.push_back({source, from, from + n});
    move.write = {world->peer_rank(rank, k), to, to + n};
    world->move(*this, std::move(move));
  }
}

void GroupFabric::reduce(int rail, uint64_t to, uint64_t from, uint64_t n, Dtype, uint64_t partials,
                    int count, uint64_t stride) {
  const Costs& costs = world->costs_;
  const int32_t target = world->peer_rank(rank, rail);
  Time ports = world->copy(clock, rank, target, n);
  if (world->rails_ > 1) {
    for (int k = 0; k < world->rails_; ++k) {
      const int32_t source = world->peer_rank(rank, k);
      ports = std::max(ports, world->go_out(clock, source, n, costs.port_reduce_gbs));
    }
    ports = std::max(ports, world->come_in(clock, rank, n, costs.port_reduce_gbs));
  }
  clock = std::max(clock + picoseconds(n * 1e-3 / costs.group_reduce_gbs), ports);
  world->spend(*this, costs.reduce_us);
  world->watcher_.add();
  if (!world->memory_) return;
  Memory::Move move;
  move.sum = true;
  for (int k = 0; k < world->rails_; ++k) {
    move.reads.push_back({world->peer_rank(rank, k), from, from + n});
  }
  for (int i = 0; i < count; ++i) {
    move.reads.push_back({rank, partials + i * stride, partials + i * stride + n});
  }
  move.write = {target, to, to + n};
  world->move(*this, std::move(move));
}

void GroupFabric::put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) {
  const Costs& costs = world->costs_;
  world->release(*this, Dropped::put);
  world->spend(*this, costs.put_us);
  const int32_t there = node * world->rails_ + rank % world->rails_;
  const PutTimes times = pass_put(costs, world->ranks_[rank].nic_out, world->ranks_[there].nic_in,
                                  world->now_, clock, n, [&] { return world->delays_.next(); });
  if (world->memory_) {
    Memory::Move move;
    move.number = number;
    move.reads.push_back({rank, from, from + n});
    move.write = {there, to, to + n};
    const uint32_t index = world->memory_->start(std::move(move), false);
    world->events_.push(times.read, Kind::capture, rank, index);
    world->events_.push(times.landed, Kind::move, rank, index);
  }
  world->add_later(times.signalled, there, signal);
  world->add_later(times.counted, rank, world->counter_word(counter));
}

void GroupFabric::signal(int node, int signal) {
  const Costs& costs = world->costs_;
  world->release(*this, Dropped::signal);
  world->spend(*this, costs.signal_us);
  const int32_t there = node * world->rails_ + rank % world->rails_;
  world->add_later(pass_signal(costs, world->ranks_[rank].nic_out, world->now_, clock,
                               [&] { return world->delays_.next(); }),
                   there, signal);
}

// ---- the loop ----

World::World(const Config& config, const std::vector<std::vector<Segment>>& calls,
             MakeActor make_actor, Watch* watch)
    : config_(config),
      costs_(config_.costs),
      segments_(calls),
      make_actor_(make_actor),
      rails_(config.rails),
      delays_(config.delay_us, config.seed),
      watcher_(watch) {
  make_tables();
  const auto operation = static_cast<Operation>(config.operation);
  if (config.carry) {
    memory_ = std::make_unique<Memory>(operation, static_cast<Dtype>(config.dtype), config.nodes,
                                       config.rails, config.buffer_bytes, config.home_bytes,
                                       channel_.ring_bytes(), config.seed);
  }
  ranks_ = std::vector<Rank>(static_cast<size_t>(config.nodes) * config.rails);
  for (Rank& rank : ranks_) {
    rank.words.assign(finish_word(rails_), 0);
    rank.cursors.assign(channel_.cursors(), Cursor{});
  }
}

void World::make_tables() {
  uint64_t pieces = 0;
  const uint64_t ring_base = config_.buffer_bytes + config_.home_bytes;
  for (const std::vector<Segment>& segments : segments_) {
    std::vector<Table>& tables = tables_.emplace_back();
    for (int rail = 0; rail < config_.rails; ++rail) {
      Channel channel =
          make_channel(static_cast<Operation>(config_.operation), config_.nodes, config_.rails, 0,
                       rail, config_.chunk_bytes == 0 ? kChunkBytes : config_.chunk_bytes,
                       config_.slots == 0 ? kSlots : config_.slots, ring_base);
      if (config_.lanes > 0) channel.lanes = config_.lanes;
      if (rail == 0) channel_ = channel;
      const uint32_t element = static_cast<Dtype>(config_.dtype) == Dtype::float32 ? 4 : 2;
      tables.emplace_back(Plan(
          channel, segments, config_.buffer_bytes, config_.home_bytes,
          static_cast<Operation>(config_.operation) == Operation::reduce_scatter_v ? element : 1));
      // Who waits for a ring's words. Entries and ends concern all.
      Table& table = tables.back();
      PlanView view = table.plan.view();
      const int groups = config_.groups > 0 ? config_.groups : view.groups;
      table.waiter.assign(finish_word(rails_), -1);
      uint32_t chunks = 0;
      for (int i = 0; i < view.pipeline_count; ++i) chunks += view.pipelines[i].chunks;
      pieces += view.chunk_pieces[chunks];
      if (view.star || channel.nodes == 1) continue;
      for (int i = 0; i < view.pipeline_count; ++i) {
        const Pipeline& p = view.pipelines[i];
        const int ring = channel.ring(p.queue, p.lane, false);
        for (int slot = 0; slot < channel.slots; ++slot) {
          table.waiter[channel.arrival_signal(ring, slot)] = i % groups;
          table.waiter[counter_word(channel.put_counter(ring, slot))] = i % groups;
        }
        table.waiter[channel.ack_signal(ring, 0)] = i % groups;
      }
    }
  }
  watcher_.begin(pieces * config_.nodes);
}

void World::launch(int32_t index, Time now) {
  Rank& rank = ranks_[index];
  const size_t c = rank.calls++;
  const uint64_t before = rank.call.groups_finished;
  Call& call = rank.call;
  call.plan = tables_[c][index % rails_].plan.view();
  if (config_.groups > 0) call.plan.groups = call.plan.blocks = config_.groups;
  call.channel = channel_;
  call.channel.node = index / rails_;
  call.channel.rail = index % rails_;
  call.buffer = 0;
  call.home = config_.buffer_bytes;
  call.dtype = static_cast<Dtype>(config_.dtype);
  call.number = c + 1;
  call.groups_finished = before + call.plan.groups;
  if (memory_) {
    for (const uint32_t move : memory_->launch(index, call.number, segments_[c])) {
      events_.push(now + delays_.next(), Kind::move, index, move);
    }
  }
  rank.groups.clear();
  rank.groups.resize(call.plan.groups);
  rank.open = call.plan.groups;
  for (int group = 0; group < call.plan.groups; ++group) {
    GroupState& state = rank.groups[group];
    state.fabric.world = this;
    state.fabric.rank = index;
    state.fabric.group = index * 1024 + group;
    state.fabric.number = call.number;
    state.actor.reset(make_actor_(call.channel.operation, &call, group, rank.cursors.data(),
                                  &state.fabric));
    events_.push(now + picoseconds(costs_.launch_us) + delays_.next(), Kind::step, index, group);
  }
}

void World::step(const Event& event) {
  Rank& rank = ranks_[event.rank];
  GroupState& group = rank.groups[event.what];
  group.fabric.clock = now_;
  ++steps_;
  switch (group.actor->step()) {
    case Progress::moved:
      events_.push(group.fabric.clock, Kind::step, event.rank, event.what);
      break;
    case Progress::idle:
      // It would ask again and again; whatever changes the answer wakes it.
      group.asleep = true;
      break;
    case Progress::finished:
      rank.left = std::max(rank.left, group.fabric.clock);
      if (--rank.open == 0) events_.push(rank.left, Kind::leave, event.rank, 0);
      break;
  }
}

void World::add(const Event& event) {
  Rank& rank = ranks_[event.rank];
  ++rank.words[event.what];
  if (rank.groups.empty()) return;
  const int32_t waiter = tables_[rank.calls - 1][event.rank % rails_].waiter[event.what];
  const int first = waiter < 0 ? 0 : waiter;
  const int last = waiter < 0 ? static_cast<int>(rank.groups.size()) : waiter + 1;
  for (int i = first; i < last; ++i) {
    GroupState& group = rank.groups[i];
    if (!group.asleep) continue;
    group.asleep = false;
    events_.push(std::max(now_, group.fabric.clock), Kind::step, event.rank, i);
  }
}

void World::leave(int32_t index, Time now) {
  Rank& rank = ranks_[index];
  if (memory_) memory_->leave(index, segments_[rank.calls - 1]);
  rank.groups.clear();
  if (rank.calls < segments_.size()) launch(index, now + delays_.next());
}

void World::move(const GroupFabric& fabric, Memory::Move move) {
  move.group = fabric.group;
  move.number = fabric.number;
  const uint32_t index = memory_->start(std::move(move), true);
  events_.push(fabric.clock + delays_.next(), Kind::move, fabric.rank, index);
}

void World::release(const GroupFabric& fabric, Dropped unless) {
  if (memory_ && config_.dropped != static_cast<int32_t>(unless)) memory_->release(fabric.group);
}

void World::report_deadlock() const {
  static const char* const names[] = {"nothing", "an entry", "a chunk", "an acknowledgement",
                                      "the end of a put", "the others' end"};
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    for (size_t group = 0; group < rank.groups.size(); ++group) {
      if (!rank.groups[group].asleep) continue;
      const Stuck stuck = rank.groups[group].actor->stuck();
      char text[256];
      std::snprintf(text, sizeof text,
                    "deadlock: call %" PRIu64 ", rank %zu, group %zu waits for %s of %d (queue %d, "
                    "chunk %" PRIu64 ")",
                    rank.call.number, i, group, names[static_cast<int>(stuck.wait)], stuck.peer,
                    stuck.queue, stuck.chunk);
      throw Violation(text);
    }
  }
  throw Violation("deadlock: no rank is in a call");
}

Result World::run() {
  for (size_t i = 0; i < ranks_.size(); ++i) launch(static_cast<int32_t>(i), delays_.next());
  while (!events_.empty()) {
    watcher_.look();
    const Event event = events_.pop();
    now_ = event.time;
    switch (event.kind) {
      case Kind::step: step(event); break;
      case Kind::add: add(event); break;
      case Kind::leave: leave(event.rank, now_); break;
      case Kind::capture: memory_->capture(event.what); break;
      case Kind::move: memory_->finish(event.what); break;
    }
  }
  Result result;
  Time last = 0;
  for (const Rank& rank : ranks_) {
    if (rank.calls < segments_.size() || !rank.groups.empty()) report_deadlock();
    last = std::max(last, rank.left);
    result.rank_us.push_back(static_cast<double>(rank.left) * 1e-6);
    result.links.push_back({rank.nic_out.bytes(), rank.nic_in.bytes(), rank.nvlink_out.bytes(),
                            rank.nvlink_in.bytes()});
  }
  if (memory_) memory_->end();
  watcher_.tell();
  result.us = static_cast<double>(last) * 1e-6;
  result.steps = steps_;
  result.groups = ranks_[0].call.plan.groups;
  result.star = ranks_[0].call.plan.star;
  return result;
}

}  // namespace

Result run(const Config& config, const std::vector<std::vector<Segment>>& calls,
           MakeActor make_actor, Watch* watch) {
  if (calls.empty()) throw TableError("no calls, expected 1 or more");
  return World(config, calls, make_actor, watch).run();
}

}  // namespace dmuon::sim
