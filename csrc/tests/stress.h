// What the stress programs share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../core/table.h"

namespace dmuon {

[[noreturn]] inline void die(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

// Tasks of random lengths, up to a few tiles, and random owners.
struct RandomTasks {
  std::vector<Segment> tasks;
  uint64_t bytes = 0;

  // gap: bytes behind each that nobody may write.
  RandomTasks(int nodes, uint64_t tile, unsigned seed, uint64_t gap) {
    std::mt19937 random(seed);
    for (int i = 0; i < 4 * nodes; ++i) {
      const uint64_t length = 1 + random() % (tile * 6);
      tasks.push_back({bytes, 0, length, static_cast<int>(random() % nodes), 0});
      bytes += round_up(length, kAlignment) + gap;
    }
  }
};

}  // namespace dmuon
