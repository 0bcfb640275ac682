// The forward megakernel's shared memory, and its scheduler warp: tickets, waits, tiles for the other warps, and announcements of what they
// stored.
#pragma once

#include "../comm/sm90_wait.cuh"
#include "../mma/sm90_pipeline.cuh"
#include "sm90_params.cuh"

namespace mok {

constexpr int kThreads = 384;
constexpr uint32_t kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr int kSlots = 2;  // one tile in execution, one whose loads are under way

enum class TileKind : int32_t { kExit, kGemm1, kGemm2, kReduce, kSkip };
enum class Share : int32_t { kNone, kWeights, kRows };

// What the scheduler hands to the other warps.
struct Tile {
  TileKind kind;
  Share share;
  int32_t iterations;  // stages to walk; both CTAs of a cluster walk as many
  int32_t expert;
  int32_t tile_n;
  int32_t valid_rows;
  int32_t keep;   // gate and up go to the context
  int32_t store;  // 0 when the pass was aborted
  int32_t ring_block;
  int32_t num_tokens;  // reduce
  int64_t first_row;   // GEMM: row in the schedule; reduce: token
  int32_t bumps[2];
};

struct Shared {
  uint8_t stages[kStages][kStageBytes];
  uint8_t staging[kConsumerWarps][4096];
  PipelineBarriers pipeline;
  uint64_t tile_full[kSlots], tile_loaded[kSlots], tile_stored[kSlots];
  uint64_t ticket_full[kSlots], ticket_empty[kSlots];
  int64_t tickets[kSlots];
  Tile tiles[kSlots];
  WaitContext context;
  int64_t only_moves_rows;
  uint32_t last;
};
constexpr uint32_t kSharedBytes = sizeof(Shared) + 1024;  // stages must lie on 1024 bytes
static_assert(kSharedBytes <= 227 * 1024, "shared memory of an SM");

// Takes tickets, waits for what tiles depend on, publishes them, and announces what the consumers have stored: the fence before an announcement
// waits for those stores, so it must not stand in a consumer's way. Whatever the scheduler waits for, it announces meanwhile.
struct Scheduler {
  const ForwardParams& params;
  Shared& shared;
  uint32_t rank;  // in the cluster
  uint32_t published = 0, announced = 0;

  __device__ void announce_stored() {
    if (announced == published) return;
    const uint32_t slot = announced % kSlots;
    if (!ptx::barrier_test(ptx::smem_address(&shared.tile_stored[slot]), announced / kSlots & 1)) return;
    const Tile& tile = shared.tiles[slot];
    // The second counter stands for rows pushed to peers.
    if (tile.bumps[1] >= 0 && params.shape.ep_size > 1) __threadfence_system();
    if (tile.bumps[0] >= 0) ptx::add_release_gpu(params.counters + tile.bumps[0], kTaskUnits);
    if (tile.bumps[1] >= 0) ptx::add_release_gpu(params.counters + tile.bumps[1], kTaskUnits);
    ++announced;
  }

  // Until the slot of the next tile is free.
  __device__ void wait_slot() {
    while (published - announced == kSlots) {
      announce_stored();
      __nanosleep(32);
    }
    const uint32_t slot = published % kSlots;
    ptx::barrier_wait(ptx::smem_address(&shared.tile_loaded[slot]), (published / kSlots & 1) ^ 1);
  }

  __device__ int32_t iterations_of(const TaskRecord& task) const {
    if (task.kind == TaskKind::kGemm1) return static_cast<int32_t>(params.shape.hidden / kStageK);
    if (task.kind == TaskKind::kGemm2) return static_cast<int32_t>(params.shape.intermediate / kStageK);
    return 0;
  }

  __device__ void publish(const Tile& tile) {
    wait_slot();
    const uint32_t slot = published % kSlots;
    shared.tiles[slot] = tile;
    ptx::barrier_arrive(ptx::smem_address(&shared.tile_full[slot]));
    ++published;
  }

  __device__ void publish_skip(int32_t iterations) {
    if (iterations == 0) return;
    Tile tile = {};
    tile.kind = TileKind::kSkip;
    tile.bumps[0] = tile.bumps[1] = -1;
    tile.iterations = iterations;
    publish(tile);
  }

