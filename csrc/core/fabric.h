// What the core asks of a fabric. There is no base class: fabrics are template arguments, so that
// a device compiler sees through them. This file states the contract and holds no code.
//
// A fabric object belongs to one thread group: all its threads (on a host: its one thread) make
// the same calls with the same arguments, and all get the same results. Offsets are bytes in the
// window, a stretch of memory that looks the same on every rank.
//
// Inside the node (rails 0 .. K-1):
//   bool entered(rail, number)       whether that rank has entered call `number`; acquires what it
//                                    wrote before
//   void enter(number)               says so to the node; releases what was written before the call
//   bool finished(count)             whether every rank of the node has `count` finished groups;
//                                    acquires what they wrote
//   void finish()                    adds one to this rank's count, at all ranks of the node;
//                                    releases what this group wrote in their memory and ends what it
//                                    read there
//   void fetch(to, rail, from, n)    own[to] = rail[from]
//   void multicast(to, rail, from, n, except)
//                                    every rank's [to] = rail[from]; rank `except` need not be
//                                    written, it has these bytes
//   void reduce(rail, to, from, n, dtype, partials, count, stride)
//                                    rail[to] = sum over the node's ranks of [from], plus own
//                                    [partials + i * stride] for i < count; added in float32 in
//                                    this order, rounded once to dtype
//   (rail[x], own[x]: n bytes at offset x of that rank's window; n and x multiples of 16. `to` may
//   equal `from` or a partial.)
//
// Across nodes, to and from the same rail:
//   void put(node, to, from, n, signal, counter)
//                                    copies own[from] there; then adds one to its signal. Whoever
//                                    sees the signal sees the bytes. Adds one to the own counter when
//                                    own[from] may be overwritten. Returns at once
//   void signal(node, signal)        adds one to its signal; what this group read before is read
//   uint64_t read_signal(signal)     own word; acquires what the puts wrote that it counts
//   uint64_t read_counter(counter)   own word
//
// For the core's own state, which all threads of a group read and one writes:
//   void keep(place, value)          *place = value, seen by all threads of the group afterwards
//
// No call blocks.
#pragma once
