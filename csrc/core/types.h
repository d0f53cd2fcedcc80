// Words that every file of the core shares. No fabric, no CUDA, no operating system.
//
// Letters: R nodes of K ranks each. A rank is (node, rail): 0 <= node < R, 0 <= rail < K. The K
// ranks of a node reach each other's memory by load and store. Across nodes a rank reaches only
// the rank of the same rail, by put and signal.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define DMUON_HD __host__ __device__
#else
#define DMUON_HD
#endif

namespace dmuon {

// Every byte offset that is moved is a multiple of this: one 128-bit load, store or multimem access.
constexpr uint64_t kAlignment = 16;
// Slices of a segment begin at multiples of this from its first byte, so that a warp's accesses
// to a slice fill whole memory sectors.
constexpr uint64_t kSliceBytes = 128;
// Paper, appendix C.2.
constexpr uint32_t kChunkBytes = 64 * 1024;
// Slots of a ring: one filled, one on its way, and time for the acknowledgement of the others.
constexpr int kSlots = 4;
// Tiles of one source that a publish has on their way to the next node: more than a link carries
// while an acknowledgement comes back.
constexpr int kPublishTiles = 32;
constexpr int kMaxBlocks = 16;
constexpr int kStarNodes = 16;
// Limits that are checked when a table is built.
constexpr int kMaxNodes = 1024;
constexpr int kMaxRails = 72;
constexpr uint64_t kMaxSegments = 65536;
constexpr uint32_t kMaxChunkBytes = 1u << 30;
// Numbers of chunks and pieces fit 32 bits: a piece is a part of one segment in one chunk.
constexpr uint64_t kMaxChunks = 1u << 30;

enum class Dtype : int32_t { bfloat16 = 0, float32 = 1 };
enum class Operation : int32_t { all_gather_v = 0, reduce_scatter_v = 1, publish = 2 };

DMUON_HD constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

DMUON_HD constexpr int modulo(int value, int size) { return ((value % size) + size) % size; }

}  // namespace dmuon
