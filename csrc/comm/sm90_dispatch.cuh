// Communication warps: fetch rows from their source ranks into the ring, and say at the end that this rank is through with its peers' memory.
#pragma once

#include "../kernels/sm90_params.cuh"
#include "sm90_wait.cuh"

namespace mok {

constexpr int kFetchRows = 4;  // rows of one warp's part of a task
constexpr int kFetchParts = kDispatchRows / kFetchRows;
constexpr int kFetchUnroll = 8;  // 16-byte loads in flight a lane
static_assert(kDispatchRows % kFetchRows == 0, "a fetch is split evenly");

// `count` 16-byte chunks by one warp; a null source is zeros.
__device__ __forceinline__ void copy_row(const uint4* source, uint4* target, int32_t count, uint32_t lane) {
  for (int32_t base = 0; base < count; base += 32 * kFetchUnroll) {
    uint4 values[kFetchUnroll];
#pragma unroll
    for (int i = 0; i < kFetchUnroll; ++i) {
      const int32_t at = base + i * 32 + lane;
      values[i] = make_uint4(0, 0, 0, 0);
      if (at < count && source != nullptr) values[i] = ptx::load_stream_16(source + at);
    }
#pragma unroll
    for (int i = 0; i < kFetchUnroll; ++i) {
      const int32_t at = base + i * 32 + lane;
      if (at < count) ptx::store_16(target + at, values[i]);
    }
  }
}

// `count` rows, from row `offset` of a fetch task on; announced when they are in place.
__device__ __forceinline__ void fetch_rows(const ForwardParams& params, const TaskRecord& task, int32_t offset, int32_t count, uint32_t lane) {
  const int64_t first_row = task.first_row + offset;
  const int64_t ring_row = static_cast<int64_t>(task.ring_block) * kBlockRows + first_row % kBlockRows;
  int64_t source = 0;
  if (static_cast<int32_t>(lane) < count) {
    const int32_t rank = params.row_source_rank[first_row + lane];
    float weight = 0.0f;
    if (rank >= 0) {
      const int32_t slot = params.row_source_slot[first_row + lane];
      source = params.peers.x[rank] + row_offset(slot / params.topk, params.shape.hidden) * 2;
      weight = *reinterpret_cast<const float*>(params.peers.router_weights[rank] + slot * 4ll);
    }
    params.weight_ring[ring_row + lane] = weight;
  }
  const int32_t chunks = static_cast<int32_t>(params.shape.hidden / 8);
  for (int32_t row = 0; row < count; ++row) {
    const int64_t address = __shfl_sync(0xffffffffu, source, row);
    copy_row(reinterpret_cast<const uint4*>(address), reinterpret_cast<uint4*>(params.x_ring + row_offset(ring_row + row, params.shape.hidden)),
             chunks, lane);
  }
  // The rows are read by bulk copies, which follow another order than these stores.
  ptx::fence_async_global();
  __syncwarp();
  if (lane == 0) {
    ptx::add_release_gpu(params.counters + task.bumps[0], count);
    ptx::add_release_gpu(params.counters + task.bumps[1], count);
  }
}

// One warp's share of a ticket sequence.
__device__ __forceinline__ int64_t take_ticket(uint32_t* counter, uint32_t lane) {
  uint32_t ticket = 0;
  if (lane == 0) ticket = atomicAdd(counter, 1u);
  return __shfl_sync(0xffffffffu, ticket, 0);
}

__device__ __forceinline__ bool wait_entered(const WaitContext& context, uint32_t lane) {
  bool ready = true;
  if (lane == 0) ready = wait_peers(context, kFlagEntered, kPhaseEntered);
  ready = __shfl_sync(0xffffffffu, ready, 0);
  __syncwarp();
  return ready;
}

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

__device__ __forceinline__ bool peers_entered(const ForwardParams& params, const WaitContext& context, uint32_t lane) {
  const int64_t* rows = reinterpret_cast<const int64_t*>(params.peers.flags[params.shape.rank]);
  const bool here =
      static_cast<int64_t>(lane) >= params.shape.ep_size || ptx::load_acquire_system(rows + lane * kFlagWords + kFlagEntered) >= context.call;
  const bool all = __all_sync(0xffffffffu, here);
  // What a lane has acquired, the others may read.
  __syncwarp();
  return all;
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

__device__ __forceinline__ void run_communication(const ForwardParams& params, const WaitContext& context, uint32_t lane) {
  const int64_t tasks = params.totals->comm_tasks, opening = opening_rows(params);
  if (tasks > 1) {
    if (!wait_entered(context, lane)) return;
    while (fetch_opening_row(params, opening, lane)) {
    }
  }
  while (true) {
    const int64_t ticket = opening / kFetchRows + take_ticket(&params.state->comm_ticket, lane);
    const int64_t index = ticket / kFetchParts;
    const int32_t part = static_cast<int32_t>(ticket % kFetchParts);
    if (index >= tasks) return;
    const TaskRecord task = params.comm_records[index];
    bool ready = true;
    if (lane == 0 && task.targets[0] != 0) ready = wait_counter(context, params.counters + task.waits[0], task.targets[0]);
    if (!__shfl_sync(0xffffffffu, ready, 0)) return;
    __syncwarp();
    if (task.kind != TaskKind::kSignalDone) {
      fetch_rows(params, task, part * kFetchRows, kFetchRows, lane);
    } else if (part == 0 && lane < params.shape.ep_size && !pass_aborted(context)) {
      // A pass that was aborted says so by its status word, and never that it is done.
      __threadfence_system();
      ptx::store_release_system(reinterpret_cast<int64_t*>(params.peers.flags[lane]) + params.shape.rank * kFlagWords + kFlagDone, context.call);
    }
  }
}

}  // namespace mok
