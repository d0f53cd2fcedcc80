// Sums of equal stretches of memory, for fabrics whose ranks add on the host.
#pragma once

#include "../core/types.h"

namespace dmuon {

// to[i] = from[0][i] + from[1][i] + ... + from[count - 1][i]: added in float32 in this order,
// rounded once, to nearest even, to dtype; a NaN stays one. bytes: a multiple of 16. `to` may equal
// any of `from`, but must not meet it shifted. count >= 1.
void sum(Dtype dtype, std::byte* to, const std::byte* const* from, int count, size_t bytes);

}  // namespace dmuon
