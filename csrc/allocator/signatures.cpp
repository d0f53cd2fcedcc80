#include "signatures.h"

#include <iterator>

namespace dmuon::allocator {
namespace {

// Which table's which opening a thread allocates for. Trivial, so that it may be read while the
// thread ends; a number, so that it may outlive the table.
struct Scope {
  uint64_t opening;
};
thread_local Scope scope_of_thread{0};

// Tables by their open scope. Never destroyed: tensors are freed after all statics.
struct Openings {
  std::mutex mutex;
  uint64_t last = 0;
  std::unordered_map<uint64_t, std::weak_ptr<Table>> tables;
};

Openings& openings() {
  static Openings& all = *new Openings;
  return all;
}

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

std::atomic<int> Table::open_scopes_{0};

std::shared_ptr<Table> Table::current_of_thread() {
  const uint64_t opening = scope_of_thread.opening;
  if (opening == 0) return nullptr;
  Openings& all = openings();
  const std::lock_guard lock(all.mutex);
  const auto found = all.tables.find(opening);
  if (found != all.tables.end()) return found->second.lock();
  // Closed by another thread, or left open by a backward that failed.
  scope_of_thread.opening = 0;
  return nullptr;
}

Table::~Table() { close_scope(); }

void Table::close_scope() {
  if (opening_ == 0) return;
  Openings& all = openings();
  const std::lock_guard lock(all.mutex);
  all.tables.erase(opening_);
  opening_ = 0;
  open_scopes_.fetch_sub(1, std::memory_order_relaxed);
}

void Table::open_scope() {
  Openings& all = openings();
  const std::lock_guard lock(all.mutex);
  opening_ = ++all.last;
  all.tables[opening_] = weak_from_this();
  open_scopes_.fetch_add(1, std::memory_order_relaxed);
  scope_of_thread.opening = opening_;
}

void Table::begin() {
  std::unordered_map<int64_t, Given> given;  // freed behind the lock: owners may run anything
  {
    const std::lock_guard lock(mutex_);
    close_scope();
    given.swap(given_);
    layers_.clear();
    records_.clear();
    made_by_.clear();
  }
}

void Table::enter(int64_t layer, std::vector<Place> places) {
  std::vector<Place> replaced;
  {
    const std::lock_guard lock(mutex_);
    close_scope();
    layer_ = layer;
    open_scope();
    for (Place& place : places) {
      Given& given = given_[place.key];
      // A place that has fired in this backward does not fire again, whoever gives it.
      std::swap(given.place, place);
      given.opening = opening_;
      replaced.push_back(std::move(place));
    }
  }
}

void Table::leave() {
  const std::lock_guard lock(mutex_);
  close_scope();
}

uint64_t Table::position_of(const Node& node) {
  Layer& layer = layers_[layer_];
  const bool behind = node.address == nullptr;
  if (behind != layer.behind) layer.index = 0;
  if (!behind && !(node == layer.last)) {
    ++layer.nodes;
    layer.index = 0;
    layer.last = node;
  }
  layer.behind = behind;
  return uint64_t{layer.nodes} << 32 | uint64_t{behind} << 31 | layer.index++;
}

Ticket* Table::claim(uint64_t bytes, const Node& node, uint64_t* record) {
  const std::lock_guard lock(mutex_);
  if (opening_ == 0 || opening_ != scope_of_thread.opening) {
    *record = UINT64_MAX;
    return nullptr;
  }
  const Signature signature{layer_, position_of(node), bytes, node.kind};
  *record = records_.size();
  records_.push_back(signature);
  // Without bytes there is nothing to place, but it counts: an empty batch moves no number.
  Ticket* ticket = bytes == 0 ? nullptr : take_place(signature);
  if (ticket != nullptr) made_by_[ticket->data] = *record;
  return ticket;
}

Ticket* Table::take_place(const Signature& signature) {
  const auto layer = by_position_.find(signature.layer);
  if (layer == by_position_.end()) return nullptr;
  const auto entry = layer->second.find(signature.position);
  if (entry == layer->second.end()) return nullptr;
  const Parameter& parameter = parameters_[entry->second];
  if (!(parameter.signature == signature) || parameter.given_up) return nullptr;
  const auto found = given_.find(entry->second);
  if (found == given_.end()) return nullptr;
  Given& given = found->second;
  // Invariant: a place is for the layer that it was given for. In another order of the layers the
  // number of this one may be another's in the backward that was learned from.
  if (given.opening != opening_) return nullptr;
  if (given.fired || given.place.bytes != signature.bytes) return nullptr;
  // Two tensors never share a place: what still lives there keeps it.
  if (!living_locked(given.place.data, given.place.bytes).empty()) return nullptr;
  given.fired = true;
  living_.emplace(address(given.place.data), given.place.bytes);
  return new Ticket{shared_from_this(), given.place.data, given.place.bytes, given.place.owner};
}

void Table::note(uint64_t record, const void* data) {
  const std::lock_guard lock(mutex_);
  if (record < records_.size()) made_by_[data] = record;
}

Outcome Table::deliver(const Gradient& gradient) {
  const std::lock_guard lock(mutex_);
  const auto given = given_.find(gradient.key);
  // One that somebody else has kept was no place: that nothing was born there is no miss.
  const bool placed = given != given_.end() &&
                      (given->second.fired ||
                       living_locked(given->second.place.data, given->second.place.bytes).empty());
  if (placed && gradient.whole && gradient.data == given->second.place.data &&
      gradient.bytes == given->second.place.bytes && given->second.fired) {
    parameters_[gradient.key].misses = 0;
    ++counters_.hits;
    return Outcome::in_place;
  }
  return learn(gradient, placed);
}

Outcome Table::learn(const Gradient& gradient, bool placed) {
  Parameter& parameter = parameters_[gradient.key];
  const bool expected = parameter.known && !parameter.given_up;
  forget(parameter);
  const auto made = made_by_.find(gradient.data);
  const bool traced = gradient.whole && made != made_by_.end() &&
                      records_[made->second].bytes == gradient.bytes;
  if (traced) {
    const Signature& signature = records_[made->second];
    // Another parameter that was made here before does not fire any more, and misses once.
    by_position_[signature.layer].insert_or_assign(signature.position, gradient.key);
    parameter.known = true;
    parameter.signature = signature;
  }
  if (!placed) return Outcome::no_place;
  parameter.unlearned = traced ? 0 : parameter.unlearned + 1;
  if (expected) {
    ++counters_.misses;
    counters_.relearned += traced;
    ++parameter.misses;
  } else {
    ++(traced ? counters_.learned : counters_.unlearned);
  }
  const bool erratic = parameter.misses >= kMissLimit;
  if (erratic || parameter.unlearned >= kUnlearnedLimit) {
    set_given_up(parameter, true);
  } else if (traced) {
    set_given_up(parameter, false);
  }
  return expected ? Outcome::missed : traced ? Outcome::learned : Outcome::unlearned;
}

void Table::forget(Parameter& parameter) {
  if (!parameter.known) return;
  parameter.known = false;
  const auto layer = by_position_.find(parameter.signature.layer);
  const auto entry = layer->second.find(parameter.signature.position);
  const int64_t key = &parameter - parameters_.data();
  if (entry != layer->second.end() && entry->second == key) layer->second.erase(entry);
}

void Table::set_given_up(Parameter& parameter, bool value) {
  given_up_ += static_cast<int64_t>(value) - static_cast<int64_t>(parameter.given_up);
  parameter.given_up = value;
}

void Table::withdraw(int64_t key) {
  Place place;
  {
    const std::lock_guard lock(mutex_);
    const auto found = given_.find(key);
    if (found == given_.end()) return;
    place = std::move(found->second.place);
    given_.erase(found);
  }
}

void Table::withdraw(const void* data, uint64_t bytes) {
  const uintptr_t begin = address(data), end = begin + bytes;
  std::vector<Place> withdrawn;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = given_.begin(); it != given_.end();) {
      Place& place = it->second.place;
      const uintptr_t start = address(place.data);
      if (start < end && begin < start + place.bytes) {
        withdrawn.push_back(std::move(place));
        it = given_.erase(it);
      } else {
        ++it;
      }
    }
  }
}

std::vector<Stretch> Table::living(const void* data, uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return living_locked(data, bytes);
}

std::vector<Stretch> Table::living_locked(const void* data, uint64_t bytes) const {
  const uintptr_t begin = address(data), end = begin + bytes;
  auto it = living_.upper_bound(begin);
  // They never overlap: of those that start at or before `begin` only the last can reach into it.
  if (it != living_.begin() && std::prev(it)->first + std::prev(it)->second > begin) --it;
  std::vector<Stretch> found;
  for (; it != living_.end() && it->first < end; ++it) {
    found.push_back({reinterpret_cast<void*>(it->first), it->second});
  }
  return found;
}

Counters Table::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

bool Table::given_up(int64_t key) const {
  const std::lock_guard lock(mutex_);
  return parameters_[key].given_up;
}

int64_t Table::given_up_count() const {
  const std::lock_guard lock(mutex_);
  return given_up_;
}

void Table::end(Ticket* ticket) {
  const std::unique_ptr<Ticket> ended(ticket);  // behind the lock: its owner may run anything
  const std::lock_guard lock(ticket->table->mutex_);
  ticket->table->living_.erase(address(ticket->data));
}

}  // namespace dmuon::allocator
