#include "fabric/sim_publish.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "core/publish_table.h"
#include "fabric/sim_clock.h"
#include "fabric/sim_memory.h"
#include "fabric/sim_watch.h"
#include "fabric/sim_wire.h"

namespace dmuon::sim {
namespace {

// step: of the thread group. add: to a word. begin: of a step's updates. update, release, gather,
// gathered: of a task. call: its start. capture, land: of a put.
enum class Kind : uint8_t {
  step, add, begin, update, release, call, capture, land, gather, gathered
};
using Event = EventOf<Kind>;

class PublishWorld;

class NodeFabric final : public PublishFabric {
 public:
  void put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) override;
  void signal(int node, int signal) override;
  uint64_t read_signal(int signal) override;
  uint64_t read_counter(int counter) override;
  uint64_t released() override;
  void flag(uint32_t number, uint64_t step) override;

  PublishWorld* world = nullptr;
  int32_t node = 0;
  Time clock = 0;
};

struct Node {
  NodeFabric fabric;
  Port out, in;
  std::vector<uint32_t> words;  // signals, counters, releases
  std::vector<PublishCursor> cursors;
  PublishCall call{};
  std::unique_ptr<Actor> actor;
  bool asleep = false;
  uint64_t planned = 0;   // steps whose call is on its way
  uint64_t called = 0;    // steps whose call has begun
  uint64_t ended = 0;     // steps whose call has ended
  uint64_t updated = 0;   // the step of the updates
  uint32_t next = 0;      // own task to be updated
  uint32_t gathered = 0;  // tasks of the step that were read
  bool early = false;     // the first own task of the next step is being written
  std::vector<uint64_t> flags;
  Time begun = 0;  // the step
  Time left = 0;
};

class PublishWorld {
 public:
  PublishWorld(const PublishConfig& config, const std::vector<Segment>& tasks,
               const std::vector<double>& ready_us, MakePublishActor make_actor, Watch* watch);
  Result run();

 private:
  friend class NodeFabric;

  uint32_t counter_word(int counter) const { return channel_.signals() + counter; }
  uint32_t release_word() const { return channel_.signals() + channel_.counters(); }

  void begin_step(int32_t node);
  void plan_update(int32_t node);
  void update(int32_t node, uint32_t task);
  void release(int32_t node, uint32_t task);
  void call(int32_t node);
  void step(int32_t node);
  void end_call(int32_t node);
  void add(int32_t node, uint32_t word);
  void raise(int32_t node, uint32_t task, uint64_t step, Time time);
  void gather(int32_t node, uint32_t task);
  void gathered(int32_t node, uint32_t move);
  void write(int32_t node, uint32_t task, uint64_t step);
  void write_early(int32_t node);
  void meet(int32_t node);

  void spend(NodeFabric& fabric, double us) { fabric.clock += picoseconds(us) + delays_.next(); }
  uint64_t last_step() const { return static_cast<uint64_t>(config_.steps); }
  [[noreturn]] void report_deadlock() const;

