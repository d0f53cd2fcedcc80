// A plan as one stretch of bytes, to be copied to a device. Host side.
#pragma once

#include <cstring>
#include <vector>

#include "../core/plan.h"

namespace dmuon {

class PlanImage {
 public:
  explicit PlanImage(const PlanView& plan) : plan_(plan) {
    for (int i = 0; i < plan.pipeline_count; ++i) chunks_ += plan.pipelines[i].chunks;
    add(plan.pieces, plan.chunk_pieces[chunks_]);
    add(plan.pipelines, plan.pipeline_count);
    add(plan.chunk_pieces, chunks_ + 1);
  }

  const std::vector<char>& bytes() const { return bytes_; }

  // The plan, once bytes() lie at `base`, which is aligned for a Piece.
  PlanView at(const char* base) const {
    PlanView view = plan_;
    view.pieces = reinterpret_cast<const Piece*>(base);
    base += plan_.chunk_pieces[chunks_] * sizeof(Piece);
    view.pipelines = reinterpret_cast<const Pipeline*>(base);
    base += plan_.pipeline_count * sizeof(Pipeline);
    view.chunk_pieces = reinterpret_cast<const uint32_t*>(base);
    return view;
  }

 private:
  // In the order of falling alignment, so that each array is aligned behind the one before it.
  template <class Item>
  void add(const Item* items, uint64_t count) {
    const char* begin = reinterpret_cast<const char*>(items);
    bytes_.insert(bytes_.end(), begin, begin + count * sizeof(Item));
  }

  PlanView plan_;
  uint32_t chunks_ = 0;
  std::vector<char> bytes_;
};

}  // namespace dmuon
