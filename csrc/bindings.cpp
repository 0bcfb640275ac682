// torch operators of the package. The only file with torch headers; it uses the LibTorch Stable ABI alone, so that one library serves every
// torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>
#include <vector>

#include "comm/host_flags.h"
#include "schedule/route_schedule.h"
#include "task/stream.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_host_tensor(const Tensor& tensor, ScalarType dtype, int64_t dim, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(tensor.dim() == dim, name, " must have ", dim, " dimensions, has ", tensor.dim());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

Tensor find_route_fault(const Tensor& topk, int64_t num_experts) {
  check_host_tensor(topk, ScalarType::Int, 2, "topk_experts");
  Tensor out = torch::stable::new_empty(topk, {4}, ScalarType::Long);
  const mok::RouteFault fault = mok::find_route_fault(topk.const_data_ptr<int32_t>(), topk.size(0), topk.size(1), num_experts);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  data[0] = fault.kind;
  data[1] = fault.token;
  data[2] = fault.slot;
  data[3] = fault.expert;
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route_schedule(const Tensor& topk, const Tensor& num_tokens, int64_t rank,
                                                                  int64_t num_local_experts, int64_t capacity_rows) {
  check_host_tensor(topk, ScalarType::Int, 3, "topk_experts");
  check_host_tensor(num_tokens, ScalarType::Long, 1, "num_tokens");
  const int64_t ep_size = topk.size(0), max_tokens = topk.size(1), topk_size = topk.size(2);
  STD_TORCH_CHECK(num_tokens.numel() == ep_size, "num_tokens must have one entry a rank");
  STD_TORCH_CHECK(rank >= 0 && rank < ep_size, "rank ", rank, " is not in a group of ", ep_size);
  STD_TORCH_CHECK(num_local_experts > 0, "num_local_experts must be positive, is ", num_local_experts);
  STD_TORCH_CHECK(capacity_rows >= 0 && capacity_rows % mok::kBlockRows == 0, "capacity_rows must be a multiple of ", mok::kBlockRows);
  STD_TORCH_CHECK(max_tokens * topk_size <= INT32_MAX, "token * K + slot must fit 32 bits");
  const int64_t* tokens = num_tokens.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < ep_size; ++r) {
    STD_TORCH_CHECK(tokens[r] >= 0 && tokens[r] <= max_tokens, "num_tokens[", r, "] = ", tokens[r], " is not in [0, ", max_tokens, "]");
  }
  Tensor row_source_rank = torch::stable::new_empty(topk, {capacity_rows}, ScalarType::Int);
  Tensor row_source_slot = torch::stable::new_empty(topk, {capacity_rows}, ScalarType::Int);
  Tensor expert_rows = torch::stable::new_empty(topk, {num_local_experts}, ScalarType::Int);
  Tensor expert_row_offsets = torch::stable::new_empty(topk, {num_local_experts + 1}, ScalarType::Long);
  Tensor num_rows = torch::stable::new_empty(topk, {1}, ScalarType::Long);
  num_rows.mutable_data_ptr<int64_t>()[0] = mok::build_route_schedule(
      topk.const_data_ptr<int32_t>(), tokens, ep_size, max_tokens, topk_size, rank * num_local_experts, num_local_experts, capacity_rows,
      {row_source_rank.mutable_data_ptr<int32_t>(), row_source_slot.mutable_data_ptr<int32_t>(), expert_rows.mutable_data_ptr<int32_t>(),
       expert_row_offsets.mutable_data_ptr<int64_t>()});
  return {row_source_rank, row_source_slot, expert_rows, expert_row_offsets, num_rows};
}

// Columns of the exported task table; mok_megatron/ops.py names them.
constexpr int64_t kHeadColumns = 17;
constexpr int64_t kTaskColumns = kHeadColumns + 1 + 3 * mok::kMaxWaits + 1 + mok::kMaxBumps + 1 + 4 * mok::kMaxAccesses;

