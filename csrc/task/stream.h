// Tickets to tasks. `comm_task` and `compute_task` are pure functions of the plan and a ticket number.
//
// Order within a macrobatch: minibatch i is fetched, then its first GEMM, then the second GEMM of minibatch i - kLag. No second GEMM waits for
// the last wave of a first GEMM, and what second GEMMs push to peers is spread between first GEMMs, which push nothing. At the end of a
// macrobatch its last second GEMMs come before anything of the next one: a ring that holds few minibatches would otherwise wait for itself.
// The backward's weight gradients follow its other GEMMs. Where experts have few rows, those of the experts that ended kWgradLag minibatches
// before stand between the GEMMs of a minibatch's place: the ones read and write memory while the others multiply. For the same reason the
// backward's final sums stand between the last weight gradients, behind the first half of them: by then the peers' rows are there. A task waits
// only for tasks of lower order, or for a peer.
#pragma once

#include <cstdint>

#include "plan.h"

namespace mok {

namespace detail {

// Where a ticket falls in: front(0) .. front(kLag - 1), {front(i), back(i - kLag)} for i = kLag .., then the backs that are left.
struct SkewPosition {
  bool back;
  int64_t minibatch;
  int64_t index;
};

MOK_HOST_DEVICE SkewPosition skew_position(int64_t ticket, int64_t blocks, int64_t minibatch_blocks, int64_t front, int64_t back) {
  const int64_t front_tasks = minibatch_blocks * front, back_tasks = minibatch_blocks * back;
  const int64_t periods = ceil_div(blocks, minibatch_blocks) - kLag;  // minibatches whose front stands beside a back
  const int64_t head = periods > 0 ? kLag * front_tasks : blocks * front;
  if (ticket < head) return {false, ticket / front_tasks, ticket % front_tasks};
  ticket -= head;
  int64_t done = 0;  // backs that stand between fronts
  if (periods > 0) {
    const int64_t period = min_of(ticket / (front_tasks + back_tasks), periods - 1);
    ticket -= period * (front_tasks + back_tasks);
    const int64_t fronts = min_of(minibatch_blocks, blocks - (kLag + period) * minibatch_blocks) * front;
    if (ticket < fronts) return {false, kLag + period, ticket};
    ticket -= fronts;
    done = period;
  }
  return {true, done + ticket / back_tasks, ticket % back_tasks};
}

struct TilePosition {
  int64_t block;  // within the minibatch
  int64_t tile;
};

MOK_HOST_DEVICE TilePosition tile_position(int64_t index, int64_t blocks, int64_t tiles) {
  const int64_t group = index / (kSwizzleBlocks * tiles);
  const int64_t rest = index - group * kSwizzleBlocks * tiles;
  const int64_t group_blocks = min_of(kSwizzleBlocks, blocks - group * kSwizzleBlocks);
  return {group * kSwizzleBlocks + rest % group_blocks, rest / group_blocks};
}

// Ranks start a minibatch at different blocks, so that they do not all pull from the same peer first. Row positions do not change.
MOK_HOST_DEVICE int64_t rotate_block(const PassShape& shape, int64_t block, int64_t blocks) {
  return (block + shape.rank * blocks / shape.ep_size) % blocks;
}

// Two sequences of tickets as one: runs of kWgradRun tickets of the second stand evenly between runs of the first. What does not fill a run
// comes last. `begin` is the number of the first ticket in the pass: a cluster takes its tickets from even numbers on, and two tasks of two
// kinds one after the other, so that runs begin where clusters do, behind tickets of the first sequence.
struct MergedPosition {
  bool second;
  int64_t index;
};

MOK_HOST_DEVICE MergedPosition merged_position(int64_t begin, int64_t ticket, int64_t first, int64_t second) {
  const int64_t head = min_of(ceil_div(begin, kWgradRun) * kWgradRun - begin, first);
  if (ticket < head) return {false, ticket};
  ticket -= head;
  first -= head;
  const int64_t first_runs = first / kWgradRun, second_runs = second / kWgradRun, runs = first_runs + second_runs;
  const int64_t run = ticket / kWgradRun;
  if (run < runs) {
    const int64_t before = run * second_runs / runs;
    const bool is_second = (run + 1) * second_runs / runs > before;
    return {is_second, (is_second ? before * kWgradRun : head + (run - before) * kWgradRun) + ticket % kWgradRun};
  }
  const int64_t rest = ticket - runs * kWgradRun, first_rest = first % kWgradRun;
  return rest < first_rest ? MergedPosition{false, head + first_runs * kWgradRun + rest}
                           : MergedPosition{true, second_runs * kWgradRun + rest - first_rest};
}

constexpr int kOrderShift = 40;

// Segments of a minibatch in the total order. The backward's products of a minibatch's place are one segment, kFront, in the order of their
// tickets.
enum Segment : int64_t { kFetchX = 0, kFetchDy = 1, kFront = 2, kBack = 3, kSegments = 4 };

static_assert(kLag > 1, "what waits for a first GEMM stands in a later place, also where that waits for a replay");
static_assert(kWgradLag == kLag + 1, "the last weight gradients stand in the same place, the last, whether they are spread or not");

MOK_HOST_DEVICE int64_t macro_segments(const PassShape& shape) {
  return kSegments * (ceil_div(shape.macrobatch_blocks, shape.minibatch_blocks) + kWgradLag + 1);
}

// `back` of minibatch i stands after `front` of minibatch i + kLag.
MOK_HOST_DEVICE int64_t segment_order(const PassShape& shape, int64_t walk, int64_t minibatch, int64_t segment, int64_t index) {
  const int64_t position = minibatch + (segment == kBack ? kLag : 0);
  return ((walk * macro_segments(shape) + position * kSegments + segment) << kOrderShift) + index;
}

MOK_HOST_DEVICE int64_t closing_order(const Plan& plan, int64_t segment, int64_t index) {
  return ((plan.num_macrobatches * macro_segments(plan.shape) + segment) << kOrderShift) + index;
}

// Places of a macrobatch of the backward.
MOK_HOST_DEVICE int64_t backward_places(const Plan& plan, int64_t macro) {
  const int64_t minibatches = plan.minibatches(macro);
  return (minibatches == 0 ? 1 : minibatches) + kWgradLag;
}

// Before all tasks of the last place of a backward.
MOK_HOST_DEVICE int64_t last_place_order(const Plan& plan) {
  const int64_t macro = plan.num_macrobatches - 1;
  return segment_order(plan.shape, macro, backward_places(plan, macro) - 1, kFetchX, 0);
}

// Places are given as constants, in order: with an index that it has to work out, a device would keep the task on its stack.
MOK_HOST_DEVICE void set_wait(Task& task, int place, int64_t first, int64_t count, int64_t target) {
  task.waits[place] = {first, count, target};
  task.num_waits = place + 1;
}

MOK_HOST_DEVICE void set_bump(Task& task, int place, int64_t counter) {
  task.bumps[place] = counter;
  task.num_bumps = place + 1;
}

MOK_HOST_DEVICE void add_access(Task& task, RingBuffer buffer, int32_t mode, int64_t first_block, int64_t num_blocks) {
#ifndef __CUDA_ARCH__  // the kernels know what they touch, and a device would keep the list on its stack
  task.accesses[task.num_accesses++] = {static_cast<int32_t>(buffer), mode, first_block, num_blocks};
#endif
}

MOK_HOST_DEVICE void set_block(const Plan& plan, Task& task, int64_t macro, int64_t minibatch, int64_t block) {
  task.macrobatch = macro;
  task.minibatch = minibatch;
  task.block = block;
  task.ring_block = plan.ring_block(block);
  task.expert = plan.block_expert(block);
}

// The block that held a slot before `block`, in the order in which the pass walks its macrobatches; -1 if the slot is fresh.
MOK_HOST_DEVICE int64_t previous_in_slot(const Plan& plan, int64_t block) {
  if (plan.shape.pass == Pass::kForward) {
    const int64_t previous = block + plan.shape.macrobatch_blocks;
    return previous < plan.num_blocks ? previous : -1;
  }
  return block - plan.shape.macrobatch_blocks;  // negative in the first macrobatch
}

// Weight-gradient tiles of an expert that are complete once it is done with macrobatch `macro`.
MOK_HOST_DEVICE int64_t wgrad_target(const Plan& plan, int64_t expert, int64_t macro) {
  return (macro - plan.expert_first_macro(expert) + 1) * plan.wgrad_tiles();
}

MOK_HOST_DEVICE int64_t minibatch_size_of(const Plan& plan, int64_t macro, int64_t minibatch) {
  return min_of(plan.shape.minibatch_blocks, plan.macro_blocks(macro) - minibatch * plan.shape.minibatch_blocks);
}

MOK_HOST_DEVICE int64_t block_of(const Plan& plan, int64_t macro, int64_t minibatch, int64_t index, int64_t blocks) {
  return plan.macro_first_block(macro) + minibatch * plan.shape.minibatch_blocks + rotate_block(plan.shape, index, blocks);
}

MOK_HOST_DEVICE void fill_dispatch(const Plan& plan, Task& task, bool dy, int64_t walk, int64_t macro, int64_t minibatch, int64_t index) {
  const int64_t blocks = minibatch_size_of(plan, macro, minibatch);
  const int64_t block = block_of(plan, macro, minibatch, index / kDispatchTasksPerBlock, blocks);
  set_block(plan, task, macro, minibatch, block);
  task.kind = dy ? TaskKind::kDispatchDy : TaskKind::kDispatch;
  task.stream = Stream::kComm;
  task.peer_wait = PeerWait::kEntered;
  task.order = segment_order(plan.shape, walk, minibatch, dy ? kFetchDy : kFetchX, index);
  task.first_row = block * kBlockRows + index % kDispatchTasksPerBlock * kDispatchRows;
  task.num_rows = kDispatchRows;
  const int64_t previous = previous_in_slot(plan, block);
  // The ring's x is fresh in the backward's second macrobatch too: the first one reads the context's rows.
  const bool fresh = previous < 0 || (plan.shape.pass == Pass::kBackward && !dy && macro == 1);
  if (!fresh) {
    if (plan.shape.pass == Pass::kForward) {
      set_wait(task, 0, plan.gemm1_done(previous), 1, plan.gemm1_tiles);
    } else {
      const int64_t expert = plan.block_expert(previous);
      set_wait(task, 0, plan.expert_wgrad_done(expert), 1, wgrad_target(plan, expert, macro - 1));
    }
  }
  add_access(task, dy ? RingBuffer::kDy : RingBuffer::kX, kWrite, task.ring_block, 1);
  set_bump(task, 0, dy ? plan.dispatched_dy(block) : plan.dispatched(block));
  set_bump(task, 1, plan.transfers_done());
}

MOK_HOST_DEVICE void fill_gemm1(const Plan& plan, Task& task, int64_t macro, int64_t minibatch, int64_t index) {
  const int64_t blocks = minibatch_size_of(plan, macro, minibatch);
  const TilePosition at = tile_position(index, blocks, plan.gemm1_tiles);
  const int64_t block = block_of(plan, macro, minibatch, at.block, blocks);
  set_block(plan, task, macro, minibatch, block);
  task.kind = TaskKind::kGemm1;
  task.tile_n = at.tile;
  set_wait(task, 0, plan.dispatched(block), 1, kDispatchTasksPerBlock);
  add_access(task, RingBuffer::kX, plan.shape.pass == Pass::kBackward ? kRead : kRead | kRelease, task.ring_block, 1);
  add_access(task, RingBuffer::kGateUp, kWrite, task.ring_block, 1);
  if (plan.shape.pass == Pass::kForward) {
    const int64_t previous = previous_in_slot(plan, block);
    if (previous >= 0) set_wait(task, 1, plan.gemm2_done(previous), 1, plan.gemm2_tiles);
    add_access(task, RingBuffer::kActivation, kWrite, task.ring_block, 1);
  }
  set_bump(task, 0, plan.gemm1_done(block));
}

MOK_HOST_DEVICE void fill_gemm2(const Plan& plan, Task& task, int64_t macro, int64_t minibatch, int64_t index) {
  const int64_t blocks = minibatch_size_of(plan, macro, minibatch);
  const TilePosition at = tile_position(index, blocks, plan.gemm2_tiles);
  const int64_t block = block_of(plan, macro, minibatch, at.block, blocks);
  set_block(plan, task, macro, minibatch, block);
  task.kind = TaskKind::kGemm2;
  task.tile_n = at.tile;
  set_wait(task, 0, plan.gemm1_done(block), 1, plan.gemm1_tiles);
  add_access(task, RingBuffer::kActivation, kRead | kRelease, task.ring_block, 1);
  set_bump(task, 0, plan.gemm2_done(block));
  set_bump(task, 1, plan.transfers_done());
}

MOK_HOST_DEVICE void fill_dgrad2(const Plan& plan, Task& task, int64_t macro, int64_t minibatch, int64_t index) {
  const int64_t blocks = minibatch_size_of(plan, macro, minibatch);
  const TilePosition at = tile_position(index, blocks, plan.dgrad2_tiles);
  const int64_t block = block_of(plan, macro, minibatch, at.block, blocks);
  set_block(plan, task, macro, minibatch, block);
  task.kind = TaskKind::kDgrad2;
  task.tile_n = at.tile;
  set_wait(task, 0, plan.dispatched_dy(block), 1, kDispatchTasksPerBlock);
  if (macro > 0) {
    set_wait(task, 1, plan.gemm1_done(block), 1, plan.gemm1_tiles);
    // The slot's earlier dgate/dup may still be read by a dgrad1; its other readers are weight gradients, which the fetch of dy waited for.
    set_wait(task, 2, plan.dgrad1_done(previous_in_slot(plan, block)), 1, plan.dgrad1_tiles);
  }
  add_access(task, RingBuffer::kDy, kRead, task.ring_block, 1);
  add_access(task, macro == 0 ? RingBuffer::kSavedGateUp : RingBuffer::kGateUp, kRead, task.ring_block, 1);
  add_access(task, RingBuffer::kActivation, kWrite, task.ring_block, 1);
  add_access(task, RingBuffer::kDGateUp, kWrite, task.ring_block, 1);
  set_bump(task, 0, plan.dgrad2_done(block));
}

MOK_HOST_DEVICE void fill_dgrad1(const Plan& plan, Task& task, int64_t macro, int64_t minibatch, int64_t index) {
  const int64_t blocks = minibatch_size_of(plan, macro, minibatch);
  const TilePosition at = tile_position(index, blocks, plan.dgrad1_tiles);
  const int64_t block = block_of(plan, macro, minibatch, at.block, blocks);
  set_block(plan, task, macro, minibatch, block);
  task.kind = TaskKind::kDgrad1;
  task.tile_n = at.tile;
  set_wait(task, 0, plan.dgrad2_done(block), 1, plan.dgrad2_tiles);
  add_access(task, RingBuffer::kDGateUp, kRead | kRelease, task.ring_block, 1);
  set_bump(task, 0, plan.dgrad1_done(block));
  set_bump(task, 1, plan.transfers_done());
}

MOK_HOST_DEVICE void fill_wgrad(const Plan& plan, Task& task, int64_t macro, int64_t index) {
  const int64_t expert = plan.macro_first_expert(macro) + index / plan.wgrad_tiles();
  const int64_t tile = index % plan.wgrad_tiles();
  const bool second = tile < plan.wgrad2_tiles();
  const int64_t tiles_m = second ? plan.wgrad2_tiles_m : plan.wgrad13_tiles_m;
  const int64_t local_tile = second ? tile : tile - plan.wgrad2_tiles();
  task.kind = second ? TaskKind::kWgrad2 : TaskKind::kWgrad13;
  task.macrobatch = macro;
  task.expert = expert;
  // Neighbours in time share the wider operand.
  task.tile_m = local_tile % tiles_m;
  task.tile_n = local_tile / tiles_m;
  set_bump(task, 0, plan.expert_wgrad_done(expert));
  const int64_t macro_begin = plan.macro_first_block(macro), macro_end = macro_begin + plan.macro_blocks(macro);
  const int64_t expert_begin = plan.expert_first_block(expert), expert_end = plan.expert_first_block(expert + 1);
  if (expert_begin == expert_end) {
    // tile_m, tile_n and the matrix are those of the tile; `first_block` tells which of the two it is.
    task.kind = TaskKind::kZero;
    task.first_block = second ? 0 : 1;
    return;
  }
  const int64_t begin = expert_begin > macro_begin ? expert_begin : macro_begin;
  const int64_t end = min_of(expert_end, macro_end);
  task.first_block = begin;
  task.num_blocks = end - begin;
  task.continues = expert_begin < macro_begin;
  task.continued = expert_end > macro_end;
  set_wait(task, 0, plan.dgrad2_done(begin), end - begin, plan.dgrad2_tiles);
  if (task.continues) {
    set_wait(task, 1, plan.expert_wgrad_done(expert), 1, wgrad_target(plan, expert, macro - 1));
  } else if (task.continued) {
    // The scratch tile is written; whoever came through it last, into this macrobatch or an earlier one, must have read it. An expert that
    // itself came in through it is the macrobatch's first: no task has both of these waits.
    for (int64_t entered = macro; entered > 0; --entered) {
      const int64_t carried = plan.macro_first_expert(entered);
      if (plan.expert_first_block(carried) >= plan.macro_first_block(entered)) continue;
      set_wait(task, 1, plan.expert_wgrad_done(carried), 1, wgrad_target(plan, carried, entered));
      break;
    }
  }
  const int64_t slot = plan.ring_block(begin);
  if (second) {
    add_access(task, RingBuffer::kDy, kRead | kRelease, slot, end - begin);
    add_access(task, RingBuffer::kActivation, kRead | kRelease, slot, end - begin);
  } else {
    add_access(task, RingBuffer::kDGateUp, kRead | kRelease, slot, end - begin);
    add_access(task, macro == 0 ? RingBuffer::kSavedX : RingBuffer::kX, kRead | kRelease, slot, end - begin);
  }
}

MOK_HOST_DEVICE void fill_reduce(const Plan& plan, Task& task, int64_t index) {
  task.kind = TaskKind::kReduce;
  task.peer_wait = PeerWait::kDone;
  task.first_row = index * kReduceTokens;
  task.num_rows = min_of(kReduceTokens, plan.shape.num_tokens - task.first_row);
}

MOK_HOST_DEVICE Task forward_compute_task(const Plan& plan, int64_t ticket) {
  Task task;
  const int64_t per_block = plan.gemm1_tiles + plan.gemm2_tiles;
  const int64_t gemm_tasks = plan.num_blocks * per_block;
  if (ticket >= gemm_tasks) {
    fill_reduce(plan, task, ticket - gemm_tasks);
    task.order = closing_order(plan, 1, ticket);
    return task;
  }
  // Walked from the last macrobatch, the only one that may be partial, to the first, whose activations are what is kept.
  const int64_t last = plan.num_macrobatches - 1;
  const int64_t head = plan.macro_blocks(last) * per_block;
  int64_t walk = 0;
  if (ticket >= head) {
    ticket -= head;
    walk = 1 + ticket / (plan.shape.macrobatch_blocks * per_block);
    ticket %= plan.shape.macrobatch_blocks * per_block;
  }
  const int64_t macro = last - walk;
  const SkewPosition at = skew_position(ticket, plan.macro_blocks(macro), plan.shape.minibatch_blocks, plan.gemm1_tiles, plan.gemm2_tiles);
  task.order = segment_order(plan.shape, walk, at.minibatch, at.back ? kBack : kFront, at.index);
  if (at.back) {
    fill_gemm2(plan, task, macro, at.minibatch, at.index);
  } else {
    fill_gemm1(plan, task, macro, at.minibatch, at.index);
  }
  return task;
}

// Place i of a macrobatch of the backward: what is replayed of the forward for minibatch i, the first GEMMs of minibatch i (of the one before,
// where they wait for a replay), the second ones of minibatch i - kLag and, between them, the weight gradients of the experts that end in
// minibatch i - kWgradLag; or all weight gradients in the place behind the last second GEMMs. Tickets of each kind before a place.
struct BackwardPlace {
  int64_t replay, dgrad2, dgrad1, wgrad;
  MOK_HOST_DEVICE int64_t total() const { return replay + dgrad2 + dgrad1 + wgrad; }
};

// Minibatches by which the first GEMMs of a macrobatch trail its replay.
MOK_HOST_DEVICE int64_t replay_lag(int64_t macro) { return macro == 0 ? 0 : 1; }

MOK_HOST_DEVICE BackwardPlace tickets_before(const Plan& plan, int64_t macro, const ExpertRange& experts, int64_t place) {
  const int64_t blocks = plan.macro_blocks(macro), minibatches = plan.minibatches(macro);
  const auto blocks_until = [&](int64_t minibatch) { return minibatch <= 0 ? 0 : min_of(minibatch * plan.shape.minibatch_blocks, blocks); };
  const int64_t ended = plan.spreads_wgrads() ? place - kWgradLag : place > minibatches + kLag ? minibatches : 0;
  return {macro == 0 ? 0 : blocks_until(place) * plan.gemm1_tiles, blocks_until(place - replay_lag(macro)) * plan.dgrad2_tiles,
          blocks_until(place - kLag) * plan.dgrad1_tiles, plan.experts_ended(macro, experts, ended) * plan.wgrad_tiles()};
}

// The last place that begins at or before a ticket of the macrobatch.
MOK_HOST_DEVICE int64_t backward_place(const Plan& plan, int64_t macro, const ExpertRange& experts, int64_t ticket) {
  const auto begins_behind = [&](int64_t place) { return tickets_before(plan, macro, experts, place).total() > ticket; };
  return first_where(1, backward_places(plan, macro), begins_behind) - 1;
}

MOK_HOST_DEVICE Task backward_compute_task(const Plan& plan, int64_t ticket) {
  Task task;
  const int64_t last_tile = plan.macro_compute_offset[plan.num_macrobatches] - 1;  // an expert has weight-gradient tiles
  const auto begins_behind = [&](int64_t macro) { return plan.macro_compute_offset[macro] > ticket; };
  const int64_t macro = first_where(1, plan.num_macrobatches, begins_behind) - 1, number = ticket;
  ticket -= plan.macro_compute_offset[macro];
  const ExpertRange experts = {plan.macro_first_expert(macro), plan.macro_end_expert(macro)};
  const int64_t place = backward_place(plan, macro, experts, min_of(ticket, last_tile - plan.macro_compute_offset[macro]));
  const BackwardPlace before = tickets_before(plan, macro, experts, place), after = tickets_before(plan, macro, experts, place + 1);
  ticket -= before.total();
  task.order = segment_order(plan.shape, macro, place, kFront, ticket);
  if (macro == plan.num_macrobatches - 1 && place == backward_places(plan, macro) - 1) {
    const int64_t wgrads = after.wgrad - before.wgrad, head = wgrads / 2;
    const MergedPosition at = ticket < head ? MergedPosition{false, ticket - head}
                                            : merged_position(number - ticket + head, ticket - head, wgrads - head, plan.reduce_tasks);
    if (at.second) {
      fill_reduce(plan, task, at.index);
    } else {
      fill_wgrad(plan, task, macro, before.wgrad + head + at.index);
    }
    return task;
  }
  const int64_t replays = after.replay - before.replay, fronts = replays + after.dgrad2 - before.dgrad2;
  const MergedPosition at = merged_position(number - ticket, ticket, fronts + after.dgrad1 - before.dgrad1, after.wgrad - before.wgrad);
  if (at.second) {
    fill_wgrad(plan, task, macro, before.wgrad + at.index);
  } else if (at.index < replays) {
    fill_gemm1(plan, task, macro, place, at.index);
  } else if (at.index < fronts) {
    fill_dgrad2(plan, task, macro, place - replay_lag(macro), at.index - replays);
  } else {
    fill_dgrad1(plan, task, macro, place - kLag, at.index - fronts);
  }
  return task;
}

}  // namespace detail

MOK_HOST_DEVICE Task compute_task(const Plan& plan, int64_t ticket) {
  switch (plan.shape.pass) {
    case Pass::kForward:
      return detail::forward_compute_task(plan, ticket);
    case Pass::kBackward:
      return detail::backward_compute_task(plan, ticket);
    case Pass::kRecompute:
      break;
  }
  Task task;
  const int64_t per_minibatch = plan.shape.minibatch_blocks * plan.gemm1_tiles, minibatch = ticket / per_minibatch;
  task.order = detail::segment_order(plan.shape, 0, minibatch, detail::kFront, ticket % per_minibatch);
  detail::fill_gemm1(plan, task, 0, minibatch, ticket % per_minibatch);
  return task;
}

MOK_HOST_DEVICE Task comm_task(const Plan& plan, int64_t ticket) {
  Task task;
  if (ticket == plan.comm_tasks - 1) {
    task.kind = TaskKind::kSignalDone;
    task.stream = Stream::kComm;
    // The backward's final sums, which wait for it, stand in the place behind the last pushes.
    task.order = plan.shape.pass == Pass::kBackward ? detail::last_place_order(plan) : detail::closing_order(plan, 0, 0);
    detail::set_wait(task, 0, plan.transfers_done(), 1, plan.transfers);
    return task;
  }
  // Fetches of a macrobatch; the backward's later macrobatches fetch x and dy of each minibatch in turn.
  const bool backward = plan.shape.pass == Pass::kBackward;
  const bool descending = plan.shape.pass == Pass::kForward;
  const int64_t last = plan.num_macrobatches - 1;
  const int64_t head_macro = descending ? last : 0;
  const int64_t head = plan.macro_blocks(head_macro) * kDispatchTasksPerBlock;
  int64_t walk = 0;
  int64_t fetches = 1;
  if (ticket >= head) {
    fetches = backward ? 2 : 1;
    ticket -= head;
    const int64_t per_macro = plan.shape.macrobatch_blocks * kDispatchTasksPerBlock * fetches;
    walk = 1 + ticket / per_macro;
    ticket %= per_macro;
  }
  const int64_t macro = descending ? last - walk : walk;
  const int64_t per_minibatch = plan.shape.minibatch_blocks * kDispatchTasksPerBlock * fetches;
  const int64_t minibatch = ticket / per_minibatch;
  const int64_t index = ticket % per_minibatch;
  const int64_t per_fetch = detail::minibatch_size_of(plan, macro, minibatch) * kDispatchTasksPerBlock;
  const bool dy = backward && (macro == 0 || index >= per_fetch);
  detail::fill_dispatch(plan, task, dy, walk, macro, minibatch, index % per_fetch);
  return task;
}

}  // namespace mok
