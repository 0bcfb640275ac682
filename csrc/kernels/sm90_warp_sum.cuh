// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

namespace mok {
namespace {

// The sum of the values of this lane and of all lower ones. Called by all 32 lanes.
__device__ __forceinline__ int64_t sum_to_lane(int64_t value, uint32_t lane) {
  for (uint32_t step = 1; step < 32; step *= 2) {
    const int64_t lower = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

}  // namespace
}  // namespace mok