void export_task(const mok::Task& task, int64_t* row) {
  const int64_t head[kHeadColumns] = {static_cast<int64_t>(task.kind),
                                      static_cast<int64_t>(task.stream),
                                      static_cast<int64_t>(task.peer_wait),
                                      task.order,
                                      task.macrobatch,
                                      task.minibatch,
                                      task.block,
                                      task.ring_block,
                                      task.first_row,
                                      task.num_rows,
                                      task.expert,
                                      task.tile_m,
                                      task.tile_n,
                                      task.first_block,
                                      task.num_blocks,
                                      task.continues,
                                      task.continued};
  for (int64_t value : head) *row++ = value;
  *row++ = task.num_waits;
  for (const mok::CounterWait& wait : task.waits) {
    *row++ = wait.first;
    *row++ = wait.count;
    *row++ = wait.target;
  }
  *row++ = task.num_bumps;
  for (int64_t counter : task.bumps) *row++ = counter;
  *row++ = task.num_accesses;
  for (const mok::RingAccess& access : task.accesses) {
    *row++ = access.buffer;
    *row++ = access.mode;
    *row++ = access.first_block;
    *row++ = access.num_blocks;
  }
}

mok::PassShape pass_shape(const std::vector<int64_t>& values) {
  STD_TORCH_CHECK(values.size() == 10, "shape must have 10 entries, has ", values.size());
  mok::PassShape shape;
  STD_TORCH_CHECK(values[0] >= 0 && values[0] <= 2, "pass must be 0, 1 or 2, is ", values[0]);
  shape.pass = static_cast<mok::Pass>(values[0]);
  shape.rank = values[1];
  shape.ep_size = values[2];
  shape.num_tokens = values[3];
  shape.hidden = values[4];
  shape.intermediate = values[5];
  shape.num_local_experts = values[6];
  shape.minibatch_blocks = values[7];
  shape.macrobatch_blocks = values[8];
  shape.capacity_blocks = values[9];
  STD_TORCH_CHECK(shape.rank >= 0 && shape.rank < shape.ep_size, "rank ", shape.rank, " is not in a group of ", shape.ep_size);
  STD_TORCH_CHECK(shape.num_tokens >= 0, "num_tokens is ", shape.num_tokens);
  STD_TORCH_CHECK(shape.hidden > 0 && shape.hidden % 64 == 0, "hidden must be a multiple of 64, is ", shape.hidden);
  STD_TORCH_CHECK(shape.intermediate > 0 && shape.intermediate % 64 == 0, "intermediate must be a multiple of 64, is ", shape.intermediate);
  STD_TORCH_CHECK(shape.minibatch_blocks > 0, "minibatch must hold at least one block");
  STD_TORCH_CHECK(shape.macrobatch_blocks > 0 && shape.macrobatch_blocks % shape.minibatch_blocks == 0,
                  "macrobatch must be a positive multiple of the minibatch");
  return shape;
}

