// The `sim` fabric: all ranks and their thread groups in one process, under a virtual clock.
//
// An event loop drives the same core that runs on a cluster. Each operation of a group adds its
// cost to the group's clock; what it changes elsewhere becomes visible at a later virtual time. A
// group that is idle sleeps until a word that it may wait for changes, so waiting costs no work.
// One seed decides everything that is random: a run can be repeated exactly.
//
// Two uses. Without bytes: how long calls take on a described cluster, and what each link carries.
// With bytes (sim_memory.h): whether the protocol is right under weak memory and any order of puts.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/table.h"
#include "fabric/sim_group.h"
#include "fabric/sim_watch.h"

namespace dmuon::sim {

// What a cluster costs. Times in microseconds, at least 0; rates in 1e9 bytes per second, above 0.
struct Costs {
  double launch_us;       // launch of a call until its groups run, and its end until it is seen
  double read_us;         // a group reads one of its rank's words
  double flag_us;         // a word written to the ranks of the node until they see it
  double fence_us;        // a release to the whole node
  double load_us;         // the first bytes of a peer's memory
  double store_us;        // the first bytes of a multicast
  double reduce_us;       // the first bytes of a reduction
  double copy_gbs;        // one group reads a peer's memory into its own
  double multicast_gbs;   // one group multicasts
  double group_reduce_gbs;  // one group reduces
  double port_gbs;        // NVLink of one GPU, each direction: plain and multicast bytes
  double port_reduce_gbs; // the same, bytes of a reduction in the switch
  double put_us;          // a group issues a put
  double signal_us;       // a group issues a signal
  double nic_gbs;         // one NIC, each direction
  double message_gbs;     // bytes of one message, however free the NIC
  double message_us;      // one NIC between two messages
  double wire_us;         // first byte sent until it is in the remote memory
  double arrive_us;       // bytes in the remote memory until its signal is there
};

// A fabric that is broken on purpose, to see that the checks notice: what release it leaves out.
enum class Dropped : int32_t { nothing = 0, put = 1, signal = 2, finish = 3, enter = 4 };

struct Config {
  int32_t operation;  // Operation
  int32_t nodes;
  int32_t rails;
  int32_t slots;   // 0: the protocol's own
  int32_t dtype;   // Dtype
  int32_t groups;  // thread groups per call; 0: as many as the plan wants
  int32_t lanes;   // pipelines per queue; 0: as many as the channel has
  int32_t carry;   // 1: move and check bytes
  int32_t dropped; // Dropped
  uint32_t chunk_bytes;  // 0: the protocol's own
  uint64_t buffer_bytes;
  uint64_t home_bytes;
  uint64_t seed;
  double delay_us;  // random delays of every operation are up to this, now and then 16 times
  Costs costs;
};

// Bytes that a rank's links carry.
struct Links {
  uint64_t nic_out, nic_in, nvlink_out, nvlink_in;
};

struct Result {
  double us;       // launch of the first call until the slowest rank left the last
  uint64_t steps;  // of all thread groups
  int32_t groups;  // thread groups of a rank in the last call
  int32_t star;    // 1: the last call took the star path
  std::vector<Links> links;     // per rank, node by node
  std::vector<double> rank_us;  // per rank: when it left
};

// What a run found wrong: a deadlock, wrong bytes, a race.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Make the calls one after the other on every rank, on one channel. Raises TableError for bad
// segments or sizes, Violation, and Stopped. make_actor: of the protocol that is driven. watch: or
// null.
Result run(const Config& config, const std::vector<std::vector<Segment>>& calls,
           MakeActor make_actor, Watch* watch);

}  // namespace dmuon::sim
