// Between the simulator's event loop and the publish, as sim_group.h is for the operators.
#pragma once

#include "core/publish.h"
#include "fabric/sim_group.h"

namespace dmuon::sim {

// What the publish asks of a fabric.
class PublishFabric {
 public:
  virtual void put(int node, uint64_t to, uint64_t from, uint64_t n, int signal, int counter) = 0;
  virtual void signal(int node, int signal) = 0;
  virtual uint64_t read_signal(int signal) = 0;
  virtual uint64_t read_counter(int counter) = 0;
  virtual uint64_t released() = 0;
  virtual void flag(uint32_t number, uint64_t step) = 0;
  template <class T>
  void keep(T* place, const T& value) {
    *place = value;
  }

 protected:
  ~PublishFabric() = default;
};

using MakePublishActor = Actor* (*)(const PublishCall* call, PublishCursor* cursors,
                                    PublishFabric* fabric);

}  // namespace dmuon::sim

// The caller deletes what it gets; call, cursors and fabric outlive it.
extern "C" dmuon::sim::Actor* dmuon_sim_make_publish_actor(const dmuon::PublishCall* call,
                                                           dmuon::PublishCursor* cursors,
                                                           dmuon::sim::PublishFabric* fabric);
