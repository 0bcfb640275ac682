// The task stream as a table. One kernel before the megakernel evaluates csrc/task for every ticket, all tickets at once; the megakernel then
// reads 64 bytes a task. Decoding inside it would cost some ten 64-bit divisions a task on one thread, and tens of kilobytes of cold code at the
// start.
#pragma once

#include "../task/stream.h"

namespace mok {

struct alignas(16) TaskRecord {
  TaskKind kind;
  int32_t expert;
  int32_t tile_n;
  int32_t block;
  int32_t ring_block;
  int32_t valid_rows;  // of the block from its first row on, unpadded; may exceed a block or be negative
  int32_t macrobatch;
  int32_t num_rows;
  int64_t first_row;
  uint32_t waits[2];    // counters,
  uint32_t targets[2];  // and what they must reach; 0: none
  int32_t bumps[2];     // -1: none
};
static_assert(sizeof(TaskRecord) == 64, "four 16-byte loads");

// Sizes of a pass that only the device knows.
struct PassTotals {
  int64_t compute_tasks;
  int64_t comm_tasks;
  int64_t num_blocks;
  int64_t first_macro_rows;  // of the macrobatch that is walked first
  int64_t gemm1_tiles;
};

// A counter moves by this much a task, so that the rows of a fetch can be announced by whoever fetched them.
constexpr uint32_t kTaskUnits = 32;
static_assert(kTaskUnits == kDispatchRows, "a fetched row moves a counter by one");

// What the records of all passes say of a task.
template <typename Record>
__device__ __forceinline__ void set_place(Record& record, const Task& task) {
  record.kind = task.kind;
  record.expert = static_cast<int32_t>(task.expert);
  record.tile_n = static_cast<int32_t>(task.tile_n);
  record.block = static_cast<int32_t>(task.block);
  record.ring_block = static_cast<int32_t>(task.ring_block);
  record.macrobatch = static_cast<int32_t>(task.macrobatch);
  record.num_rows = static_cast<int32_t>(task.num_rows);
  record.first_row = task.block >= 0 && task.stream == Stream::kCompute ? task.block * kBlockRows : task.first_row;
}

// Rows of a block's expert from the block's first row on, unpadded.
__device__ __forceinline__ int32_t rows_from_block(const Plan& plan, const int32_t* expert_rows, int64_t expert, int64_t block) {
  return static_cast<int32_t>(expert_rows[expert] - (block * kBlockRows - plan.expert_row_offsets[expert]));
}

__device__ __forceinline__ TaskRecord make_record(const Plan& plan, const int32_t* expert_rows, const Task& task) {
  TaskRecord record = {};
  set_place(record, task);
  if (task.expert >= 0) {
    record.valid_rows = rows_from_block(plan, expert_rows, task.expert, task.block);
  }
  for (int i = 0; i < 2; ++i) {
    if (i < task.num_waits) {
      record.waits[i] = static_cast<uint32_t>(task.waits[i].first);
      record.targets[i] = static_cast<uint32_t>(task.waits[i].target) * kTaskUnits;
    }
    record.bumps[i] = i < task.num_bumps ? static_cast<int32_t>(task.bumps[i]) : -1;
  }
  if (task.kind == TaskKind::kReduce && plan.shape.ep_size == 1) {
    // One rank has all its rows when it has counted them: no need to wait for the flag that is set behind the count.
    record.waits[0] = static_cast<uint32_t>(plan.transfers_done());
    record.targets[0] = static_cast<uint32_t>(plan.transfers) * kTaskUnits;
  }
  return record;
}

}  // namespace mok
