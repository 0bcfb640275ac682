// The plan of a pass: everything a worker needs to turn a ticket into a task, from (rows per expert, shapes, ring). No host knowledge of R.
#pragma once

#include <cstdint>

#include "task.h"
#include "tiles.h"

namespace mok {

struct PassShape {
  Pass pass = Pass::kForward;
  int64_t rank = 0;
  int64_t ep_size = 1;
  int64_t num_tokens = 0;  // T of this rank in this call
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_local_experts = 0;
  int64_t minibatch_blocks = 0;
  int64_t macrobatch_blocks = 0;  // blocks of the ring; a multiple of minibatch_blocks
  int64_t capacity_blocks = 0;
};

// Experts [first, end).
struct ExpertRange {
  int64_t first, end;
};

struct Plan {
  PassShape shape;
  const int64_t* expert_row_offsets = nullptr;    // [E_local + 1], padded rows
  const int64_t* macro_compute_offset = nullptr;  // [macrobatches + 1], backward: compute tickets before a macrobatch
  int64_t num_blocks = 0;
  int64_t num_macrobatches = 0;
  int64_t gemm1_tiles = 0;
  int64_t gemm2_tiles = 0;
  int64_t dgrad2_tiles = 0;
  int64_t dgrad1_tiles = 0;
  int64_t wgrad2_tiles_m = 0, wgrad2_tiles_n = 0;
  int64_t wgrad13_tiles_m = 0, wgrad13_tiles_n = 0;
  int64_t reduce_tasks = 0;
  int64_t compute_tasks = 0;
  int64_t comm_tasks = 0;
  int64_t transfers = 0;  // pulls and pushes that kSignalDone waits for

  MOK_HOST_DEVICE int64_t wgrad2_tiles() const { return wgrad2_tiles_m * wgrad2_tiles_n; }
  MOK_HOST_DEVICE int64_t wgrad_tiles() const { return wgrad2_tiles() + wgrad13_tiles_m * wgrad13_tiles_n; }
  MOK_HOST_DEVICE int64_t macro_first_block(int64_t macro) const { return macro * shape.macrobatch_blocks; }
  MOK_HOST_DEVICE int64_t macro_blocks(int64_t macro) const { return min_of(shape.macrobatch_blocks, num_blocks - macro_first_block(macro)); }
  MOK_HOST_DEVICE int64_t ring_block(int64_t block) const { return block % shape.macrobatch_blocks; }

  // Counters: one array, monotonic inside a pass, reset when the pass ends.
  MOK_HOST_DEVICE int64_t dispatched(int64_t block) const { return block; }
  MOK_HOST_DEVICE int64_t gemm1_done(int64_t block) const { return shape.capacity_blocks + block; }
  MOK_HOST_DEVICE int64_t gemm2_done(int64_t block) const { return 2 * shape.capacity_blocks + block; }
  MOK_HOST_DEVICE int64_t dispatched_dy(int64_t block) const { return 3 * shape.capacity_blocks + block; }
  MOK_HOST_DEVICE int64_t dgrad2_done(int64_t block) const { return 4 * shape.capacity_blocks + block; }
  MOK_HOST_DEVICE int64_t dgrad1_done(int64_t block) const { return 5 * shape.capacity_blocks + block; }
  MOK_HOST_DEVICE int64_t expert_wgrad_done(int64_t expert) const { return 6 * shape.capacity_blocks + expert; }
  MOK_HOST_DEVICE int64_t transfers_done() const { return 6 * shape.capacity_blocks + shape.num_local_experts; }
  MOK_HOST_DEVICE int64_t num_counters() const { return transfers_done() + 1; }

  MOK_HOST_DEVICE int64_t expert_first_block(int64_t expert) const { return expert_row_offsets[expert] / kBlockRows; }

  // The expert whose rows a block holds: the last expert that starts at or before it.
  MOK_HOST_DEVICE int64_t block_expert(int64_t block) const {
    return first_where(1, shape.num_local_experts, [&](int64_t expert) { return expert_first_block(expert) > block; }) - 1;
  }

  // An expert has weight-gradient tasks in every macrobatch that holds rows of it; one without rows, in the macrobatch where it stands.
  MOK_HOST_DEVICE int64_t expert_first_macro(int64_t expert) const {
    return min_of(expert_first_block(expert) / shape.macrobatch_blocks, num_macrobatches - 1);
  }
  // Experts of a macrobatch are a contiguous range: both bounds below are searches over monotone sequences. They compare blocks, since a
  // division a step would take longer than all the rest.
  MOK_HOST_DEVICE int64_t macro_first_expert(int64_t macro) const {
    const int64_t first_block = macro_first_block(macro);
    // Its rows go on in this macrobatch or beyond; or it has none, and stands there.
    return first_where(0, shape.num_local_experts, [&](int64_t expert) {
      return expert_first_block(expert + 1) > first_block || expert_first_block(expert) >= first_block;
    });
  }
  MOK_HOST_DEVICE int64_t macro_end_expert(int64_t macro) const {
    if (macro == num_macrobatches - 1) return shape.num_local_experts;
    const int64_t end_block = macro_first_block(macro + 1);
    return first_where(0, shape.num_local_experts, [&](int64_t expert) { return expert_first_block(expert) >= end_block; });
  }

