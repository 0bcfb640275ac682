// Arguments of the backward megakernel, and its task stream as a table. Everything that changes between replays of a CUDA graph is behind a
// pointer.
#pragma once

#include "../mma/sm90_operands.cuh"
#include "../ptx/sm90.cuh"
#include "../task/stream.h"
#include "launch.h"
#include "sm90_records.cuh"

namespace mok {

constexpr int kBackwardWaits = 3;

struct alignas(16) BackwardRecord {
  TaskKind kind;
  int32_t expert;
  int32_t tile_m;
  int32_t tile_n;
  int32_t block;
  int32_t ring_block;  // weight gradients: of their first block
  int32_t valid_rows;  // of the block from its first row on, unpadded; weight gradients: rows of the weight from the tile's first one on
  int32_t macrobatch;
  int32_t num_rows;
  int32_t stages;      // weight gradients: of 64 rows each
  int32_t last_steps;  // and of 16 rows each, in the last stage
  int32_t continues;
  int32_t continued;
  int64_t first_row;
  uint32_t waits[kBackwardWaits];    // first counter,
  uint32_t counts[kBackwardWaits];   // counters from there on,
  uint32_t targets[kBackwardWaits];  // and what each must reach; 0: none
  int32_t bumps[2];                  // -1: none
};

// Sizes of a pass that only the device knows.
struct BackwardTotals {
  int64_t compute_tasks;
  int64_t comm_tasks;
  int64_t num_blocks;
  int64_t first_macro_rows;
};
static_assert(sizeof(BackwardTotals) <= sizeof(BackwardRecord), "totals take one place");

struct BackwardParams {
  static constexpr bool kFetchesDy = true;
  // Boxes of 64 rows x 64 columns: the ring's rows, and in `map_saved_x` the context's.
  CUtensorMap map_x, map_saved_x, map_dy, map_activation, map_d_gate_up;
  PeerMemory peers;
  PassShape shape;
  int64_t timeout_nanoseconds;
  // [4, E_local]: w13 [2I, H] and w2 [H, I], the same boxes; then their fp32 gradients, boxes of 16 rows x 32 columns.
  const CUtensorMap* weight_maps;
  const BackwardRecord* compute_records;
  const BackwardRecord* comm_records;
  const BackwardTotals* totals;
  const int32_t* row_source_rank;
  const int32_t* row_source_slot;
  const int32_t* topk_experts;  // [T, K]
  __nv_bfloat16* y;             // dx [T, H]
  float* d_router_weights;      // [T, K]
  __nv_bfloat16* x_ring;
  __nv_bfloat16* dy_ring;
  __nv_bfloat16* gate_up;  // written by gemm1: the ring, or the context of a recompute
  const __nv_bfloat16* saved_gate_up;
  __nv_bfloat16* activation;
  __nv_bfloat16* d_gate_up;
  float* weight_ring;   // [ring rows]
  float* partial_ring;  // [ring rows, dgrad2 tiles]
  float* scratch;       // sums of the expert that goes on in the next macrobatch, a tile after the other
  uint32_t* counters;
  DeviceState* state;
  FaultRecord* fault;
  int32_t topk;
  int64_t grads13[kMaxLocalExperts], grads2[kMaxLocalExperts];  // with flags, see sm90_weight_grad.cuh
};

__device__ __forceinline__ BackwardRecord make_backward_record(const Plan& plan, const int32_t* expert_rows, const Task& task) {
  BackwardRecord record = {};
  record.tile_m = static_cast<int32_t>(task.tile_m);
  set_place(record, task);
  record.continues = task.continues;
  record.continued = task.continued;
  if (task.kind == TaskKind::kWgrad2 || task.kind == TaskKind::kWgrad13 || task.kind == TaskKind::kZero) {
    const bool second = task.kind == TaskKind::kWgrad2 || (task.kind == TaskKind::kZero && task.first_block == 0);
    record.valid_rows = static_cast<int32_t>((second ? plan.shape.hidden : 2 * plan.shape.intermediate) - task.tile_m * kWgradRows);
    // A cold expert's tile tells by this which of its two matrices it is of.
    record.block = second ? 0 : 1;
    if (task.kind != TaskKind::kZero) {
      record.ring_block = static_cast<int32_t>(plan.ring_block(task.first_block));
      const int64_t last = task.first_block + task.num_blocks - 1;
      const int64_t rows = expert_rows[task.expert] - (last * kBlockRows - plan.expert_row_offsets[task.expert]);
      // Padding adds nothing, whatever lies there. `rows` may go on behind the block: then it is full.
      record.stages = static_cast<int32_t>(2 * task.num_blocks - (rows <= kBlockRows / 2 ? 1 : 0));
      const int64_t last_rows = rows <= kBlockRows / 2 ? rows : rows - kBlockRows / 2;
      record.last_steps = static_cast<int32_t>(ceil_div(min_of(last_rows, kStageK), kStepK));
    }
  } else if (task.expert >= 0) {
    record.valid_rows = rows_from_block(plan, expert_rows, task.expert, task.block);
  }
  for (int i = 0; i < kBackwardWaits && i < task.num_waits; ++i) {
    record.waits[i] = static_cast<uint32_t>(task.waits[i].first);
    record.counts[i] = static_cast<uint32_t>(task.waits[i].count);
    record.targets[i] = static_cast<uint32_t>(task.waits[i].target) * kTaskUnits;
  }
  for (int i = 0; i < 2; ++i) record.bumps[i] = i < task.num_bumps ? static_cast<int32_t>(task.bumps[i]) : -1;
  return record;
}

}  // namespace mok
