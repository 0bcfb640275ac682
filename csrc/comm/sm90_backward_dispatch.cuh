// Communication warps of the backward: fetch dy (and, for a replay, x) from the source ranks into the rings.
#pragma once

#include "../kernels/sm90_backward_params.cuh"
#include "sm90_dispatch.cuh"

namespace mok {

// `count` rows, from row `offset` of a fetch task on; announced when they are in place. Router weights come with dy.
__device__ __forceinline__ void fetch_backward_rows(const BackwardParams& params, const BackwardRecord& task, int32_t offset, int32_t count,
                                                    uint32_t lane) {
  const bool dy = task.kind == TaskKind::kDispatchDy;
  const int64_t first_row = task.first_row + offset;
  const int64_t ring_row = static_cast<int64_t>(task.ring_block) * kBlockRows + first_row % kBlockRows;
  int64_t source = 0;
  if (static_cast<int32_t>(lane) < count) {
    const int32_t rank = params.row_source_rank[first_row + lane];
    float weight = 0.0f;
    if (rank >= 0) {
      const int32_t slot = params.row_source_slot[first_row + lane];
      source = (dy ? params.peers.dy[rank] : params.peers.x[rank]) + row_offset(slot / params.topk, params.shape.hidden) * 2;
      if (dy) weight = *reinterpret_cast<const float*>(params.peers.router_weights[rank] + slot * 4ll);
    }
    if (dy) params.weight_ring[ring_row + lane] = weight;
  }
  const int32_t chunks = static_cast<int32_t>(params.shape.hidden / 8);
  __nv_bfloat16* ring = dy ? params.dy_ring : params.x_ring;
  for (int32_t row = 0; row < count; ++row) {
    const int64_t address = __shfl_sync(0xffffffffu, source, row);
    copy_row(reinterpret_cast<const uint4*>(address), reinterpret_cast<uint4*>(ring + row_offset(ring_row + row, params.shape.hidden)), chunks,
             lane);
  }
  // The rows are read by bulk copies, which follow another order than these stores.
  ptx::fence_async_global();
  __syncwarp();
  if (lane == 0) {
    ptx::add_release_gpu(params.counters + task.bumps[0], count);
    ptx::add_release_gpu(params.counters + task.bumps[1], count);
  }
}

// Rows of the first fetch tasks, which all warps of the grid fetch before they take up their roles.
__device__ __forceinline__ int64_t backward_opening_rows(const BackwardParams& params) {
  // 32-bit: a 64-bit division is a function call, which leaves the consumers too few registers.
  const uint32_t columns = params.shape.pass == Pass::kRecompute ? kGateUpCols : kActivationGradCols;
  const uint32_t tiles = (static_cast<uint32_t>(params.shape.intermediate) + columns - 1) / columns;
  return min_of(params.totals->first_macro_rows, (gridDim.x + tiles - 1) / tiles * kBlockRows);
}

__device__ __forceinline__ void fetch_backward_opening(const BackwardParams& params, int64_t rows, uint32_t lane) {
  while (true) {
    const int64_t row = take_ticket(&params.state->first_ticket, lane);
    if (row >= rows) return;
    fetch_backward_rows(params, params.comm_records[row / kDispatchRows], static_cast<int32_t>(row % kDispatchRows), 1, lane);
  }
}

// For all warps, before the roles: helps where the peers are there at once.
__device__ __forceinline__ void help_backward_opening(const BackwardParams& params, const WaitContext& context, uint32_t lane) {
  constexpr int kPolls = 10000;
  const int64_t* rows = reinterpret_cast<const int64_t*>(params.peers.flags[params.shape.rank]);
  for (int polls = 0; polls < kPolls; ++polls) {
    const bool here =
        static_cast<int64_t>(lane) >= params.shape.ep_size || ptx::load_acquire_system(rows + lane * kFlagWords + kFlagEntered) >= context.call;
    const bool all = __all_sync(0xffffffffu, here);
    // What a lane has acquired, the others may read.
    __syncwarp();
    if (all) {
      fetch_backward_opening(params, backward_opening_rows(params), lane);
      return;
    }
    __nanosleep(64);
  }
}

__device__ __forceinline__ void run_backward_communication(const BackwardParams& params, const WaitContext& context, uint32_t lane) {
  const int64_t tasks = params.totals->comm_tasks, opening = backward_opening_rows(params);
  if (tasks > 1) {
    if (!wait_entered(context, lane)) return;
    fetch_backward_opening(params, opening, lane);
  }
  while (true) {
    const int64_t ticket = opening / kFetchRows + take_ticket(&params.state->comm_ticket, lane);
    const int64_t index = ticket / kFetchParts;
    const int32_t part = static_cast<int32_t>(ticket % kFetchParts);
    if (index >= tasks) return;
    const BackwardRecord& task = params.comm_records[index];
    bool ready = true;
    if (lane == 0 && task.targets[0] != 0) ready = wait_counter(context, params.counters + task.waits[0], task.targets[0]);
    if (!__shfl_sync(0xffffffffu, ready, 0)) return;
    __syncwarp();
    if (task.kind != TaskKind::kSignalDone) {
      fetch_backward_rows(params, task, part * kFetchRows, kFetchRows, lane);
    } else if (part == 0 && lane < params.shape.ep_size && !pass_aborted(context)) {
      // A pass that was aborted says so by its status word, and never that it is done.
      __threadfence_system();
      ptx::store_release_system(reinterpret_cast<int64_t*>(params.peers.flags[lane]) + params.shape.rank * kFlagWords + kFlagDone, context.call);
    }
  }
}

}  // namespace mok
