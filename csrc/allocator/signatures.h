// Allocation signatures (paper C.1): which allocation of a layer's backward becomes which gradient.
//
// One table per runtime. A wrapper around torch's allocator (shim.h) asks the table at every
// allocation of a thread whose scope is open, and gets the gradient's place where the signature
// matches. After the layer, `deliver` traces each gradient's memory back to the allocation that
// made it. Nothing here knows torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace dmuon::allocator {

// Gradients are computed to the same bits only where memory is aligned as torch's allocators do it.
constexpr uint64_t kPlaceAlignment = 64;

// Deliveries in a row without an allocation that could be learned, and misses in a row of a
// signature that was learned anew each time, after which a parameter is given up.
constexpr int kUnlearnedLimit = 3;
constexpr int kMissLimit = 8;

// The autograd node that runs; address null outside of any. An address alone is not enough: a node
// that recomputation made may be gone, and the next one stand in its place.
struct Node {
  const void* address = nullptr;
  uint64_t sequence = 0;
  const void* kind = nullptr;  // of its class

  bool operator==(const Node& other) const {
    return address == other.address && sequence == other.sequence;
  }
};

// Where a parameter's gradient belongs. `owner` keeps the memory alive.
struct Place {
  int64_t key = 0;
  void* data = nullptr;
  uint64_t bytes = 0;
  std::shared_ptr<void> owner;
};

// Memory from its first byte on.
struct Stretch {
  void* data = nullptr;
  uint64_t bytes = 0;
};

class Table;

// Memory of a place that a tensor lives in; ended by its deleter, on any thread.
struct Ticket {
  std::shared_ptr<Table> table;
  void* data;
  uint64_t bytes;
  std::shared_ptr<void> owner;
};

// What became of one delivered gradient.
enum class Outcome : int32_t {
  no_place = 0,   // none was given: its signature was learned if that could be
  in_place = 1,   // born in its place
  learned = 2,    // not in its place, and no signature was known: one is now
  missed = 3,     // not in its place although a signature was known; learned anew if possible
  unlearned = 4,  // not in its place, and its memory is no allocation of just its size
};

// A delivered gradient, as the caller found it.
struct Gradient {
  int64_t key = 0;
  const void* data = nullptr;
  uint64_t bytes = 0;
  bool whole = false;  // contiguous, of the parameter's shape, and no other gradient's memory
};

struct Counters {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t relearned = 0;  // misses whose new signature was found at once
  int64_t learned = 0;
  int64_t unlearned = 0;
};

class Table : public std::enable_shared_from_this<Table> {
 public:
  // keys: parameters, numbered from 0. device: whose allocations are looked at, in the shims' code.
  Table(int64_t keys, int32_t device) : device_(device), parameters_(keys) {}

  int32_t device() const { return device_; }
  int64_t keys() const { return static_cast<int64_t>(parameters_.size()); }

  // A backward begins: counts start anew, places and records of the last one are void, and so is a
  // scope that an exception left open.
  void begin();

  // The calling thread's allocations are the layer's from now on; a layer that was entered before
  // in this backward goes on. Places stay given until delivered, or until the next `begin`.
  void enter(int64_t layer, std::vector<Place> places);

  // No thread's allocations are looked at any more.
  void leave();

  // The place for an allocation of the calling thread, as a ticket that `end` takes back, or null
  // for ordinary memory, which `note` is to be told of as `record`.
  Ticket* claim(uint64_t bytes, const Node& node, uint64_t* record);
  void note(uint64_t record, const void* data);

  Outcome deliver(const Gradient& gradient);

  // Takes a place back: nothing is born there any more.
  void withdraw(int64_t key);
  void withdraw(const void* data, uint64_t bytes);

  // The memory between data and data + bytes that tensors live in.
  std::vector<Stretch> living(const void* data, uint64_t bytes) const;

  Counters counters() const;

  // Whether a parameter was given up: it fires no more, until its memory can be traced again.
  bool given_up(int64_t key) const;
  int64_t given_up_count() const;

  static void end(Ticket* ticket);

  // The table whose scope is open on the calling thread, or null. Costs one relaxed load where no
  // scope is open anywhere.
  static std::shared_ptr<Table> current() {
    return open_scopes_.load(std::memory_order_relaxed) == 0 ? nullptr : current_of_thread();
  }

  ~Table();

 private:
  // Where in a layer's backward an allocation was made.
  struct Signature {
    int64_t layer = 0;
    uint64_t position = 0;  // node, whether behind it, and index there
    uint64_t bytes = 0;
    const void* kind = nullptr;

    bool operator==(const Signature& other) const {
      return layer == other.layer && position == other.position && bytes == other.bytes &&
             kind == other.kind;
    }
  };

  struct Layer {
    uint32_t nodes = 0;  // that allocated so far; the last one's number
    uint32_t index = 0;  // of the next allocation there
    bool behind = false;
    Node last;
  };

  struct Parameter {
    bool known = false;
    bool given_up = false;
    Signature signature;
    int misses = 0;     // in a row
    int unlearned = 0;  // in a row
  };

  struct Given {
    Place place;
    bool fired = false;
    uint64_t opening = 0;  // of the scope that it was given for
  };

  static std::shared_ptr<Table> current_of_thread();
  void open_scope();
  void close_scope();
  uint64_t position_of(const Node& node);
  Ticket* take_place(const Signature& signature);
  Outcome learn(const Gradient& gradient, bool placed);
  void forget(Parameter& parameter);
  void set_given_up(Parameter& parameter, bool value);
  std::vector<Stretch> living_locked(const void* data, uint64_t bytes) const;

  static std::atomic<int> open_scopes_;

  const int32_t device_;
  mutable std::mutex mutex_;
  std::vector<Parameter> parameters_;
  std::unordered_map<int64_t, std::unordered_map<uint64_t, int64_t>> by_position_;
  uint64_t opening_ = 0;  // of the open scope; 0: none
  int64_t layer_ = 0;     // of the open scope
  std::unordered_map<int64_t, Layer> layers_;
  std::unordered_map<int64_t, Given> given_;
  std::vector<Signature> records_;
  // The last allocation that returned a pointer: what was there before it is freed.
  std::unordered_map<const void*, uint64_t> made_by_;
  std::map<uintptr_t, uint64_t> living_;  // start and bytes; they never overlap
  Counters counters_;
  int64_t given_up_ = 0;
};

}  // namespace dmuon::allocator
