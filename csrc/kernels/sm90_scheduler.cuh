// The forward megakernel's shared memory, and what its scheduler warp makes of a task: waits, and a tile for the other warps.
#pragma once

#include "sm90_params.cuh"
#include "sm90_tickets.cuh"

namespace mok {

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

struct Shared : TileSlots<Tile> {
  static constexpr bool kCountsArrivals = true;  // of clusters, see `comm_clusters`
  int64_t only_moves_rows;
  uint32_t last;
};
constexpr uint32_t kSharedBytes = shared_bytes<Shared>();

struct ForwardScheduler : Scheduler<ForwardScheduler, ForwardParams, Shared, Tile> {
  using HeldRecord = const TaskRecord;  // 64 bytes, read at once
  static constexpr unsigned kSlotPause = 32;

  __device__ int32_t iterations_of(const TaskRecord& task) const {
    if (task.kind == TaskKind::kGemm1) return static_cast<int32_t>(params.shape.hidden / kStageK);
    if (task.kind == TaskKind::kGemm2) return static_cast<int32_t>(params.shape.intermediate / kStageK);
    return 0;
  }

  __device__ static Share share_of(const TaskRecord& one, const TaskRecord& other) {
    if (one.kind == TaskKind::kReduce || one.expert != other.expert) return Share::kNone;
    return one.tile_n == other.tile_n ? Share::kWeights : one.block == other.block ? Share::kRows : Share::kNone;
  }

  __device__ void publish_task(const TaskRecord& task, Share share) {
    const WaitContext& context = shared.context;
    const auto meanwhile = [this] { announce_stored(); };
    bool ready = !pass_aborted(context);
    if (ready && task.kind == TaskKind::kReduce && params.shape.ep_size > 1) ready = wait_peers(context, kFlagDone, kPhaseDone, meanwhile);
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
};

}  // namespace mok
