// What the forward fetches: rows of x, with their router weights.
#pragma once

#include "../kernels/sm90_params.cuh"
#include "sm90_fetch.cuh"

namespace mok {

// A reference: the address is read where it is used, not held across the loads of a row's source.
__device__ __forceinline__ __nv_bfloat16* const& ring_of(const ForwardParams& params, bool) { return params.x_ring; }

// The opening: rows of the first fetch tasks, one row a ticket, for all warps. These tasks wait for nothing but the peers, so no warp can end up
// waiting for a tile that it should compute itself. Every warp fetches rows for the first wave of tiles before it takes up its role; the
// communication warps, and consumers without a tile, go on with those of the next waves.
constexpr int64_t kOpeningWaves = 3;

__device__ __forceinline__ int64_t wave_rows(const ForwardParams& params) {
  return ceil_div(gridDim.x, params.totals->gemm1_tiles) * kBlockRows;
}

__device__ __forceinline__ int64_t opening_rows(const ForwardParams& params) {
  return min_of(params.totals->first_macro_rows, kOpeningWaves * wave_rows(params));
}

// Fetches a row; false when there was none left below `end`, or it was the last one that this warp must care for.
__device__ __forceinline__ bool fetch_opening_row(const ForwardParams& params, int64_t end, uint32_t lane) {
  const int64_t row = take_ticket(&params.state->first_ticket, lane);
  if (row >= opening_rows(params)) return false;
  const TaskRecord task = params.comm_records[row / kDispatchRows];
  fetch_rows(params, task, static_cast<int32_t>(row % kDispatchRows), 1, lane);
  return row < end;
}

__device__ __forceinline__ void fetch_opening(const ForwardParams& params, int64_t end, uint32_t lane) {
  while (fetch_opening_row(params, end, lane)) {
  }
}

__device__ __forceinline__ bool peers_entered(const ForwardParams& params, const WaitContext& context, uint32_t lane) {
  const int64_t* rows = reinterpret_cast<const int64_t*>(params.peers.flags[params.shape.rank]);
  const bool here =
      static_cast<int64_t>(lane) >= params.shape.ep_size || ptx::load_acquire_system(rows + lane * kFlagWords + kFlagEntered) >= context.call;
  return all_here(here);
}

// For all warps, before the roles: helps where the peers are there soon. A function call here, such as the report of a wait that ran out, would
// leave the consumers too few registers.
__device__ __forceinline__ void help_opening(const ForwardParams& params, const WaitContext& context, uint32_t lane) {
  constexpr int kPolls = 10000;
  for (int polls = 0; polls < kPolls; ++polls) {
    if (peers_entered(params, context, lane)) {
      while (fetch_opening_row(params, wave_rows(params), lane)) {
      }
      return;
    }
    __nanosleep(64);
  }
}

}  // namespace mok