  const PublishConfig config_;
  const Costs& costs_;
  const std::vector<Segment>& tasks_;
  const std::vector<double>& ready_us_;
  const MakePublishActor make_actor_;
  const Channel channel_;  // of node 0
  const PublishPlan plan_;
  Delays delays_;
  Watcher watcher_;  // counts puts: every tile goes to all nodes but its source
  std::unique_ptr<Memory> memory_;
  std::vector<Node> nodes_;
  EventsOf<Kind> events_;
  uint64_t steps_ = 0;
  uint64_t step_ = 0;  // all ranks have done the one before
  Time now_ = 0;
};

// ---- operations ----

uint64_t NodeFabric::read_signal(int signal) {
  world->spend(*this, world->costs_.read_us);
  return world->nodes_[node].words[signal];
}

uint64_t NodeFabric::read_counter(int counter) {
  world->spend(*this, world->costs_.read_us);
  return world->nodes_[node].words[world->counter_word(counter)];
}

uint64_t NodeFabric::released() {
  world->spend(*this, world->costs_.read_us);
  return world->nodes_[node].words[world->release_word()];
}

void NodeFabric::put(int there, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) {
  world->spend(*this, world->costs_.put_us);
  world->watcher_.add();
  const PutTimes times = pass_put(world->costs_, world->nodes_[node].out, world->nodes_[there].in,
                                  world->now_, clock, n, [&] { return world->delays_.next(); });
  if (world->memory_) {
    Memory::Move move;
    move.number = world->nodes_[node].called;
    move.reads.push_back({node, from, from + n});
    move.write = {there, to, to + n};
    const uint32_t index = world->memory_->start(std::move(move), false);
    world->events_.push(times.read, Kind::capture, node, index);
    world->events_.push(times.landed, Kind::land, node, index);
  }
  world->events_.push(times.signalled, Kind::add, there, signal);
  world->events_.push(times.counted, Kind::add, node, world->counter_word(counter));
}

void NodeFabric::signal(int there, int signal) {
  world->spend(*this, world->costs_.signal_us);
  const Time seen = pass_signal(world->costs_, world->nodes_[node].out, world->now_, clock,
                                [&] { return world->delays_.next(); });
  world->events_.push(seen, Kind::add, there, signal);
}

void NodeFabric::flag(uint32_t number, uint64_t step) {
  // A store into the own memory: those who wait see it a moment later.
  world->raise(node, number, step, clock);
}

// ---- the loop ----

PublishWorld::PublishWorld(const PublishConfig& config, const std::vector<Segment>& tasks,
                           const std::vector<double>& ready_us, MakePublishActor make_actor,
                           Watch* watch)
    : config_(config),
      costs_(config_.costs),
      tasks_(tasks),
      ready_us_(ready_us),
      make_actor_(make_actor),
      channel_(make_channel(Operation::publish, config.nodes, 1, 0, 0,
                            config.tile_bytes == 0 ? kChunkBytes : config.tile_bytes,
                            config.slots == 0 ? kPublishTiles : config.slots, 0)),
      plan_(channel_, tasks, config.buffer_bytes),
      delays_(config.delay_us, config.seed),
      watcher_(watch) {
  uint64_t tiles = 0;
  for (const PublishStream& stream : plan_.streams()) tiles += stream.tiles;
  watcher_.begin(tiles * (config.nodes - 1) * config.steps);
  if (config.carry) {
    memory_ = std::make_unique<Memory>(Operation::publish, Dtype::bfloat16, config.nodes, 1,
                                       config.buffer_bytes, 0, 0, config.seed);
  }
  nodes_ = std::vector<Node>(config.nodes);
  for (int32_t i = 0; i < config.nodes; ++i) {
    Node& node = nodes_[i];
    node.fabric.world = this;
    node.fabric.node = i;
    node.words.assign(release_word() + 1, 0);
    node.cursors.assign(config.nodes, PublishCursor{});
    node.flags.assign(tasks.size(), 0);
  }
}

void PublishWorld::begin_step(int32_t index) {
  Node& node = nodes_[index];
  node.begun = now_;
  node.updated = step_;
  node.next = 0;
  plan_update(index);
  // A call may begin as soon as the one before has ended, or after releases.
  if (node.planned < step_) {
    ++node.planned;
    events_.push(now_ + delays_.next(), Kind::call, index, 0);
  }
}

void PublishWorld::plan_update(int32_t index) {
  Node& node = nodes_[index];
  const PublishStream& stream = plan_.streams()[index];
  if (node.next == stream.tasks) return;
  const uint32_t task = plan_.tasks()[stream.first + node.next++].number;
  const Time ready = node.begun + picoseconds(ready_us_[task]);
  events_.push(std::max(now_, ready) + delays_.next(), Kind::update, index, task);
}

void PublishWorld::update(int32_t index, uint32_t task) {
  if (!nodes_[index].early) write(index, task, nodes_[index].updated);
  nodes_[index].early = false;
  events_.push(now_ + delays_.next(), Kind::release, index, task);
}

void PublishWorld::write(int32_t index, uint32_t task, uint64_t step) {
  if (!memory_) return;
  const uint32_t move = memory_->update(index, step, tasks_[task]);
  events_.push(now_ + delays_.next(), Kind::land, index, move);
}

// What an owner writes before it releases is nobody's business but its own: it may begin as soon as
// its own call has ended and its node has read the copies.
void PublishWorld::write_early(int32_t index) {
  Node& node = nodes_[index];
  const PublishStream& stream = plan_.streams()[index];
  if (stream.tasks == 0 || node.updated == last_step() || !delays_.any()) return;
  if (delays_.toss()) return;
  node.early = true;
  write(index, plan_.tasks()[stream.first].number, node.updated + 1);
}

void PublishWorld::release(int32_t index, uint32_t task) {
  if (memory_ && !config_.unordered) memory_->release(-2 - index);
  raise(index, task, nodes_[index].updated, now_);
  add(index, release_word());
  plan_update(index);
}

void PublishWorld::call(int32_t index) {
  Node& node = nodes_[index];
  const uint64_t own = plan_.streams()[index].tasks;
  node.call = {plan_.view(), channel_, 0, node.called + 1, own * node.called};
  node.call.channel.node = index;
  ++node.called;
  node.actor.reset(make_actor_(&node.call, node.cursors.data(), &node.fabric));
  node.asleep = false;
  events_.push(now_ + picoseconds(costs_.launch_us) + delays_.next(), Kind::step, index, 0);
}

void PublishWorld::step(int32_t index) {
  Node& node = nodes_[index];
  node.fabric.clock = now_;
  ++steps_;
  switch (node.actor->step()) {
    case Progress::moved:
      events_.push(node.fabric.clock, Kind::step, index, 0);
      break;
    case Progress::idle:
      node.asleep = true;
      break;
    case Progress::finished:
      end_call(index);
      break;
  }
}

void PublishWorld::end_call(int32_t index) {
  Node& node = nodes_[index];
  node.actor.reset();
  node.left = std::max(node.left, node.fabric.clock);
  ++node.ended;
  if (memory_) memory_->end_publish(index, node.ended, tasks_);
  if (node.planned < last_step() && delays_.any() && delays_.toss()) {
    ++node.planned;
    events_.push(now_ + delays_.next(), Kind::call, index, 0);
  }
  meet(index);
}

void PublishWorld::add(int32_t index, uint32_t word) {
  Node& node = nodes_[index];
  ++node.words[word];
  if (!node.asleep || !node.actor) return;
  node.asleep = false;
  events_.push(std::max(now_, node.fabric.clock), Kind::step, index, 0);
}

void PublishWorld::raise(int32_t index, uint32_t task, uint64_t step, Time time) {
  Node& node = nodes_[index];
  if (step != node.flags[task] + 1) {
    char text[128];
    std::snprintf(text, sizeof text,
                  "rank %d flags task %u of step %" PRIu64 " after step %" PRIu64, index, task,
                  step, node.flags[task]);
    throw Violation(text);
  }
  node.flags[task] = step;
  if (memory_) memory_->expect(index, step, tasks_[task]);
  events_.push(time + delays_.next(), Kind::gather, index, task);
}

void PublishWorld::gather(int32_t index, uint32_t task) {
  if (!memory_) return gathered(index, 0);
  const uint32_t move = memory_->gather(index, nodes_[index].flags[task], tasks_[task]);
  events_.push(now_ + delays_.next(), Kind::gathered, index, move);
}

void PublishWorld::gathered(int32_t index, uint32_t move) {
  if (memory_) memory_->finish(move);
  ++nodes_[index].gathered;
  meet(index);
}

// The step rule: the next step begins when every rank's call has ended and its gathers are over.
void PublishWorld::meet(int32_t index) {
  if (nodes_[index].ended < step_ || nodes_[index].gathered < tasks_.size()) return;
  write_early(index);
  for (const Node& node : nodes_) {
    if (node.ended < step_ || node.gathered < tasks_.size()) return;
  }
  if (step_ == last_step()) return;
  ++step_;
  for (int32_t i = 0; i < config_.nodes; ++i) {
    // Now: another rank's tasks may be here before this one's own step begins.
    nodes_[i].gathered = 0;
    events_.push(now_ + delays_.next(), Kind::begin, i, 0);
  }
}

void PublishWorld::report_deadlock() const {
  static const char* const names[] = {"nothing", "an entry", "a tile", "an acknowledgement",
                                      "the end of a put", "the others' end", "a release", "a flag"};
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!nodes_[i].asleep || !nodes_[i].actor) continue;
    const Stuck stuck = nodes_[i].actor->stuck();
    char text[256];
    std::snprintf(text, sizeof text,
                  "deadlock: step %" PRIu64 ", rank %zu waits for %s of %d (source %d, tile %" PRIu64
                  ")",
                  nodes_[i].called, i, names[static_cast<int>(stuck.wait)], stuck.peer, stuck.queue,
                  stuck.chunk);
    throw Violation(text);
  }
  throw Violation("deadlock: no rank is in a call, at step " + std::to_string(step_));
}

