#include "fabric/sim_group.h"

#include "core/allgatherv.h"
#include "core/reducescatterv.h"

namespace dmuon::sim {
namespace {

template <class Operator>
class GroupActor final : public Actor {
 public:
  GroupActor(const Call& call, int index, Cursor* cursors, Fabric& fabric)
      : group_(call, index, cursors), fabric_(fabric) {}
  Progress step() override { return group_.step(fabric_); }
  Stuck stuck() const override { return group_.stuck(); }

 private:
  Group<Fabric, Operator> group_;
  Fabric& fabric_;
};

}  // namespace
}  // namespace dmuon::sim

dmuon::sim::Actor* dmuon_sim_make_actor(dmuon::Operation operation, const dmuon::Call* call,
                                        int index, dmuon::Cursor* cursors,
                                        dmuon::sim::Fabric* fabric) {
  using namespace dmuon::sim;
  if (operation == dmuon::Operation::all_gather_v) {
    return new GroupActor<dmuon::AllGatherV>(*call, index, cursors, *fabric);
  }
  return new GroupActor<dmuon::ReduceScatterV>(*call, index, cursors, *fabric);
}
