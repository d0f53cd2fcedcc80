// A thread block as one thread group: what its threads share, and the memory orders that they use.
//
// The same code compiles for a host, where a block is a few threads, so that what is written over
// these functions is tested, and checked by ThreadSanitizer, without a GPU.
#pragma once

#include "../core/bfloat16.h"

#if !defined(__CUDACC__)
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define DMUON_DEVICE __device__ __forceinline__
#define DMUON_UNROLL _Pragma("unroll")
#else
#define DMUON_DEVICE inline
#define DMUON_UNROLL
#endif

namespace dmuon {

constexpr int kBlockThreads = 256;

// What one load or store moves.
struct alignas(kAlignment) Vector {
  uint32_t word[4];
};

#if defined(__CUDACC__)

DMUON_DEVICE uint32_t thread() { return threadIdx.x; }
DMUON_DEVICE uint32_t threads() { return kBlockThreads; }

// What any thread of the block did before, all see behind it.
DMUON_DEVICE void barrier() { __syncthreads(); }

DMUON_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Between looks at a word that another rank writes.
DMUON_DEVICE void pause() { __nanosleep(64); }

// The orders are of system scope: the other side is another GPU or a NIC. A release is cumulative:
// behind a barrier() it covers what all threads of the block wrote and read before the barrier.
DMUON_DEVICE uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
DMUON_DEVICE void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "l"(value)
               : "memory");
}
// Adds of several groups to one word form one release sequence: who reads the sum acquires what
// each of them released.
DMUON_DEVICE void add_release(uint64_t* word, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "l"(value)
               : "memory");
}
// Sets a word of this GPU from 0 to 1; whether this thread was the one to do it.
DMUON_DEVICE bool claim(uint64_t* word) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, 1ull) == 0;
}

// Weak accesses, ordered by the words above. Not kept in L1: each byte is used once.
DMUON_DEVICE Vector load(const char* from) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return v;
}
DMUON_DEVICE void store(char* to, const Vector& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

DMUON_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DMUON_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

// Two values, each rounded to the nearest bfloat16, ties to even.
DMUON_DEVICE uint32_t round_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DMUON_DEVICE uint64_t* broadcast_cells() {
  __shared__ uint64_t cells[2];
  return cells;
}

#else

// A thread's place in its block; set by whoever starts the block's threads.
struct HostThread {
  uint32_t index;
  uint32_t count;
  pthread_barrier_t* barrier;
  uint64_t* cells;  // two of the block, for Broadcast
};
inline thread_local HostThread host_thread;

inline uint32_t thread() { return host_thread.index; }
inline uint32_t threads() { return host_thread.count; }
inline void barrier() { pthread_barrier_wait(host_thread.barrier); }
inline uint64_t* broadcast_cells() { return host_thread.cells; }

inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(
      std::chrono::steady_clock::now().time_since_epoch()).count());
}
inline void pause() { sched_yield(); }

inline uint64_t load_acquire(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store_release(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
inline void add_release(uint64_t* word, uint64_t value) {
  __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
}
inline bool claim(uint64_t* word) {
  uint64_t unset = 0;
  return __atomic_compare_exchange_n(word, &unset, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline Vector load(const char* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(char* to, const Vector& v) { std::memcpy(to, &v, sizeof v); }

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline uint32_t round_one(float value) {
  uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // not a number, as the GPU rounds it
  round_to_bfloat16(bits);
  return bits;
}
inline uint32_t round_pair(float low, float high) {
  return round_one(low) | round_one(high) << 16;
}

#endif

// Gives all threads what thread 0 has. One object per block: all of a kernel share the cells.
class Broadcast {
 public:
  DMUON_DEVICE uint64_t operator()(uint64_t value) {
    uint64_t* cells = broadcast_cells();
    cell_ ^= 1;
    if (thread() == 0) cells[cell_] = value;
    // Invariant: a cell is written again two barriers later; all threads have read it by then.
    barrier();
    return cells[cell_];
  }

 private:
  uint32_t cell_ = 0;
};

// The elements of one Vector, added in float32. A sum begins at kNothing, which changes no value.
constexpr float kNothing = -0.0f;

struct Bfloat16 {
  static constexpr int kElements = 8;
  DMUON_DEVICE static void add(float (&sum)[kElements], const Vector& v) {
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += as_float(v.word[i] << 16);
      sum[2 * i + 1] += as_float(v.word[i] & 0xffff0000u);
    }
  }
  DMUON_DEVICE static Vector round(const float (&sum)[kElements]) {
    Vector v;
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) v.word[i] = round_pair(sum[2 * i], sum[2 * i + 1]);
    return v;
  }
};
struct Float32 {
  static constexpr int kElements = 4;
  DMUON_DEVICE static void add(float (&sum)[kElements], const Vector& v) {
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) sum[i] += as_float(v.word[i]);
  }
  DMUON_DEVICE static Vector round(const float (&sum)[kElements]) {
    Vector v;
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) v.word[i] = as_bits(sum[i]);
    return v;
  }
};

}  // namespace dmuon
