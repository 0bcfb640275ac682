// What the warps of the backward megakernel hand to each other, and what its scheduler warp makes of a task: waits, and a tile.
#pragma once

#include "../epilogue/sm90_weight_grad.cuh"
#include "../mma/sm90_operands.cuh"
#include "sm90_backward_params.cuh"
#include "sm90_tickets.cuh"

namespace mok {
namespace {

enum class TileKind : int32_t { kExit, kSkip, kReduce, kNothing, kZero, kGemm1, kDgrad2, kDgrad1, kWgrad2, kWgrad13 };
enum class Share : int32_t { kNone, kB, kA };

// What the scheduler hands to the other warps.
struct Tile {
  TileKind kind;
  Share share;
  int32_t iterations;  // stages to walk; both CTAs of a cluster walk as many
  int32_t last_steps;  // weight gradients: of 16 rows each, in the last stage
  int32_t expert;
  int32_t tile_m;
  int32_t tile_n;
  int32_t valid_rows;
  int32_t store;  // 0 when the pass was aborted
  int32_t ring_block;
  int32_t saved;       // rows of the first macrobatch: x, gate and up are the context's
  int32_t num_tokens;  // reduce
  int32_t continues, continued;
  int32_t second;  // weight gradients: of w2
  int32_t bumps[2];
  int64_t first_row;  // GEMM: row in the schedule; reduce: token
  int64_t grad;       // weight gradients
  float* scratch;
};

struct Shared : TileSlots<Tile> {
  static constexpr bool kCountsArrivals = false;
  uint32_t last;
};
constexpr uint32_t kSharedBytes = shared_bytes<Shared>();

__device__ __forceinline__ bool of_second_matrix(const BackwardRecord& task) {
  return task.kind == TaskKind::kWgrad2 || (task.kind == TaskKind::kZero && task.block == 0);
}

struct BackwardScheduler : Scheduler<BackwardScheduler, BackwardParams, Shared, Tile> {
  // Left in memory: two records would take most of the thread's registers.
  using HeldRecord = const BackwardRecord&;
  static constexpr unsigned kSlotPause = 0;

  int32_t waited_expert = -1, waited_macrobatch = -1;  // weight gradients of these have been waited for

  __device__ int64_t grad_of(const BackwardRecord& task) const {
    return of_second_matrix(task) ? params.grads2[task.expert] : params.grads13[task.expert];
  }

  __device__ int32_t iterations_of(const BackwardRecord& task) const {
    switch (task.kind) {
      case TaskKind::kGemm1:
      case TaskKind::kDgrad2:
        return static_cast<int32_t>(params.shape.hidden / kStageK);
      case TaskKind::kDgrad1:
        return static_cast<int32_t>(2 * params.shape.intermediate / kStageK);
      case TaskKind::kWgrad2:
      case TaskKind::kWgrad13:
        return grad_of(task) == 0 ? 0 : task.stages;
      default:
        return 0;
    }
  }

  __device__ bool wait_for(const BackwardRecord& task) {
    const WaitContext& context = shared.context;
    const auto meanwhile = [this] { announce_stored(); };
    if (pass_aborted(context)) return false;
    if (task.kind == TaskKind::kReduce) return wait_peers(context, kFlagDone, kPhaseDone, meanwhile);
    const bool wgrad = task.kind == TaskKind::kWgrad2 || task.kind == TaskKind::kWgrad13;
    // All tiles of an expert in a macrobatch wait for the same counters, which never fall within a pass.
    if (wgrad && task.expert == waited_expert && task.macrobatch == waited_macrobatch) return true;
    for (int i = 0; i < kBackwardWaits; ++i) {
      if (task.targets[i] == 0) continue;
      for (uint32_t j = 0; j < task.counts[i]; ++j) {
        if (!wait_counter(context, params.counters + task.waits[i] + j, task.targets[i], meanwhile)) return false;
      }
    }
    if (wgrad) {
      waited_expert = task.expert;
      waited_macrobatch = task.macrobatch;
    }
    return true;
  }

  __device__ static TileKind kind_of(const BackwardRecord& task, int64_t grad) {
    switch (task.kind) {
      case TaskKind::kGemm1:
        return TileKind::kGemm1;
      case TaskKind::kDgrad2:
        return TileKind::kDgrad2;
      case TaskKind::kDgrad1:
        return TileKind::kDgrad1;
      case TaskKind::kWgrad2:
        return grad == 0 ? TileKind::kNothing : TileKind::kWgrad2;
      case TaskKind::kWgrad13:
        return grad == 0 ? TileKind::kNothing : TileKind::kWgrad13;
      case TaskKind::kZero:
        return grad & kGradOverwrite ? TileKind::kZero : TileKind::kNothing;
      default:
        return TileKind::kReduce;
    }
  }

  __device__ void publish_task(const BackwardRecord& task, Share share) {
    Tile tile;
    tile.store = wait_for(task);
    // Rows that other SMs stored are read by bulk copies.
    ptx::fence_async_global();
    const bool weights = task.kind == TaskKind::kWgrad2 || task.kind == TaskKind::kWgrad13 || task.kind == TaskKind::kZero;
    tile.second = of_second_matrix(task);
    tile.grad = weights ? grad_of(task) : 0;
    tile.kind = kind_of(task, tile.grad);
    tile.share = share;
    tile.iterations = iterations_of(task);
    tile.last_steps = task.last_steps;
    tile.expert = task.expert;
    tile.tile_m = task.tile_m;
    tile.tile_n = task.tile_n;
    tile.valid_rows = task.valid_rows;
    tile.ring_block = task.ring_block;
    tile.saved = task.macrobatch == 0;
    tile.num_tokens = task.num_rows;
    tile.continues = task.continues;
    tile.continued = task.continued;
    tile.first_row = task.first_row;
    if (weights) {
      const int64_t tiles_m2 = ceil_div(params.shape.hidden, kWgradRows), tiles_n2 = ceil_div(params.shape.intermediate, kWgradCols);
      const int64_t tiles_m13 = ceil_div(2 * params.shape.intermediate, kWgradRows);
      const int64_t index =
          of_second_matrix(task) ? task.tile_n * tiles_m2 + task.tile_m : tiles_m2 * tiles_n2 + task.tile_n * tiles_m13 + task.tile_m;
      tile.scratch = params.scratch + index * kWgradRows * kWgradCols;
    }
    tile.bumps[0] = task.bumps[0];
    tile.bumps[1] = task.bumps[1];
    publish(tile);
  }

  __device__ static Share share_of(const BackwardRecord& one, const BackwardRecord& other) {
    const bool weights = one.kind == TaskKind::kWgrad2 || one.kind == TaskKind::kWgrad13;
    if (one.kind == TaskKind::kReduce || one.kind == TaskKind::kZero || one.expert != other.expert) return Share::kNone;
    if (one.tile_n == other.tile_n) return Share::kB;
    return (weights ? one.tile_m == other.tile_m : one.block == other.block) ? Share::kA : Share::kNone;
  }
};

}  // namespace
}  // namespace mok
