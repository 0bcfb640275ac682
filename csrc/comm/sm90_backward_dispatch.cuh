// What the backward fetches: rows of dy, with their router weights, and rows of x for a replay.
#pragma once

#include "../kernels/sm90_backward_params.cuh"
#include "sm90_fetch.cuh"

namespace mok {

__device__ __forceinline__ __nv_bfloat16* ring_of(const BackwardParams& params, bool dy) { return dy ? params.dy_ring : params.x_ring; }

// Rows of the first fetch tasks, which all warps of the grid fetch before they take up their roles.
__device__ __forceinline__ int64_t opening_rows(const BackwardParams& params) {
  // 32-bit: a 64-bit division is a function call, which leaves the consumers too few registers.
  const uint32_t columns = params.shape.pass == Pass::kRecompute ? kGateUpCols : kActivationGradCols;
  const uint32_t tiles = (static_cast<uint32_t>(params.shape.intermediate) + columns - 1) / columns;
  return min_of(params.totals->first_macro_rows, (gridDim.x + tiles - 1) / tiles * kBlockRows);
}

__device__ __forceinline__ void fetch_opening(const BackwardParams& params, int64_t rows, uint32_t lane) {
  while (true) {
    const int64_t row = take_ticket(&params.state->first_ticket, lane);
    if (row >= rows) return;
    const BackwardRecord& task = params.comm_records[row / kDispatchRows];
    fetch_rows(params, task, static_cast<int32_t>(row % kDispatchRows), 1, lane);
  }
}

// For all warps, before the roles: helps where the peers are there at once. Written out here and in the forward: from one function for both the
// compiler makes other code of this loop, in a place where all warps of a launch wait.
__device__ __forceinline__ void help_opening(const BackwardParams& params, const WaitContext& context, uint32_t lane) {
  constexpr int kPolls = 10000;
  const int64_t* rows = reinterpret_cast<const int64_t*>(params.peers.flags[params.shape.rank]);
  for (int polls = 0; polls < kPolls; ++polls) {
    const bool here =
        static_cast<int64_t>(lane) >= params.shape.ep_size || ptx::load_acquire_system(rows + lane * kFlagWords + kFlagEntered) >= context.call;
    if (all_here(here)) {
      fetch_opening(params, opening_rows(params), lane);
      return;
    }
    __nanosleep(64);
  }
}

}  // namespace mok
