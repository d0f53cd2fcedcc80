/* A whole mesh in one process, for tests: on one GPU, or, compiled for a host, on threads. Not for
 * training. Codes and error text as in dmuon.h. */
#ifndef DMUON_LOOPBACK_H_
#define DMUON_LOOPBACK_H_

#include "dmuon.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dmuon_loopback dmuon_loopback;

typedef struct {
  int32_t table;
  uint64_t buffer;
  uint64_t home;
} dmuon_loopback_call;

/* mesh->rank is ignored: all ranks are here. */
int dmuon_loopback_open(const dmuon_mesh* mesh, dmuon_loopback** loopback);

/* Freeze a table; they are numbered from 0. Arguments as in dmuon_group_create. */
int dmuon_loopback_table(dmuon_loopback* loopback, const char* label, int32_t operation,
                         int32_t dtype, const dmuon_segment* segments, uint64_t count,
                         uint64_t buffer_bytes, uint64_t home_bytes);

/* Copy to or from a rank's user memory. */
int dmuon_loopback_write(dmuon_loopback* loopback, int32_t rank, uint64_t offset, const void* from,
                         uint64_t bytes);
int dmuon_loopback_read(dmuon_loopback* loopback, int32_t rank, uint64_t offset, void* to,
                        uint64_t bytes);

/* Run calls one after the other on every rank, all ranks at once, and wait. Each rank waits up to
 * `skew` nanoseconds, drawn from `seed`, before each call. `absent`: a rank that does not come, -1:
 * none. DMUON_TIMEOUT with a report if a wait passed its limit; further runs then return
 * DMUON_BROKEN. */
int dmuon_loopback_run(dmuon_loopback* loopback, const dmuon_loopback_call* calls, uint64_t count,
                       uint64_t seed, uint64_t skew, int32_t absent, dmuon_stuck_report* report);

int dmuon_loopback_close(dmuon_loopback* loopback);

#ifdef __cplusplus
}
#endif
#endif /* DMUON_LOOPBACK_H_ */
