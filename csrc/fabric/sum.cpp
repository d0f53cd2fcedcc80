#include "sum.h"

#include <cstring>

#include "../core/bfloat16.h"

namespace dmuon {
namespace {

// Vectors of eight, which the compiler maps to what the processor has.
constexpr size_t kLanes = 8;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

struct Float32 {
  static constexpr size_t kBytes = 4;
  // By reference: a 32-byte vector has no portable way to be returned.
  static void load(const std::byte* from, Floats& value) {
    std::memcpy(&value, from, sizeof value);
  }
  static void store(std::byte* to, const Floats& value) { std::memcpy(to, &value, sizeof value); }
  static float load_one(const std::byte* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void store_one(std::byte* to, float value) { std::memcpy(to, &value, sizeof value); }
};

// The upper half of a float32.
struct Bfloat16 {
  static constexpr size_t kBytes = 2;
  static void load(const std::byte* from, Floats& value) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&value, &words, sizeof value);
  }
  static void store(std::byte* to, const Floats& value) {
    Words words;
    std::memcpy(&words, &value, sizeof words);
    // Invariant: a NaN stays one. It is an input's or the processor's own, whose lower halves are 0,
    // so rounding carries nothing into its upper half.
    round_to_bfloat16(words);
    const Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }
};

template <class Type, size_t vectors>
void sum_block(std::byte* to, const std::byte* const* from, int count, size_t at) {
  constexpr size_t kVector = kLanes * Type::kBytes;
  Floats total[vectors];
  for (size_t v = 0; v < vectors; ++v) Type::load(from[0] + at + v * kVector, total[v]);
  for (int i = 1; i < count; ++i) {
    for (size_t v = 0; v < vectors; ++v) {
      Floats value;
      Type::load(from[i] + at + v * kVector, value);
      total[v] += value;
    }
  }
  for (size_t v = 0; v < vectors; ++v) Type::store(to + at + v * kVector, total[v]);
}

// Returns how many bytes it summed: all but a rest shorter than a vector.
template <class Type>
size_t sum_vectors(std::byte* to, const std::byte* const* from, int count, size_t bytes) {
  constexpr size_t kVector = kLanes * Type::kBytes;
  size_t at = 0;
  for (; at + 4 * kVector <= bytes; at += 4 * kVector) sum_block<Type, 4>(to, from, count, at);
  for (; at + kVector <= bytes; at += kVector) sum_block<Type, 1>(to, from, count, at);
  return at;
}

}  // namespace

void sum(Dtype dtype, std::byte* to, const std::byte* const* from, int count, size_t bytes) {
  if (dtype == Dtype::bfloat16) {
    sum_vectors<Bfloat16>(to, from, count, bytes);  // 16 bytes are one vector: no rest
    return;
  }
  size_t at = sum_vectors<Float32>(to, from, count, bytes);
  for (; at < bytes; at += Float32::kBytes) {
    float total = Float32::load_one(from[0] + at);
    for (int i = 1; i < count; ++i) total += Float32::load_one(from[i] + at);
    Float32::store_one(to + at, total);
  }
}

}  // namespace dmuon
