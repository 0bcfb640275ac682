// How the warps of a megakernel's CTA come by their tiles: the slots through which the scheduler warp hands them over, the readers' side of the
// slots, and the scheduler's walk over the tickets, which is the same in every pass.
#pragma once

#include "../comm/sm90_wait.cuh"
#include "../mma/sm90_pipeline.cuh"
#include "sm90_records.cuh"

namespace mok {

constexpr int kSlots = 2;  // one tile in execution, one whose loads are under way

// Start of a megakernel's shared memory.
template <typename TileOfPass>
struct TileSlots {
  uint8_t stages[kStages][kStageBytes];
  uint8_t staging[kConsumerWarps][4096];
  PipelineBarriers pipeline;
  uint64_t tile_full[kSlots], tile_loaded[kSlots], tile_stored[kSlots];
  uint64_t ticket_full[kSlots], ticket_empty[kSlots];
  int64_t tickets[kSlots];
  TileOfPass tiles[kSlots];
  WaitContext context;
};

// Dynamic shared memory of a launch.
template <typename Shared>
constexpr uint32_t shared_bytes() {
  constexpr uint32_t kBytes = sizeof(Shared) + 1024;  // stages must lie on 1024 bytes
  static_assert(kBytes <= 227 * 1024, "shared memory of an SM");
  return kBytes;
}

// Next tile of a role, and the barriers by which the role says that it is through with a slot.
struct TileReader {
  uint32_t full, through;  // addresses of the slots' barriers
  uint32_t slot = 0, phase = 0;

  __device__ __forceinline__ uint32_t next() {
    ptx::barrier_wait(full + slot * 8, phase);
    return slot;
  }

  __device__ __forceinline__ bool ready() const { return ptx::barrier_test(full + slot * 8, phase); }

  __device__ __forceinline__ void advance(bool arrive) {
    if (arrive) ptx::barrier_arrive(through + slot * 8);
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Takes tickets, waits for what tiles depend on, publishes them, and announces what the consumers have stored: the fence before an announcement
// waits for those stores, so it must not stand in a consumer's way. Whatever the scheduler waits for, it announces meanwhile.
//
// `Pass` derives from this and has, of a task: iterations_of(task), stages to walk; share_of(task, other) of two tasks of one kind, what the
// cluster's tiles have in common; publish_task(task, share), which waits and publishes. And how it holds what it works on: `HeldRecord`, a
// record, copied or left in memory; kSlotPause, nanoseconds between looks at a slot in use.
template <typename Pass, typename Params, typename Shared, typename Tile>
struct Scheduler {
  const Params& params;
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
      if constexpr (Pass::kSlotPause > 0) __nanosleep(Pass::kSlotPause);
    }
    const uint32_t slot = published % kSlots;
    ptx::barrier_wait(ptx::smem_address(&shared.tile_loaded[slot]), (published / kSlots & 1) ^ 1);
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
    tile.kind = decltype(tile.kind)::kSkip;
    tile.bumps[0] = tile.bumps[1] = -1;
    tile.iterations = iterations;
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
    using Share = decltype(Tile::share);
    Pass& pass = static_cast<Pass&>(*this);
    const int64_t total = params.totals->compute_tasks;
    for (uint32_t turn = 0;; ++turn) {
      const int64_t first = take_tickets(turn);
      if (first >= total) break;
      const int count = first + 1 < total ? 2 : 1;
      // Each by its own address: of an array indexed by rank a copy would lie on the stack. Where there is no second task, both are the first.
      const int at = min(static_cast<int>(rank), count - 1);
      typename Pass::HeldRecord mine = params.compute_records[first + at];
      typename Pass::HeldRecord other = params.compute_records[first + count - 1 - at];
      // Tasks of two kinds may depend on each other, so they run one after the other, the idle CTA keeping step.
      const bool together = count == 2 && mine.kind == other.kind;
      if (!together && rank == 1) publish_skip(pass.iterations_of(other));
      if (static_cast<int>(rank) < count) pass.publish_task(mine, together ? Pass::share_of(mine, other) : Share::kNone);
      if (!together && rank == 0 && count == 2) publish_skip(pass.iterations_of(other));
    }
    const uint32_t tiles = published;
    Tile tile = {};
    tile.kind = decltype(tile.kind)::kExit;
    publish(tile);
    while (announced != tiles) announce_stored();
  }
};

}  // namespace mok