  // Whether the backward's weight gradients stand between its other products.
  MOK_HOST_DEVICE bool spreads_wgrads() const { return num_blocks * kBlockRows < kRowsOfLongSums * shape.num_local_experts; }

  MOK_HOST_DEVICE int64_t minibatches(int64_t macro) const { return ceil_div(macro_blocks(macro), shape.minibatch_blocks); }

  // Of the experts of a macrobatch, those whose rows in it end within its first `count` minibatches. What goes on in the next macrobatch, or has
  // no rows behind the last, ends with the last.
  MOK_HOST_DEVICE int64_t experts_ended(int64_t macro, const ExpertRange& experts, int64_t count) const {
    if (count <= 0) return 0;
    if (count >= minibatches(macro)) return experts.end - experts.first;
    const int64_t bound = macro_first_block(macro) + count * shape.minibatch_blocks;
    return first_where(experts.first, experts.end, [&](int64_t expert) { return expert_first_block(expert + 1) > bound; }) - experts.first;
  }

  // Compute tickets of one macrobatch of the backward.
  MOK_HOST_DEVICE int64_t backward_macro_tasks(int64_t macro) const {
    const int64_t replay = macro == 0 ? 0 : gemm1_tiles;
    return macro_blocks(macro) * (replay + dgrad2_tiles + dgrad1_tiles) + (macro_end_expert(macro) - macro_first_expert(macro)) * wgrad_tiles();
  }
};

// Longest table that a plan of this shape can need.
MOK_HOST_DEVICE int64_t max_macrobatches(const PassShape& shape) {
  return shape.capacity_blocks == 0 ? 1 : ceil_div(shape.capacity_blocks, shape.macrobatch_blocks);
}

// A backward's plan is not whole before set_macro_table().
MOK_HOST_DEVICE Plan make_plan(const PassShape& shape, const int64_t* expert_row_offsets) {
  Plan plan;
  plan.shape = shape;
  plan.expert_row_offsets = expert_row_offsets;
  plan.num_blocks = expert_row_offsets[shape.num_local_experts] / kBlockRows;
  const int64_t macros = ceil_div(plan.num_blocks, shape.macrobatch_blocks);
  plan.num_macrobatches = macros == 0 ? 1 : macros;
  plan.gemm1_tiles = ceil_div(shape.intermediate, kGateUpCols);
  plan.gemm2_tiles = ceil_div(shape.hidden, kHiddenCols);
  plan.dgrad2_tiles = ceil_div(shape.intermediate, kActivationGradCols);
  plan.dgrad1_tiles = ceil_div(shape.hidden, kHiddenCols);
  plan.wgrad2_tiles_m = ceil_div(shape.hidden, kWgradRows);
  plan.wgrad2_tiles_n = ceil_div(shape.intermediate, kWgradCols);
  plan.wgrad13_tiles_m = ceil_div(2 * shape.intermediate, kWgradRows);
  plan.wgrad13_tiles_n = ceil_div(shape.hidden, kWgradCols);
  plan.reduce_tasks = shape.pass == Pass::kRecompute ? 0 : ceil_div(shape.num_tokens, kReduceTokens);
  const int64_t blocks = plan.num_blocks;
  const int64_t saved_blocks = min_of(blocks, shape.macrobatch_blocks);
  int64_t dispatches = 0, pushes = 0;
  switch (shape.pass) {
    case Pass::kForward:
      dispatches = blocks * kDispatchTasksPerBlock;
      pushes = blocks * plan.gemm2_tiles;
      plan.compute_tasks = blocks * (plan.gemm1_tiles + plan.gemm2_tiles) + plan.reduce_tasks;
      break;
    case Pass::kRecompute:
      dispatches = saved_blocks * kDispatchTasksPerBlock;
      plan.compute_tasks = saved_blocks * plan.gemm1_tiles;
      break;
    case Pass::kBackward:
      // x is fetched again for all but the first macrobatch, whose rows are in the context.
      dispatches = (2 * blocks - saved_blocks) * kDispatchTasksPerBlock;
      pushes = blocks * plan.dgrad1_tiles;
      break;
  }
  plan.transfers = dispatches + pushes;
  plan.comm_tasks = dispatches + 1;
  return plan;
}

// `table` [num_macrobatches + 1] of a backward: sums of backward_macro_tasks().
MOK_HOST_DEVICE void set_macro_table(Plan& plan, const int64_t* table) {
  plan.macro_compute_offset = table;
  plan.compute_tasks = table[plan.num_macrobatches] + plan.reduce_tasks;
}

// With its table, which holds max_macrobatches(shape) + 1 entries and is filled for the backward.
MOK_HOST_DEVICE Plan make_plan(const PassShape& shape, const int64_t* expert_row_offsets, int64_t* macro_table) {
  Plan plan = make_plan(shape, expert_row_offsets);
  if (shape.pass != Pass::kBackward) return plan;
  macro_table[0] = 0;
  for (int64_t macro = 0; macro < plan.num_macrobatches; ++macro) macro_table[macro + 1] = macro_table[macro] + plan.backward_macro_tasks(macro);
  set_macro_table(plan, macro_table);
  return plan;
}

}  // namespace mok
