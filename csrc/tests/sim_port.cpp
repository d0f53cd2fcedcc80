// The simulator's port, for a test that counts every picosecond.
#include "fabric/sim_clock.h"

// Lets `count` messages pass one port; message i asks at now[i], from start[i] on, and takes work[i]
// picoseconds and a gap. passed: when each has passed. Returns the bytes that the port counted.
extern "C" uint64_t dmuon_sim_port(uint64_t count, const int64_t* now, const int64_t* start,
                                   const uint64_t* work, int64_t gap, int64_t* passed) {
  dmuon::sim::Port port;
  for (uint64_t i = 0; i < count; ++i) {
    // 1000 GB/s: a byte takes a picosecond.
    passed[i] = port.pass(now[i], start[i], work[i], 1000.0, gap);
  }
  return port.bytes();
}