  __device__ void publish_task(const TaskRecord& task, Share share) {
    const WaitContext& context = shared.context;
    const auto meanwhile = [this] { announce_stored(); };
    bool ready = !pass_aborted(context);
    if (ready && task.kind == TaskKind::kReduce) ready = wait_peers(context, kFlagDone, kPhaseDone, meanwhile);
    for (int i = 0; ready && i < 2; ++i) {
      if (task.targets[i] != 0) ready = wait_counter(context, params.counters + task.waits[i], task.targets[i], meanwhile);
    }
    // Rows that other SMs stored are read by bulk copies.
    ptx::fence_async_global();
    Tile tile;
    tile.kind = task.kind == TaskKind::kGemm1 ? TileKind::kGemm1 : task.kind == TaskKind::kGemm2 ? TileKind::kGemm2 : TileKind::kReduce;
    tile.share = share;
    tile.iterations = iterations_of(task);
    tile.expert = task.expert;
    tile.tile_n = task.tile_n;
    tile.valid_rows = task.valid_rows;
    // The first macrobatch is walked last: what it leaves is what the backward needs.
    tile.keep = params.gate_up != nullptr && task.macrobatch == 0;
    tile.store = ready;
    tile.ring_block = task.ring_block;
    tile.num_tokens = task.num_rows;
    tile.first_row = task.first_row;
    tile.bumps[0] = task.bumps[0];
    tile.bumps[1] = task.bumps[1];
    publish(tile);
  }

  // The pair of tickets (first, first + 1) of the cluster, or a number beyond the last.
  __device__ int64_t take_tickets(uint32_t turn) {
    const uint32_t at = turn % kSlots, turn_phase = turn / kSlots & 1;
    if (rank == 0) {
      // The tile of this turn must have a place before tickets are taken: a ticket in hand that waits for a place would idle at the end.
      wait_slot();
      const int64_t ticket = pass_aborted(shared.context) ? INT64_MAX : static_cast<int64_t>(atomicAdd(&params.state->compute_ticket, 2u));
      while (!ptx::barrier_test_cluster(ptx::smem_address(&shared.ticket_empty[at]), turn_phase ^ 1)) announce_stored();
      ptx::store_cluster(ptx::smem_address(&shared.tickets[at]), 1, ticket);
      ptx::barrier_arrive_cluster(ptx::smem_address(&shared.ticket_full[at]), 1);
      return ticket;
    }
    while (!ptx::barrier_test_cluster(ptx::smem_address(&shared.ticket_full[at]), turn_phase)) announce_stored();
    const int64_t ticket = *reinterpret_cast<volatile int64_t*>(&shared.tickets[at]);
    ptx::barrier_arrive_cluster(ptx::smem_address(&shared.ticket_empty[at]), 0);
    return ticket;
  }

  __device__ void run() {
    const int64_t total = params.totals->compute_tasks;
    for (uint32_t turn = 0;; ++turn) {
      const int64_t first = take_tickets(turn);
      if (first >= total) break;
      const int count = first + 1 < total ? 2 : 1;
      const TaskRecord tasks[2] = {params.compute_records[first], params.compute_records[first + count - 1]};
      if (count == 2 && tasks[0].kind == tasks[1].kind) {
        Share share = Share::kNone;
        if (tasks[0].kind != TaskKind::kReduce && tasks[0].expert == tasks[1].expert) {
          share = tasks[0].tile_n == tasks[1].tile_n ? Share::kWeights : tasks[0].block == tasks[1].block ? Share::kRows : Share::kNone;
        }
        publish_task(rank == 0 ? tasks[0] : tasks[1], share);
        continue;
      }
      // Tasks of two kinds may depend on each other, so they run one after the other, the idle CTA keeping step.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == count) break;
        if (i == static_cast<int>(rank)) {
          publish_task(tasks[i], Share::kNone);
        } else {
          publish_skip(iterations_of(tasks[i]));
        }
      }
    }
    const uint32_t tiles = published;
    Tile tile = {};
    tile.kind = TileKind::kExit;
    publish(tile);
    while (announced != tiles) announce_stored();
  }
};

}  // namespace mok
