#include "fabric/sim_publish_group.h"

namespace dmuon::sim {
namespace {

class PublishActor final : public Actor {
 public:
  PublishActor(const PublishCall& call, PublishCursor* cursors, PublishFabric& fabric)
      : group_(call, cursors), fabric_(fabric) {}
  Progress step() override { return group_.step(fabric_); }
  Stuck stuck() const override { return group_.stuck(); }

 private:
  PublishGroup<PublishFabric> group_;
  PublishFabric& fabric_;
};

}  // namespace
}  // namespace dmuon::sim

dmuon::sim::Actor* dmuon_sim_make_publish_actor(const dmuon::PublishCall* call,
                                                dmuon::PublishCursor* cursors,
                                                dmuon::sim::PublishFabric* fabric) {
  return new dmuon::sim::PublishActor(*call, cursors, *fabric);
}
