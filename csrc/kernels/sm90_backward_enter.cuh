// Start of a backward or recompute: copies the inputs to symmetric memory, points the weights' tensor maps at this call's addresses, writes the
// table of tasks, and tells the peers. And the host side that fills the arguments.
#pragma once

#include "../epilogue/sm90_weight_grad.cuh"
#include "sm90_arguments.cuh"
#include "sm90_backward_params.cuh"
#include "sm90_enter_pass.cuh"
#include "sm90_launch.h"
#include "sm90_tensor_map.h"
#include "sm90_warp_sum.cuh"

namespace mok {
namespace {

struct BackwardEnterParams {
  CUtensorMap map_w13, map_w2, map_grad13, map_grad2;
  PeerMemory peers;
  const uint4* x;
  const uint4* dy;  // null in a recompute
  int64_t x_chunks;
  const float* router_weights;
  int64_t num_weights;
  CUtensorMap* weight_maps;
  PassShape shape;
  const int32_t* expert_rows;
  const int64_t* expert_row_offsets;
  int64_t* macro_table;
  BackwardRecord* compute_records;
  BackwardRecord* comm_records;
  BackwardTotals* totals;
  DeviceState* state;
  int64_t w13[kMaxLocalExperts], w2[kMaxLocalExperts];
  int64_t grads13[kMaxLocalExperts], grads2[kMaxLocalExperts];  // with flags, see sm90_weight_grad.cuh
};

// By one warp. Every block writes the same table and reads what it wrote.
__device__ __forceinline__ void write_macro_table(const Plan& plan, int64_t* table, uint32_t lane) {
  int64_t before = 0;
  for (int64_t first = 0; first < plan.num_macrobatches; first += 32) {
    const int64_t macro = first + lane;
    const int64_t sum = sum_to_lane(macro < plan.num_macrobatches ? plan.backward_macro_tasks(macro) : 0, lane);
    if (macro < plan.num_macrobatches) table[macro + 1] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) table[0] = 0;
}

__global__ void __launch_bounds__(kEnterThreads) backward_enter_kernel(const __grid_constant__ BackwardEnterParams params) {
  // Searched by every thread, several times a task.
  __shared__ int64_t offsets[kMaxLocalExperts + 1];
  ptx::allow_next_kernel();
  ptx::wait_previous_kernel();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t rank = params.shape.rank, experts = params.shape.num_local_experts;
  for (int64_t e = threadIdx.x; e <= experts; e += blockDim.x) offsets[e] = params.expert_row_offsets[e];
  __syncthreads();
  Plan plan = make_plan(params.shape, offsets);
  if (params.shape.pass == Pass::kBackward) {
    if (threadIdx.x < 32) write_macro_table(plan, params.macro_table, threadIdx.x);
    __syncthreads();
    set_macro_table(plan, params.macro_table);
  }
  // A few warps of a block have tickets; meanwhile the others copy.
  decode_tickets(0, plan.compute_tasks, [&](int64_t ticket) {
    params.compute_records[ticket] = make_backward_record(plan, params.expert_rows, compute_task(plan, ticket));
  });
  decode_tickets(plan.compute_tasks, plan.comm_tasks,
                 [&](int64_t ticket) { params.comm_records[ticket] = make_backward_record(plan, params.expert_rows, comm_task(plan, ticket)); });
  for (int64_t i = thread; i < 4 * experts; i += threads) {
    const int64_t matrix = i / experts, expert = i % experts;
    // Gradients of which L2 keeps the sum; others are reached by plain stores.
    const int64_t grad = matrix == 2 ? params.grads13[expert] : matrix == 3 ? params.grads2[expert] : 0;
    const int64_t address = matrix == 0 ? params.w13[expert] : matrix == 1 ? params.w2[expert] : grad & kGradBf16 ? 0 : grad & kGradAddress;
    if (address != 0) {
      CUtensorMap* map = params.weight_maps + i;
      *map = matrix == 0 ? params.map_w13 : matrix == 1 ? params.map_w2 : matrix == 2 ? params.map_grad13 : params.map_grad2;
      ptx::tensor_map_set_address(map, reinterpret_cast<const void*>(address));
      ptx::tensor_map_release();
    }
  }
  copy_chunks(params.x, reinterpret_cast<uint4*>(params.peers.x[rank]), params.x_chunks, thread, threads);
  if (params.dy != nullptr) copy_chunks(params.dy, reinterpret_cast<uint4*>(params.peers.dy[rank]), params.x_chunks, thread, threads);
  float* weights = reinterpret_cast<float*>(params.peers.router_weights[rank]);
  for (int64_t i = thread; i < params.num_weights; i += threads) weights[i] = params.router_weights[i];
  if (thread == 0) *params.totals = {plan.compute_tasks, plan.comm_tasks, plan.num_blocks, plan.macro_blocks(0) * kBlockRows};
  announce_entered(params, rank, params.shape.ep_size);
}

// The table: the totals in one record's place, the communication tasks, the compute tasks, the compute tickets before each macrobatch.
struct BackwardTable {
  int64_t comm_at, compute_at, macro_at, bytes;
};

BackwardTable backward_table(int64_t capacity_blocks, int64_t macrobatch_blocks, int64_t max_tokens, int64_t hidden, int64_t intermediate,
                             int64_t num_local_experts) {
  constexpr int64_t kRecord = sizeof(BackwardRecord);
  const int64_t macros = capacity_blocks == 0 ? 1 : ceil_div(capacity_blocks, macrobatch_blocks);
  const int64_t comm = 2 * capacity_blocks * kDispatchTasksPerBlock + 1;
  const int64_t wgrads =
      ceil_div(hidden, kWgradRows) * ceil_div(intermediate, kWgradCols) + ceil_div(2 * intermediate, kWgradRows) * ceil_div(hidden, kWgradCols);
  // An expert has weight-gradient tasks in each macrobatch that holds rows of it: every boundary adds one expert's at most.
  const int64_t compute =
      capacity_blocks * (ceil_div(intermediate, kGateUpCols) + ceil_div(intermediate, kActivationGradCols) + ceil_div(hidden, kHiddenCols)) +
      (num_local_experts + macros) * wgrads + ceil_div(max_tokens, kReduceTokens);
  BackwardTable table;
  table.comm_at = kRecord;
  table.compute_at = table.comm_at + comm * kRecord;
  table.macro_at = table.compute_at + compute * kRecord;
  table.bytes = table.macro_at + (macros + 1) * 8;
  return table;
}

// Fills the megakernel's arguments and launches what comes before it.
int enter_backward(const BackwardCall& call, Pass pass, int sms, cudaStream_t stream, BackwardParams* out) {
  const bool recompute = pass == Pass::kRecompute;
  const int64_t ring_rows = call.macrobatch_blocks * kBlockRows, hidden = call.hidden, inner = call.intermediate;
  int code = check_aligned(call.w13, call.num_local_experts, kMisalignedW13);
  if (code == 0 && !recompute) code = check_aligned(call.w2, call.num_local_experts, kMisalignedW2);
  if (code != 0) return code;
  BackwardParams& params = *out;
  BackwardEnterParams enter;
  struct {
    CUtensorMap* map;
    int64_t address, rows, columns;
  } const maps[] = {
      {&enter.map_w13, 0, 2 * inner, hidden},
      {&enter.map_w2, 0, hidden, inner},
      {&params.map_x, recompute ? call.x_rows : call.ring_x, ring_rows, hidden},
      {&params.map_saved_x, call.x_rows, ring_rows, hidden},
      {&params.map_dy, call.ring_dy, ring_rows, hidden},
      {&params.map_activation, call.ring_activation, ring_rows, inner},
      {&params.map_d_gate_up, call.ring_d_gate_up, ring_rows, 2 * inner},
  };
  for (const auto& m : maps) {
    code = encode_tensor_map(m.map, reinterpret_cast<void*>(m.address), m.rows, m.columns, 64);
    if (code != 0) return code;
  }
  code = encode_tensor_map(&enter.map_grad13, nullptr, 2 * inner, hidden, kGradBoxRows, true);
  if (code == 0) code = encode_tensor_map(&enter.map_grad2, nullptr, hidden, inner, kGradBoxRows, true);
  if (code != 0) return code;
  // A table for a call's own tokens has its parts where one for more tokens has them, but for the last.
  const BackwardTable table =
      backward_table(call.capacity_blocks, call.macrobatch_blocks, call.num_tokens, hidden, inner, call.num_local_experts);
  fill_enter(enter, call, pass);
  if (call.ep_size == 1) enter.peers.dy[0] = call.dy;
  enter.dy = recompute ? nullptr : reinterpret_cast<const uint4*>(call.dy);
  enter.totals = reinterpret_cast<BackwardTotals*>(call.records);
  enter.comm_records = reinterpret_cast<BackwardRecord*>(call.records + table.comm_at);
  enter.compute_records = reinterpret_cast<BackwardRecord*>(call.records + table.compute_at);
  enter.macro_table = reinterpret_cast<int64_t*>(call.records + table.macro_at);
  for (int64_t e = 0; e < call.num_local_experts; ++e) {
    params.grads13[e] = enter.grads13[e] = recompute ? 0 : call.grads13[e];
    params.grads2[e] = enter.grads2[e] = recompute ? 0 : call.grads2[e];
  }
  const EnterGrid grid = enter_grid(call.ep_size > 1, sms, table.macro_at / static_cast<int64_t>(sizeof(BackwardRecord)));
  const int launched = launch_chained(backward_enter_kernel, grid.blocks, grid.threads, 0, stream, enter);
  if (launched != cudaSuccess) return launched;

  fill_pass(params, enter, call);
  params.y = reinterpret_cast<__nv_bfloat16*>(call.dx);
  params.d_router_weights = reinterpret_cast<float*>(call.d_router_weights);
  params.x_ring = reinterpret_cast<__nv_bfloat16*>(recompute ? call.x_rows : call.ring_x);
  params.dy_ring = reinterpret_cast<__nv_bfloat16*>(call.ring_dy);
  params.gate_up = reinterpret_cast<__nv_bfloat16*>(recompute ? call.gate_up : call.ring_gate_up);
  params.saved_gate_up = reinterpret_cast<const __nv_bfloat16*>(call.gate_up);
  params.d_gate_up = reinterpret_cast<__nv_bfloat16*>(call.ring_d_gate_up);
  params.partial_ring = reinterpret_cast<float*>(call.ring_partials);
  params.scratch = reinterpret_cast<float*>(call.scratch);
  return cudaSuccess;
}

}  // namespace
}  // namespace mok
