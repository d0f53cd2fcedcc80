// bfloat16, the upper half of a float32, for whoever adds on a host.
#pragma once

#include "types.h"

namespace dmuon {

// Turns a float32's bits into those of the nearest bfloat16, ties to even. Bits: uint32_t, or a
// vector of them. Not for a NaN with bits in its lower half: they may carry into the sign.
template <class Bits>
DMUON_HD inline void round_to_bfloat16(Bits& bits) {
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace dmuon
