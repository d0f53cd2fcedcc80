// Between the simulator's event loop and the core: what a thread group calls, and what drives it.
//
// The core is compiled in one small file against these two classes, so that the loop can also drive
// a protocol that was compiled elsewhere: a changed one, of which the checks must find a fault.
#pragma once

#include "core/call.h"
#include "core/group.h"

namespace dmuon::sim {

// The contract of core/fabric.h, for one thread group.
class Fabric {
 public:
  virtual bool entered(int rail, uint64_t number) = 0;
  virtual void enter(uint64_t number) = 0;
  virtual bool finished(uint64_t count) = 0;
  virtual void finish() = 0;
  virtual void fetch(uint64_t to, int rail, uint64_t from, uint64_t n) = 0;
  virtual void multicast(uint64_t to, int rail, uint64_t from, uint64_t n, int except) = 0;
  virtual void reduce(int rail, uint64_t to, uint64_t from, uint64_t n, Dtype dtype,
                      uint64_t partials, int count, uint64_t stride) = 0;
  virtual void put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) = 0;
  virtual void signal(int node, int signal) = 0;
  virtual uint64_t read_signal(int signal) = 0;
  virtual uint64_t read_counter(int counter) = 0;
  void keep(Cursor* place, const Cursor& value) { *place = value; }

 protected:
  ~Fabric() = default;
};

// One thread group of one call.
class Actor {
 public:
  virtual ~Actor() = default;
  virtual Progress step() = 0;
  virtual Stuck stuck() const = 0;
};

using MakeActor = Actor* (*)(Operation operation, const Call* call, int index, Cursor* cursors,
                             Fabric* fabric);

}  // namespace dmuon::sim

// The caller deletes what it gets; call, cursors and fabric outlive it.
extern "C" dmuon::sim::Actor* dmuon_sim_make_actor(dmuon::Operation operation,
                                                   const dmuon::Call* call, int index,
                                                   dmuon::Cursor* cursors,
                                                   dmuon::sim::Fabric* fabric);