// All tasks of one ticket sequence, in ticket order: [tasks, kTaskColumns]; and [compute tickets, comm tickets, counters, transfers].
std::tuple<Tensor, Tensor> task_stream(const Tensor& expert_row_offsets, std::vector<int64_t> shape_values, int64_t stream) {
  check_host_tensor(expert_row_offsets, ScalarType::Long, 1, "expert_row_offsets");
  const mok::PassShape shape = pass_shape(shape_values);
  STD_TORCH_CHECK(expert_row_offsets.numel() == shape.num_local_experts + 1, "expert_row_offsets must have one entry more than experts");
  const int64_t* offsets = expert_row_offsets.const_data_ptr<int64_t>();
  STD_TORCH_CHECK(offsets[0] == 0, "expert_row_offsets must start at 0");
  for (int64_t e = 0; e < shape.num_local_experts; ++e) {
    STD_TORCH_CHECK(offsets[e + 1] >= offsets[e] && offsets[e + 1] % mok::kBlockRows == 0, "expert_row_offsets[", e + 1, "] = ", offsets[e + 1],
                    " must not fall and must be a multiple of ", mok::kBlockRows);
  }
  STD_TORCH_CHECK(offsets[shape.num_local_experts] <= shape.capacity_blocks * mok::kBlockRows, "rows exceed the capacity");
  STD_TORCH_CHECK(stream == 0 || stream == 1, "stream must be 0 (compute) or 1 (communication), is ", stream);
  std::vector<int64_t> macro_table(mok::max_macrobatches(shape) + 1);
  const mok::Plan plan = mok::make_plan(shape, offsets, macro_table.data());
  const int64_t tasks = stream == 0 ? plan.compute_tasks : plan.comm_tasks;
  Tensor table = torch::stable::new_empty(expert_row_offsets, {tasks, kTaskColumns}, ScalarType::Long);
  int64_t* rows = table.mutable_data_ptr<int64_t>();
  for (int64_t ticket = 0; ticket < tasks; ++ticket) {
    export_task(stream == 0 ? mok::compute_task(plan, ticket) : mok::comm_task(plan, ticket), rows + ticket * kTaskColumns);
  }
  Tensor totals = torch::stable::new_empty(expert_row_offsets, {4}, ScalarType::Long);
  int64_t* total = totals.mutable_data_ptr<int64_t>();
  total[0] = plan.compute_tasks;
  total[1] = plan.comm_tasks;
  total[2] = plan.num_counters();
  total[3] = plan.transfers;
  return {table, totals};
}

Tensor row_offset(int64_t row, int64_t row_elements, const Tensor& like) {
  Tensor out = torch::stable::new_empty(like, {1}, ScalarType::Long);
  out.mutable_data_ptr<int64_t>()[0] = mok::row_offset(row, row_elements);
  return out;
}

Tensor tile_sizes(const Tensor& like) {
  const std::vector<int64_t> sizes = {mok::kBlockRows, mok::kDispatchRows, mok::kGateUpCols,   mok::kHiddenCols, mok::kActivationGradCols,
                                      mok::kWgradRows, mok::kWgradCols,    mok::kReduceTokens, mok::kLag};
  Tensor out = torch::stable::new_empty(like, {static_cast<int64_t>(sizes.size())}, ScalarType::Long);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < sizes.size(); ++i) data[i] = sizes[i];
  return out;
}

void store_flag(Tensor flags, int64_t index, int64_t value) {
  STD_TORCH_CHECK(index >= 0 && index < flags.numel(), "flag ", index, " of ", flags.numel());
  mok::store_flag(flags.mutable_data_ptr<int64_t>() + index, value);
}

int64_t load_flag(const Tensor& flags, int64_t index) {
  STD_TORCH_CHECK(index >= 0 && index < flags.numel(), "flag ", index, " of ", flags.numel());
  return mok::load_flag(flags.const_data_ptr<int64_t>() + index);
}

}  // namespace

STABLE_TORCH_LIBRARY(mok_megatron, m) {
  m.def("find_route_fault(Tensor topk_experts, int num_experts) -> Tensor");
  m.def(
      "route_schedule(Tensor topk_experts, Tensor num_tokens, int rank, int num_local_experts, int capacity_rows)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("task_stream(Tensor expert_row_offsets, int[] shape, int stream) -> (Tensor, Tensor)");
  m.def("tile_sizes(Tensor like) -> Tensor");
  m.def("row_offset(int row, int row_elements, Tensor like) -> Tensor");
  m.def("store_flag(Tensor(a!) flags, int index, int value) -> ()");
  m.def("load_flag(Tensor flags, int index) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CPU, m) {
  m.impl("find_route_fault", TORCH_BOX(&find_route_fault));
  m.impl("route_schedule", TORCH_BOX(&route_schedule));
  m.impl("task_stream", TORCH_BOX(&task_stream));
  m.impl("tile_sizes", TORCH_BOX(&tile_sizes));
  m.impl("row_offset", TORCH_BOX(&row_offset));
  m.impl("store_flag", TORCH_BOX(&store_flag));
  m.impl("load_flag", TORCH_BOX(&load_flag));
}
