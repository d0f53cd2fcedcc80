/* The operators as plain C functions, for Python's ctypes and for any other language.
 *
 * Every fabric is a library of its own that has all functions of this file, and one more to open a
 * communicator, at the end of the file. Functions return 0, or one of the negative codes; then
 * dmuon_error() has one line of text. A handle belongs to one communicator. Different channels
 * (operations) of a communicator may be used by different threads at the same time; all else is the
 * caller's to order.
 *
 * A mesh is R nodes of K ranks; rank = node * K + rail. A reduction spans all ranks, a gather spans
 * `gather_nodes` consecutive nodes: a row of an HSDP mesh. In a gather's segments `node` counts
 * from the first node of the row, so that all rows have the same table. A publish spans the nodes at
 * the same place of all rows, one rail of them; its `node` is the number of the row.
 */
#ifndef DMUON_H_
#define DMUON_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  DMUON_OK = 0,
  DMUON_BAD_ARGUMENT = -1, /* the text names the argument or segment, and what is accepted */
  DMUON_SYSTEM = -2,       /* the operating system, CUDA or NCCL refused; the text says what */
  DMUON_TIMEOUT = -3,      /* a rank did not come; the text names whom and what was awaited */
  DMUON_BROKEN = -4        /* ranks do not agree on the call, or an earlier one failed */
};

/* Operations; groups are made for the first two. */
enum { DMUON_ALL_GATHER_V = 0, DMUON_REDUCE_SCATTER_V = 1, DMUON_PUBLISH = 2 };
enum { DMUON_BFLOAT16 = 0, DMUON_FLOAT32 = 1 };

typedef struct dmuon_communicator dmuon_communicator;
typedef struct dmuon_group dmuon_group;
typedef struct dmuon_publish dmuon_publish;

/* One matrix or small vector. Offsets and the ends of their padding are multiples of 16 bytes. */
typedef struct {
  uint64_t offset; /* bytes from the group's buffer */
  uint64_t home;   /* reduce: bytes from the owner's reduced buffer */
  uint64_t bytes;  /* 0 is allowed; those up to the next multiple of 16 are moved too */
  int32_t node;    /* of the owner */
  int32_t rail;    /* of the owner */
} dmuon_segment;

/* What every fabric needs to open a communicator. */
typedef struct {
  int32_t nodes;
  int32_t rails;        /* ranks per node */
  int32_t gather_nodes; /* divides nodes */
  int32_t rank;         /* this rank, node * rails + rail */
  uint64_t user_bytes;  /* memory for the caller's buffers, the same on every rank */
  uint32_t chunk_bytes; /* a multiple of 16; 0: the fabric's default */
  int32_t slots;        /* of every ring; 0: the fabric's default */
  double timeout_seconds; /* limit of every wait */
  const int32_t* names; /* of all ranks, for errors; copied; NULL: their own numbers */
} dmuon_mesh;

/* Where a call stood still. */
typedef struct {
  int32_t wait;    /* 0 nothing, 1 entry, 2 arrival, 3 acknowledgement, 4 put, 5 exit, 6 release, 7 flag */
  int32_t queue;   /* owner node, -1: none */
  int32_t peer;    /* node, or rail for entry, that was awaited; -1: unknown */
  int32_t group;   /* thread group */
  uint64_t chunk;  /* of the queue's stream on this rail */
  uint64_t number; /* of the call on its channel, from 1 */
} dmuon_stuck_report;

/* Text of the calling thread's last failure. */
const char* dmuon_error(void);

/* What a communicator takes on this rank. */
typedef struct {
  void* user;             /* the caller's memory; offsets count from here */
  uint64_t user_bytes;    /* of the caller's memory */
  uint64_t ring_bytes;    /* rings of all channels */
  uint64_t control_bytes; /* signals, counters, flags, and what fills pages up */
} dmuon_memory;

int dmuon_memory_of(const dmuon_communicator* communicator, dmuon_memory* memory);

/* Freeze a group's table. All ranks create the same groups. Nothing is sent. Segments lie inside
 * the window.
 *   label: names the group in errors, and is the same on every rank; copied.
 *   dtype: of the elements; a gather moves bytes and ignores it.
 *   buffer_bytes: of the group's buffer; segments lie inside it.
 *   home_bytes: of the owner's reduced buffer, at every owner the same; a gather ignores it. */
int dmuon_group_create(dmuon_communicator* communicator, const char* label, int32_t operation,
                       int32_t dtype, const dmuon_segment* segments, uint64_t count,
                       uint64_t buffer_bytes, uint64_t home_bytes, dmuon_group** group);

/* Whether dmuon_call takes these places: DMUON_OK or DMUON_BAD_ARGUMENT. Starts nothing. */
int dmuon_check(const dmuon_group* group, uint64_t buffer, uint64_t home);

/* Run the group's operation on the buffer at `buffer` and, for a reduction, into the reduced buffer
 * at `home`: window offsets, multiples of 16. They overlap only if they are one and each segment's
 * home is its offset. `buffer` is the same on every rank, `home` too. All ranks make the calls of
 * one operation in the same order. shm: runs to the end in the calling thread, `stream` is null;
 * ranks that disagree about a call get DMUON_BROKEN. gin: enqueues on the CUDA stream and returns;
 * nothing compares the calls. */
int dmuon_call(dmuon_group* group, uint64_t buffer, uint64_t home, void* stream);

