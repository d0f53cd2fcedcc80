// Bytes under weak memory, for the `sim` fabric: what a correct protocol may rely on, and no more.
//
// A group's plain copies (fetch, multicast, reduce) are done at a random later time, each
// destination on its own, until a release of that group does them at once. A group sees its own
// copies in order. A put reads its source at any time before its counter goes up; its bytes land at
// any time, before its own signal, in no order with other puts.
//
// Not modelled: a load that is done before an earlier flag is read. Reads happen when they are
// issued or later.
//
// Memory checks as it goes: nobody touches a rank's buffers before it entered or after it left, no
// bytes are overwritten that somebody still has to read, and when a rank leaves each of its bytes
// was written as often as it should and is right.
#pragma once

#include <cstdint>
#include <vector>

#include "core/table.h"

namespace dmuon::sim {

class Memory {
 public:
  struct Range {
    int32_t rank;
    uint64_t begin, end;
  };
  // A copy or reduction that is under way.
  struct Move {
    int32_t group = -1;   // of which a release ends it; -1: none
    uint64_t number = 0;  // of the call that does it
    std::vector<Range> reads;  // a reduction: of the ranks of the node, then of the partials
    Range write{};
    bool sum = false;
    bool captured = false;  // a put that has read its source
    int32_t owner = -1;     // of a read that is only checked: whose bytes it must find
    std::vector<uint8_t> bytes;  // of a put, between reading and landing; or what is stored
  };

  Memory(Operation operation, Dtype dtype, int nodes, int rails, uint64_t buffer_bytes,
         uint64_t home_bytes, uint64_t ring_bytes, uint64_t seed);

  uint64_t home_base() const { return buffer_bytes_; }
  uint64_t ring_base() const { return buffer_bytes_ + home_bytes_; }

  // Start a move; `ordered`: the same group's earlier moves that it meets are done first. Returns
  // its number.
  uint32_t start(Move move, bool ordered);
  void capture(uint32_t move);  // a put reads its source
  void finish(uint32_t move);   // done, if it is not yet
  void release(int32_t group);  // ends the group's moves

  // A rank is about to make call `number`: its stream writes the call's input, which a release of
  // group -2 - rank ends. Returns the moves, to be finished at some time.
  std::vector<uint32_t> launch(int32_t rank, uint64_t number, const std::vector<Segment>& segments);
  void enter(int32_t rank, uint64_t number);
  // Checks what the rank got, then overwrites it, as its user may.
  void leave(int32_t rank, const std::vector<Segment>& segments);

  // Publish. A source's user writes a task, which a release of group -2 - rank ends.
  uint32_t update(int32_t rank, uint64_t number, const Segment& task);
  // What a rank's copy of a task must be at this moment.
  void expect(int32_t rank, uint64_t number, const Segment& task) const;
  // The rank's node reads its copy of a task at some time, until the move is finished.
  uint32_t gather(int32_t rank, uint64_t number, const Segment& task);
  // The rank's call has ended: it got every other task once, and nothing else.
  void end_publish(int32_t rank, uint64_t number, const std::vector<Segment>& tasks);

  // All calls are made: nothing is under way.
  void end() const;

 private:
  struct Rank {
    std::vector<uint8_t> window;
    std::vector<uint8_t> writes;  // per kAlignment bytes of the user's part: in the present call
    uint64_t entered = 0;         // number of the call that the rank is in; 0: none
  };

  // What a rank's user writes at `begin` for call `number`.
  std::vector<uint8_t> input(int32_t rank, uint64_t number, uint64_t begin, uint64_t bytes) const;
  std::vector<uint8_t> expected_sum(uint64_t number, uint64_t offset, uint64_t bytes) const;
  std::vector<uint8_t> value_of(const Move& move) const;
  void store(const Move& move, uint32_t index);
  void check_bytes(int32_t rank, uint64_t number, int32_t owner, uint64_t begin,
                   const std::vector<uint8_t>& bytes, const char* what) const;
  void check_inside(const Range& range, uint64_t number, const char* what) const;
  void close(uint32_t move);
  int32_t owner(const Segment& s) const { return s.node * rails_ + s.rail; }

  Operation operation_;
  Dtype dtype_;
  int nodes_, rails_;
  uint64_t buffer_bytes_, home_bytes_, seed_;
  std::vector<Rank> ranks_;
  std::vector<Move> moves_;
  std::vector<uint32_t> open_;  // numbers of moves under way, in the order of their start
};

}  // namespace dmuon::sim
