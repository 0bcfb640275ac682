// Fetches of rows by one warp, and the communication warps' walk over the tickets: the same in every pass, but for what a task fetches.
#pragma once

#include "../kernels/sm90_records.cuh"
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

// What a pass has of its own, for the functions below: ring_of(params, dy), where fetched rows go; opening_rows(params), how many rows all warps
// fetch together, a row a ticket; and fetch_opening(params, end, lane), by which one warp takes part in that.

// `count` rows, from row `offset` of a fetch task on; announced when they are in place. Router weights come with dy, or with x in a pass that
// fetches no dy.
template <typename Params, typename Record>
__device__ __forceinline__ void fetch_rows(const Params& params, const Record& task, int32_t offset, int32_t count, uint32_t lane) {
  const bool dy = Params::kFetchesDy && task.kind == TaskKind::kDispatchDy;
  const bool weights = dy || !Params::kFetchesDy;
  const int64_t first_row = task.first_row + offset;
  const int64_t ring_row = static_cast<int64_t>(task.ring_block) * kBlockRows + first_row % kBlockRows;
  int64_t source = 0;
  if (static_cast<int32_t>(lane) < count) {
    const int32_t rank = params.row_source_rank[first_row + lane];
    float weight = 0.0f;
    if (rank >= 0) {
      const int32_t slot = params.row_source_slot[first_row + lane];
      source = (dy ? params.peers.dy[rank] : params.peers.x[rank]) + row_offset(slot / params.topk, params.shape.hidden) * 2;
      if (weights) weight = *reinterpret_cast<const float*>(params.peers.router_weights[rank] + slot * 4ll);
    }
    if (weights) params.weight_ring[ring_row + lane] = weight;
  }
  const int32_t chunks = static_cast<int32_t>(params.shape.hidden / 8);
  const auto& ring = ring_of(params, dy);
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

// Whether the peers of all lanes are `here`. What a lane has acquired, the others may read afterwards.
__device__ __forceinline__ bool all_here(bool here) {
  const bool all = __all_sync(0xffffffffu, here);
  __syncwarp();
  return all;
}

// The communication warps' role. `Record`: how a task is held, copied or left in memory.
template <typename Record, typename Params>
__device__ __forceinline__ void run_communication(const Params& params, const WaitContext& context, uint32_t lane) {
  const int64_t tasks = params.totals->comm_tasks, opening = opening_rows(params);
  if (tasks > 1) {
    if (!wait_entered(context, lane)) return;
    fetch_opening(params, opening, lane);
  }
  while (true) {
    const int64_t ticket = opening / kFetchRows + take_ticket(&params.state->comm_ticket, lane);
    const int64_t index = ticket / kFetchParts;
    const int32_t part = static_cast<int32_t>(ticket % kFetchParts);
    if (index >= tasks) return;
    Record task = params.comm_records[index];
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