/* Freeze the table of a publish: what each owner of this rank's rail copies to the same place on the
 * rail's other rows, step for step. All ranks of the rail create the same ones. Nothing is sent.
 *   label, names: for errors, names[i] of task i; copied.
 *   tasks: `node` is the row of the owner, `rail` this rank's; those of one owner in the order in
 *     which it releases them; at least one byte each.
 *   buffer, buffer_bytes: the stretch of the window that they lie in, the same on every rank. */
int dmuon_publish_create(dmuon_communicator* communicator, const char* label,
                         const char* const* names, const dmuon_segment* tasks, uint64_t count,
                         uint64_t buffer, uint64_t buffer_bytes, dmuon_publish** publish);

/* Move the tasks of step `step`, which is 1 for the first run and 1 more for each next one. Ends on
 * this rank when its own tasks were read everywhere they are put from, and all others are here and
 * passed on. All ranks of the rail make their runs in the same order.
 * The step rule: before any rank releases a task of step n + 1, the runs of step n have ended on all
 * ranks of the rail, and so has all that reads their copies of step n. Writing a task, before its
 * release, asks for this on the own rank only.
 * shm: runs to the end in the calling thread, `stream` is null. gin: enqueues on the CUDA stream. */
int dmuon_publish_run(dmuon_publish* publish, uint64_t step, void* stream);

/* Task `task` of this rank is final in its own copy for the next step: once per step, in the order of
 * the table; before or after the step's run begins. gin: takes its place in the CUDA stream. */
int dmuon_publish_release(dmuon_publish* publish, uint64_t task, void* stream);

/* Wait until tasks first .. first + count - 1 of step `step` are in this rank's copy. shm: in the
 * calling thread. gin: what comes next in the CUDA stream waits. */
int dmuon_publish_wait(dmuon_publish* publish, uint64_t first, uint64_t count, uint64_t step,
                       void* stream);

/* No more releases will come: a run that waits for one ends with DMUON_BROKEN. at_once: not 0: so
 * does a run that waits for anything, since other ranks' releases will not come either. */
int dmuon_publish_stop(dmuon_publish* publish, int32_t at_once);

/* Give a publish up; nothing of it may be running. */
int dmuon_publish_destroy(dmuon_publish* publish);

/* Where the last failed call of an operation stood; report->wait is 0 if none failed. Returns
 * DMUON_TIMEOUT, with its text, if one did. Does not wait. */
int dmuon_stuck(const dmuon_communicator* communicator, int32_t operation,
                dmuon_stuck_report* report);

/* Give a group up; none of its calls may be running. */
int dmuon_group_destroy(dmuon_group* group);

/* Give the communicator and its memory up; groups first. Not collective. */
int dmuon_close(dmuon_communicator* communicator);

/* Make a communicator over POSIX shared memory of this machine, with this rank's memory. Does not
 * wait: where there is no room, the others are told by the caller. Then dmuon_shm_attach.
 *   job: 1 to 64 letters, digits or hyphens, the same on all ranks and unique among the running
 *     communicators of this user.
 *   stop: another thread makes it other than 0 to end dmuon_shm_attach; may be null. Stays. */
int dmuon_shm_open(const char* job, const int32_t* stop, const dmuon_mesh* mesh,
                   dmuon_communicator** communicator);

/* shm: find the other ranks' memory. Collective; before it nothing but dmuon_close may be called. */
int dmuon_shm_attach(dmuon_communicator* communicator);

/* shm: dmuon_call that can be interrupted. `*paused` is 0 at first. If it is 1 afterwards, the call
 * has not ended: a signal handler may have run while it slept. The same function, with the same
 * arguments, lets it go on; dmuon_shm_give_up ends it, and later calls of the operation fail. */
int dmuon_shm_call(dmuon_group* group, uint64_t buffer, uint64_t home, int32_t* paused);
int dmuon_shm_give_up(dmuon_group* group);

/* shm: dmuon_publish_wait that can be interrupted, as dmuon_shm_call. All 0 at first; what is beside
 * `paused` is the function's own, and a wait that does not go on needs no end. */
typedef struct {
  int32_t paused;
  uint64_t next;
  uint64_t raised;
  int64_t since;
} dmuon_shm_wait;

int dmuon_shm_publish_wait(dmuon_publish* publish, uint64_t first, uint64_t count, uint64_t step,
                           dmuon_shm_wait* wait);

/* Open a communicator between GPUs, over NCCL's device API. Collective.
 *   id: 128 bytes that one rank got from dmuon_gin_unique_id and gave to all.
 *   device: CUDA device of this rank. */
int dmuon_gin_unique_id(void* id, uint64_t bytes);
int dmuon_gin_open(const void* id, uint64_t bytes, int32_t device, const dmuon_mesh* mesh,
                   dmuon_communicator** communicator);

/* What a communicator's puts between nodes go over. NCCL decides it on each rank, and both ends of
 * a put pick a context by these numbers: whoever opens a communicator compares them between all
 * ranks before the first call. */
typedef struct {
  int32_t contexts;    /* queue pairs of one peer; 0 on a single node */
  int32_t connections; /* NICs, or parts of them, that contexts are dealt out to */
} dmuon_gin_network;
int dmuon_gin_network_of(const dmuon_communicator* communicator, dmuon_gin_network* network);

#ifdef __cplusplus
}
#endif
#endif /* DMUON_H_ */
