// Arguments of the forward megakernel. Everything that changes between replays of a CUDA graph is behind a pointer.
#pragma once

#include "../ptx/sm90.cuh"
#include "../task/plan.h"
#include "launch.h"
#include "sm90_records.cuh"

namespace mok {

struct ForwardParams {
  static constexpr bool kFetchesDy = false;
  CUtensorMap map_x;           // x ring [ring rows, H], boxes of 64 rows x 64 columns
  CUtensorMap map_activation;  // activation ring [ring rows, I], the same boxes
  PeerMemory peers;
  PassShape shape;
  int64_t timeout_nanoseconds;
  const CUtensorMap* weight_maps;  // [2, E_local]: w13 [2I, H], then w2 [H, I], boxes of 128 rows x 64 columns
  const TaskRecord* compute_records;
  const TaskRecord* comm_records;
  const PassTotals* totals;
  const int32_t* row_source_rank;
  const int32_t* row_source_slot;
  const int32_t* topk_experts;  // [T, K]
  __nv_bfloat16* y;             // [T, H]
  __nv_bfloat16* x_ring;
  __nv_bfloat16* gate_up;  // [ring rows, 2I] or null
  __nv_bfloat16* activation;
  float* weight_ring;  // [ring rows]
  uint32_t* counters;
  DeviceState* state;
  FaultRecord* fault;
  int32_t topk;
  int32_t comm_clusters;  // clusters that only move rows; 0: two warps of every CTA do
};

}  // namespace mok
