// C ABI of the simulator. Functions return 0, or -1 for bad arguments, -2 for what a run found
// wrong, -3 if the run was given up; dmuon_error() of the same thread then says what.
#include <string>
#include <vector>

#include "fabric/sim.h"
#include "fabric/sim_publish.h"

namespace {

thread_local std::string error;

// Runs `work`, which may throw; `seed` is the present run's.
template <class Work>
int guarded(const uint64_t& seed, Work work) {
  try {
    work();
    return 0;
  } catch (const dmuon::sim::Violation& e) {
    error = "seed " + std::to_string(seed) + ": " + e.what();
    return -2;
  } catch (const dmuon::sim::Stopped& e) {
    error = e.what();
    return -3;
  } catch (const std::exception& e) {
    error = e.what();
    return -1;
  }
}

}  // namespace

extern "C" {

const char* dmuon_error() { return error.c_str(); }

// What a run tells, besides what each rank's links carried.
struct dmuon_sim_summary {
  double us;
  uint64_t steps;
  int32_t groups;
  int32_t star;
};

// Where a run puts what it tells of each rank.
static void write_ranks(const dmuon::sim::Result& result, uint64_t* links, double* rank_us) {
  for (size_t rank = 0; rank < result.links.size(); ++rank) {
    const dmuon::sim::Links& l = result.links[rank];
    rank_us[rank] = result.rank_us[rank];
    links[4 * rank] = l.nic_out;
    links[4 * rank + 1] = l.nic_in;
    links[4 * rank + 2] = l.nvlink_out;
    links[4 * rank + 3] = l.nvlink_in;
  }
}

// Runs `call_count` calls; call i has counts[i] of the segments, which follow each other.
//   schedules: number of runs, with seeds config->seed, +1, ...; the results are of the last one,
//     but the steps those of all
//   links: 4 words per rank: NIC out, NIC in, NVLink out, NVLink in
//   rank_us: one per rank
//   make_actor: dmuon_sim_make_actor of another library, whose protocol is driven; or null
//   watch: for another thread; or null
int dmuon_sim_run(const dmuon::sim::Config* config, const dmuon::Segment* segments,
                  const uint64_t* counts, uint64_t call_count, uint64_t schedules,
                  dmuon_sim_summary* summary, uint64_t* links, double* rank_us,
                  dmuon::sim::MakeActor make_actor, dmuon::sim::Watch* watch) {
  dmuon::sim::Config one = *config;
  return guarded(one.seed, [&] {
    std::vector<std::vector<dmuon::Segment>> calls;
    for (uint64_t i = 0; i < call_count; ++i) {
      calls.emplace_back(segments, segments + counts[i]);
      segments += counts[i];
    }
    *summary = {};
    for (uint64_t i = 0; i < schedules; ++i, ++one.seed) {
      const dmuon::sim::Result result =
          dmuon::sim::run(one, calls, make_actor ? make_actor : dmuon_sim_make_actor, watch);
      *summary = {result.us, summary->steps + result.steps, result.groups, result.star};
      if (i + 1 == schedules) write_ranks(result, links, rank_us);
    }
  });
}

// Runs the steps of a publish on one rail. tasks, ready_us: `count` of each. Else as above; NVLink
// carries nothing.
int dmuon_sim_publish(const dmuon::sim::PublishConfig* config, const dmuon::Segment* tasks,
                      const double* ready_us, uint64_t count, uint64_t schedules,
                      dmuon_sim_summary* summary, uint64_t* links, double* rank_us,
                      dmuon::sim::MakePublishActor make_actor, dmuon::sim::Watch* watch) {
  dmuon::sim::PublishConfig one = *config;
  return guarded(one.seed, [&] {
    const std::vector<dmuon::Segment> table(tasks, tasks + count);
    const std::vector<double> ready(ready_us, ready_us + count);
    *summary = {};
    for (uint64_t i = 0; i < schedules; ++i, ++one.seed) {
      const dmuon::sim::Result result = dmuon::sim::run_publish(
          one, table, ready, make_actor ? make_actor : dmuon_sim_make_publish_actor, watch);
      *summary = {result.us, summary->steps + result.steps, result.groups, result.star};
      if (i + 1 == schedules) write_ranks(result, links, rank_us);
    }
  });
}

}  // extern "C"
