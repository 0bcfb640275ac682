// Communication warps: fetch rows from their source ranks into the ring, and say at the end that this rank is through with its peers' memory.
#pragma once

#include "../kernels/sm90_params.cuh"
#include "../task/stream.h"
#include "sm90_wait.cuh"

namespace mok {

constexpr int kFetchRows = kDispatchRows / kTaskUnits;  // rows of one warp's part of a task
constexpr int kFetchUnroll = 8;                         // 16-byte loads in flight a lane

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

__device__ __forceinline__ void fetch_rows(const ForwardParams& params, int64_t first_row, int64_t ring_row, uint32_t lane) {
  int64_t source = 0;
  if (lane < kFetchRows) {
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
  for (int row = 0; row < kFetchRows; ++row) {
    const int64_t address = __shfl_sync(0xffffffffu, source, row);
    copy_row(reinterpret_cast<const uint4*>(address), reinterpret_cast<uint4*>(params.x_ring + row_offset(ring_row + row, params.shape.hidden)),
             chunks, lane);
  }
}

__device__ __forceinline__ void run_communication(const ForwardParams& params, const WaitContext& context, const Plan& plan, uint32_t lane) {
  bool entered = false;
  while (true) {
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(&params.state->comm_ticket, 1u);
    ticket = __shfl_sync(0xffffffffu, ticket, 0);
    const int64_t index = ticket / kTaskUnits;
    const uint32_t part = ticket % kTaskUnits;
    if (index >= plan.comm_tasks) return;
    const Task task = comm_task(plan, index);
    bool ready = true;
    if (lane == 0) {
      if (task.peer_wait == PeerWait::kEntered && !entered) ready = wait_peers(context, kFlagEntered, kPhaseEntered);
      for (int i = 0; ready && i < task.num_waits; ++i) {
        ready = wait_counter(context, params.counters + task.waits[i].first, static_cast<uint32_t>(task.waits[i].target) * kTaskUnits);
      }
    }
    ready = __shfl_sync(0xffffffffu, ready, 0);
    if (!ready) return;
    entered = true;
    if (task.kind == TaskKind::kSignalDone) {
      if (part == 0 && lane < params.shape.ep_size) {
        __threadfence_system();
        ptx::store_release_system(
            reinterpret_cast<int64_t*>(params.peers.flags[lane]) + params.shape.rank * kFlagWords + kFlagDone, context.call);
      }
      continue;
    }
    const int64_t offset = static_cast<int64_t>(part) * kFetchRows;
    const int64_t ring_row = task.ring_block * kBlockRows + task.first_row % kBlockRows + offset;
    fetch_rows(params, task.first_row + offset, ring_row, lane);
    // The rows are read by bulk copies, which follow another order than these stores.
    ptx::fence_async_global();
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < task.num_bumps; ++i) ptx::add_release_gpu(params.counters + task.bumps[i], 1);
    }
  }
}

}  // namespace mok
