// What every pass's kernels are told of a call: the host's side of the arguments that all passes have.
#pragma once

#include "../task/plan.h"
#include "launch.h"

namespace mok {

template <typename Call>
PassShape shape_of(const Call& call, Pass pass) {
  PassShape shape;
  shape.pass = pass;
  shape.rank = call.rank;
  shape.ep_size = call.ep_size;
  shape.num_tokens = call.num_tokens;
  shape.hidden = call.hidden;
  shape.intermediate = call.intermediate;
  shape.num_local_experts = call.num_local_experts;
  shape.minibatch_blocks = call.minibatch_blocks;
  shape.macrobatch_blocks = call.macrobatch_blocks;
  shape.capacity_blocks = call.capacity_blocks;
  return shape;
}

// Of the kernel before the megakernel, but for the table of tasks.
template <typename EnterParams, typename Call>
void fill_enter(EnterParams& enter, const Call& call, Pass pass) {
  enter.shape = shape_of(call, pass);
  enter.peers = call.peers;
  if (call.ep_size == 1) {
    // Nobody else reads the inputs: they are read where they lie.
    enter.peers.x[0] = call.x;
    enter.peers.router_weights[0] = call.router_weights;
  }
  enter.x = reinterpret_cast<const uint4*>(call.x);
  enter.x_chunks = call.ep_size == 1 ? 0 : call.num_tokens * call.hidden / 8;
  enter.router_weights = reinterpret_cast<const float*>(call.router_weights);
  enter.num_weights = call.ep_size == 1 ? 0 : call.num_tokens * call.topk;
  enter.weight_maps = reinterpret_cast<CUtensorMap*>(call.weight_maps);
  enter.expert_rows = reinterpret_cast<const int32_t*>(call.expert_rows);
  enter.expert_row_offsets = reinterpret_cast<const int64_t*>(call.expert_row_offsets);
  enter.state = reinterpret_cast<DeviceState*>(call.state);
  for (int64_t e = 0; e < call.num_local_experts; ++e) {
    enter.w13[e] = call.w13[e];
    enter.w2[e] = call.w2[e];
  }
}

// Of the megakernel, but for the matrices that it reads and writes.
template <typename Params, typename EnterParams, typename Call>
void fill_pass(Params& params, const EnterParams& enter, const Call& call) {
  params.peers = enter.peers;
  params.shape = enter.shape;
  params.timeout_nanoseconds = call.timeout_nanoseconds;
  params.weight_maps = enter.weight_maps;
  params.compute_records = enter.compute_records;
  params.comm_records = enter.comm_records;
  params.totals = enter.totals;
  params.row_source_rank = reinterpret_cast<const int32_t*>(call.row_source_rank);
  params.row_source_slot = reinterpret_cast<const int32_t*>(call.row_source_slot);
  params.topk_experts = reinterpret_cast<const int32_t*>(call.topk_experts);
  params.activation = reinterpret_cast<__nv_bfloat16*>(call.ring_activation);
  params.weight_ring = reinterpret_cast<float*>(call.ring_weights);
  params.counters = reinterpret_cast<uint32_t*>(call.counters);
  params.state = enter.state;
  params.fault = reinterpret_cast<FaultRecord*>(call.fault);
  params.topk = static_cast<int32_t>(call.topk);
}

}  // namespace mok
