// The kernel before the megakernel: whatever a pass needs in place when it starts.
#pragma once

#include "sm90_enter_pass.cuh"
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

// At most a block a multiprocessor: told so, the compiler spills nothing.
static __global__ void __launch_bounds__(kEnterThreads, 1) enter_kernel(const __grid_constant__ EnterParams params) {
  // Searched by every thread, several times a task.
  __shared__ int64_t offsets[kMaxLocalExperts + 1];
  ptx::allow_next_kernel();
  ptx::wait_previous_kernel();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = threadIdx.x; e <= params.num_local_experts; e += blockDim.x) offsets[e] = params.expert_row_offsets[e];
  __syncthreads();
  // A few warps of a block have tickets; meanwhile the others copy.
  const Plan plan = make_plan(params.shape, offsets);
  decode_tickets(0, plan.compute_tasks, [&](int64_t ticket) {
    params.compute_records[ticket] = make_record(plan, params.expert_rows, detail::forward_compute_task(plan, ticket));
  });
  decode_tickets(plan.compute_tasks, plan.comm_tasks,
                 [&](int64_t ticket) { params.comm_records[ticket] = make_record(plan, params.expert_rows, comm_task(plan, ticket)); });
  for (int64_t i = thread; i < 2 * params.num_local_experts; i += threads) {
    const bool first = i < params.num_local_experts;
    CUtensorMap* map = params.weight_maps + i;
    *map = first ? params.map_w13 : params.map_w2;
    ptx::tensor_map_set_address(map, reinterpret_cast<const void*>(first ? params.w13[i] : params.w2[i - params.num_local_experts]));
    ptx::tensor_map_release();
  }
  copy_chunks<const uint4* const&, const int64_t&>(params.x, reinterpret_cast<uint4*>(params.peers.x[params.rank]), params.x_chunks, thread,
                                                   threads);
  float* weights = reinterpret_cast<float*>(params.peers.router_weights[params.rank]);
  for (int64_t i = thread; i < params.num_weights; i += threads) weights[i] = params.router_weights[i];
  if (thread == 0) {
    *params.totals = {plan.compute_tasks, plan.comm_tasks, plan.num_blocks, plan.macro_blocks(plan.num_macrobatches - 1) * kBlockRows,
                      plan.gemm1_tiles};
  }
  announce_entered(params, params.rank, params.ep_size);
}

}  // namespace mok
