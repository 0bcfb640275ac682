// The kernel before the megakernel: whatever a pass needs in place when it starts.
#pragma once

#include "sm90_params.cuh"

namespace mok {

// Copies the inputs to symmetric memory, points the weights' tensor maps at this call's addresses, writes the table of tasks, and tells the
// peers.
struct EnterParams {
  CUtensorMap map_w13, map_w2;
  PeerMemory peers;
  int64_t rank, ep_size, num_local_experts;
  const uint4* x;
  int64_t x_chunks;
  const float* router_weights;
  int64_t num_weights;
  CUtensorMap* weight_maps;
  PassShape shape;
  const int32_t* expert_rows;
  const int64_t* expert_row_offsets;
  TaskRecord* compute_records;
  TaskRecord* comm_records;
  PassTotals* totals;
  DeviceState* state;
  int64_t w13[kMaxLocalExperts], w2[kMaxLocalExperts];
};

constexpr int kEnterThreads = 512;

static __global__ void __launch_bounds__(kEnterThreads) enter_kernel(const __grid_constant__ EnterParams params) {
  ptx::allow_next_kernel();
  ptx::wait_previous_kernel();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kEnterThreads + threadIdx.x,
                threads = static_cast<int64_t>(gridDim.x) * kEnterThreads;
  uint4* x = reinterpret_cast<uint4*>(params.peers.x[params.rank]);
  constexpr int kUnroll = 4;
  int64_t at = thread;
  for (; at + (kUnroll - 1) * threads < params.x_chunks; at += kUnroll * threads) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = ptx::load_stream_16(params.x + at + i * threads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) x[at + i * threads] = values[i];
  }
  for (; at < params.x_chunks; at += threads) x[at] = params.x[at];
  float* weights = reinterpret_cast<float*>(params.peers.router_weights[params.rank]);
  for (int64_t i = thread; i < params.num_weights; i += threads) weights[i] = params.router_weights[i];
  if (thread < 2 * params.num_local_experts) {
    const bool first = thread < params.num_local_experts;
    CUtensorMap* map = params.weight_maps + thread;
    *map = first ? params.map_w13 : params.map_w2;
    ptx::tensor_map_set_address(map, reinterpret_cast<const void*>(first ? params.w13[thread] : params.w2[thread - params.num_local_experts]));
    ptx::tensor_map_release();
  }
  const Plan plan = make_plan(params.shape, params.expert_row_offsets, nullptr);
  for (int64_t ticket = thread; ticket < plan.compute_tasks; ticket += threads) {
    params.compute_records[ticket] = make_record(plan, params.expert_rows, detail::forward_compute_task(plan, ticket));
  }
  for (int64_t ticket = thread; ticket < plan.comm_tasks; ticket += threads) {
    params.comm_records[ticket] = make_record(plan, params.expert_rows, comm_task(plan, ticket));
  }
  if (thread == 0) {
    *params.totals = {plan.compute_tasks, plan.comm_tasks, plan.num_blocks, plan.macro_blocks(plan.num_macrobatches - 1) * kBlockRows,
                      plan.gemm1_tiles};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(&params.state->entered_blocks, 1u) + 1 != gridDim.x) return;
  __threadfence_system();
  params.state->entered_blocks = 0;
  // After a fault this rank does not enter: its peers must not wait for rows that will not come.
  if (ptx::load_acquire_gpu(&params.state->aborted) != 0) return;
  const int64_t call = params.state->call + 1;
  for (int64_t peer = 0; peer < params.ep_size; ++peer) {
    ptx::store_release_system(reinterpret_cast<int64_t*>(params.peers.flags[peer]) + params.rank * kFlagWords + kFlagEntered, call);
  }
}

}  // namespace mok