Result PublishWorld::run() {
  step_ = 1;
  for (int32_t i = 0; i < config_.nodes; ++i) events_.push(delays_.next(), Kind::begin, i, 0);
  while (!events_.empty()) {
    watcher_.look();
    const Event event = events_.pop();
    now_ = event.time;
    switch (event.kind) {
      case Kind::step: step(event.rank); break;
      case Kind::add: add(event.rank, event.what); break;
      case Kind::begin: begin_step(event.rank); break;
      case Kind::update: update(event.rank, event.what); break;
      case Kind::release: release(event.rank, event.what); break;
      case Kind::call: call(event.rank); break;
      case Kind::capture: memory_->capture(event.what); break;
      case Kind::land: memory_->finish(event.what); break;
      case Kind::gather: gather(event.rank, event.what); break;
      case Kind::gathered: gathered(event.rank, event.what); break;
    }
  }
  Result result{};
  Time last = 0;
  for (const Node& node : nodes_) {
    if (node.ended < last_step() || node.gathered < tasks_.size()) report_deadlock();
    last = std::max(last, node.left);
    result.rank_us.push_back(static_cast<double>(node.left) * 1e-6);
    result.links.push_back({node.out.bytes(), node.in.bytes(), 0, 0});
  }
  if (memory_) memory_->end();
  watcher_.tell();
  result.us = static_cast<double>(last) * 1e-6;
  result.steps = steps_;
  result.groups = 1;
  return result;
}

}  // namespace

Result run_publish(const PublishConfig& config, const std::vector<Segment>& tasks,
                   const std::vector<double>& ready_us, MakePublishActor make_actor, Watch* watch) {
  if (config.steps < 1) throw TableError("no steps, expected 1 or more");
  return PublishWorld(config, tasks, ready_us, make_actor, watch).run();
}

}  // namespace dmuon::sim
