// The part of a fabric that lies inside the node, for a thread block over memory that all ranks of
// the node map: the first half of the contract in core/fabric.h.
//
// Memory is a template argument:
//   char* at(rail, offset)   that rank's window
//   char* everyone(offset)   multicast address of all ranks' windows; only if multicast() is true
//   bool multicast()         whether this communicator has multicast addresses
//   int rails(), rail()
//   static constexpr bool kMulticast   whether code that uses multicast is compiled at all
//
// Every operation ends with a barrier, or in a broadcast, which is one. So what the block's threads
// moved in one operation, all of them see in the next.
#pragma once

#include "../core/route.h"
#include "block.cuh"
#include "control.h"

namespace dmuon {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DMUON_MULTIMEM 1
#endif

#if defined(DMUON_MULTIMEM)
// The switch writes all ranks' memory.
DMUON_DEVICE void multicast_store(char* to, const Vector& v) {
  asm volatile("multimem.st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// The switch adds all ranks' memory: bfloat16 in float32, then rounded once.
template <class Elements>
DMUON_DEVICE Vector multicast_sum(const char* from) {
  Vector v;
  if constexpr (Elements::kElements == 8) {
    asm volatile("multimem.ld_reduce.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("multimem.ld_reduce.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  }
  return v;
}
#endif

template <class Memory>
class NodeFabric {
 public:
  DMUON_DEVICE NodeFabric(const Memory& memory, const NodeWords& words)
      : memory_(memory), words_(words) {}

  DMUON_DEVICE bool entered(int rail, uint64_t number) {
    return poll(own(word(words_.entered, rail))) >= number;
  }

  DMUON_DEVICE void enter(uint64_t number) {
    // What earlier kernels of the rank's stream wrote happened before this kernel began; the
    // release passes it on.
    for (int rail = thread(); rail < memory_.rails(); rail += threads()) {
      store_release(word_at(rail, words_.entered), number);
    }
    barrier();
  }

  DMUON_DEVICE bool finished(uint64_t count) {
    for (int rail = 0; rail < memory_.rails(); ++rail) {
      if (poll(own(word(words_.finished, rail))) < count) return false;
    }
    return true;
  }

  DMUON_DEVICE void finish() {
    // Invariant: behind the barrier the release covers the stores of all threads, multicast stores
    // too, and their reads of the other ranks' memory, which ended when their values were used.
    barrier();
    for (int rail = thread(); rail < memory_.rails(); rail += threads()) {
      add_release(word_at(rail, words_.finished), 1);
    }
    barrier();
  }

  DMUON_DEVICE void fetch(uint64_t to, int rail, uint64_t from, uint32_t bytes) {
    copy(memory_.at(memory_.rail(), to), memory_.at(rail, from), bytes);
    barrier();
  }

  DMUON_DEVICE void multicast(uint64_t to, int rail, uint64_t from, uint32_t bytes, int except) {
    const char* source = memory_.at(rail, from);
#if defined(DMUON_MULTIMEM)
    if (Memory::kMulticast && memory_.multicast()) {
      // `except` is written too, with the bytes that it has: leaving it out takes a store per rank.
      char* target = memory_.everyone(to);
      stream<8>(bytes, [&](uint32_t x) { return load(source + x); },
                [&](uint32_t x, const Vector& v) { multicast_store(target + x, v); });
      barrier();
      return;
    }
#endif
    stream<4>(bytes, [&](uint32_t x) { return load(source + x); },
              [&](uint32_t x, const Vector& v) {
                for (int peer = 0; peer < memory_.rails(); ++peer) {
                  if (peer != except) store(memory_.at(peer, to) + x, v);
                }
              });
    barrier();
  }

  DMUON_DEVICE void reduce(int rail, uint64_t to, uint64_t from, uint32_t bytes, Dtype dtype,
                           uint64_t partials, int count, uint64_t stride) {
    if (dtype == Dtype::bfloat16) {
      sum<Bfloat16>(rail, to, from, bytes, partials, count, stride);
    } else {
      sum<Float32>(rail, to, from, bytes, partials, count, stride);
    }
    barrier();
  }

  // Thread 0's value, for all.
  DMUON_DEVICE uint64_t uniform(uint64_t value) { return broadcast_(value); }

  // Cursors lie in the block's shared memory and all threads read them.
  template <class T>
  DMUON_DEVICE void keep(T* place, const T& value) {
    barrier();  // all have read the old one
    if (thread() == 0) *place = value;
    barrier();
  }

 protected:
  DMUON_DEVICE char* own(uint64_t offset) const { return memory_.at(memory_.rail(), offset); }

  // One thread acquires, the broadcast hands value and order to all.
  DMUON_DEVICE uint64_t poll(const char* place) {
    uint64_t value = 0;
    if (thread() == 0) value = load_acquire(reinterpret_cast<const uint64_t*>(place));
    return broadcast_(value);
  }

  DMUON_DEVICE static void copy(char* to, const char* from, uint32_t bytes) {
    stream<8>(bytes, [&](uint32_t x) { return load(from + x); },
              [&](uint32_t x, const Vector& v) { store(to + x, v); });
  }

  // Every thread has up to kBatch loads on the way before its first store.
  template <int kBatch, class Load, class Store>
  DMUON_DEVICE static void stream(uint32_t bytes, const Load& load_at, const Store& store_at) {
    const uint32_t step = threads() * sizeof(Vector);
    for (uint32_t x = thread() * sizeof(Vector); x < bytes; x += kBatch * step) {
      Vector held[kBatch];
      DMUON_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (x + i * step < bytes) held[i] = load_at(x + i * step);
      }
      DMUON_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (x + i * step < bytes) store_at(x + i * step, held[i]);
      }
    }
  }

  Memory memory_;
  NodeWords words_;
  Broadcast broadcast_;

 private:
  DMUON_DEVICE static uint64_t word(uint64_t base, int rail) {
    return base + NodeWords::kStride * rail;
  }
  // This rank's word at another rank.
  DMUON_DEVICE uint64_t* word_at(int rail, uint64_t base) const {
    return reinterpret_cast<uint64_t*>(memory_.at(rail, word(base, memory_.rail())));
  }

  // A thread reads all addends of an element before it writes the element, so `to` may equal `from`
  // or a partial.
  template <class Elements>
  DMUON_DEVICE void sum(int rail, uint64_t to, uint64_t from, uint32_t bytes, uint64_t partials,
                        int count, uint64_t stride) const {
    char* target = memory_.at(rail, to);
    const char* partial = own(partials);
#if defined(DMUON_MULTIMEM)
    if (Memory::kMulticast && memory_.multicast()) {
      // The switch rounds the node's sum of a bfloat16 payload before the partials are added: one
      // rounding more per node than without multicast.
      const char* source = memory_.everyone(from);
      stream<4>(
          bytes,
          [&](uint32_t x) {
            const Vector node = multicast_sum<Elements>(source + x);
            if (count == 0) return node;
            float sums[Elements::kElements];
            clear(sums);
            Elements::add(sums, node);
            for (int i = 0; i < count; ++i) Elements::add(sums, load(partial + i * stride + x));
            return Elements::round(sums);
          },
          [&](uint32_t x, const Vector& v) { store(target + x, v); });
      return;
    }
#endif
    constexpr int kBatch = 4;
    const uint32_t step = threads() * sizeof(Vector);
    for (uint32_t x = thread() * sizeof(Vector); x < bytes; x += kBatch * step) {
      float sums[kBatch][Elements::kElements];
      DMUON_UNROLL
      for (int i = 0; i < kBatch; ++i) clear(sums[i]);
      for (int addend = 0; addend < memory_.rails() + count; ++addend) {
        const int i = addend - memory_.rails();
        const char* source = i < 0 ? memory_.at(addend, from) : partial + i * stride;
        add<Elements, kBatch>(sums, source, x, step, bytes);
      }
      DMUON_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (x + i * step < bytes) store(target + x + i * step, Elements::round(sums[i]));
      }
    }
  }

  template <class Elements, int kBatch>
  DMUON_DEVICE static void add(float (&sums)[kBatch][Elements::kElements], const char* source,
                               uint32_t x, uint32_t step, uint32_t bytes) {
    Vector held[kBatch];
    DMUON_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (x + i * step < bytes) held[i] = load(source + x + i * step);
    }
    DMUON_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (x + i * step < bytes) Elements::add(sums[i], held[i]);
    }
  }

  template <int kElements>
  DMUON_DEVICE static void clear(float (&sums)[kElements]) {
    DMUON_UNROLL
    for (int i = 0; i < kElements; ++i) sums[i] = kNothing;
  }
};

}  // namespace dmuon
