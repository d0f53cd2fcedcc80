// The memory of the shm fabric: one segment per rank, mapped by the ranks that reach it.
//
// A segment: [header | words of each channel | window]. The window: [user region | rings of each
// channel].
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmuon {

// The operating system refused; the message says what, where and what would help.
class ShmError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A rank did not come while the memory was set up.
class ShmTimeout : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ShmPool {
 public:
  // job: 1 to 64 letters, digits or hyphens, equal on all ranks.
  // bytes: of the window and everything before it but the header.
  // settings: must be equal on all ranks; named in the error if they are not.
  // stop: another thread makes it other than 0 to end `attach`; null: none does.
  // names: of all ranks, for errors; null: their own numbers.
  // Makes this rank's memory, or throws where there is no room.
  ShmPool(const std::string& job, int rank, uint64_t bytes, const std::string& settings,
          double timeout_seconds, const int32_t* stop, const int32_t* names);
  ~ShmPool();
  ShmPool(const ShmPool&) = delete;
  ShmPool& operator=(const ShmPool&) = delete;

  // peers: ranks whose memory this one maps, without itself; mapping is mutual.
  // Collective over the peers: returns when all have mapped this rank's memory. From then on the
  // memory has no name, so it ends with the processes, however they end.
  void attach(const std::vector<int>& peers);

  // Behind the header of a rank's segment; null if it is not mapped here.
  std::byte* memory(int rank) const;

 private:
  struct Mapping {
    int rank;
    std::byte* start;
  };

  void create(const std::string& name);
  std::byte* map(int file, const std::string& name);
  void attach_one(int peer, double deadline);
  void wait_until_mapped(const std::vector<int>& peers, double deadline);
  // A rank as its job knows it.
  std::string named(int rank) const;
  void nap() const;
  [[noreturn]] void give_up(const std::string& awaited) const;
  void release();

  std::string job_;
  int rank_;
  uint64_t bytes_;
  std::string settings_;
  double timeout_;
  const int32_t* stop_;
  const int32_t* names_;
  std::string name_;  // empty once it is unlinked
  std::string disagreement_;  // with a peer's settings
  int file_ = -1;
  std::vector<Mapping> mappings_;  // the own one first
};

}  // namespace dmuon
