// The backward megakernel for sm_90a, BF16: fetch of dy, the down projection's input gradient with the backward of SwiGLU, the gate/up projection's input
// gradient with push of dx, both weight gradients, and the final sums, in one launch; and the replay of the gate/up projection, which is all of a
// recompute.
//
// Built as the forward is: one CTA an SM in clusters of two, a producer, a scheduler and two communication warps, two consumer warpgroups that multiply a
// 128 x 256 tile. Weights are read as they lie (K along their rows in a dgrad), and so are both operands of a weight gradient.
#include <cuda_runtime.h>

#include "../comm/sm90_backward_dispatch.cuh"
#include "../comm/sm90_wait.cuh"
#include "../epilogue/sm90_push.cuh"
#include "../epilogue/sm90_reduce.cuh"
#include "../epilogue/sm90_swiglu_backward.cuh"
#include "../epilogue/sm90_weight_grad.cuh"
#include "../mma/sm90_operands.cuh"
#include "sm90_backward_enter.cuh"

namespace mok {
namespace {

static_assert(kBlockRows == 128 && kGateUpCols == 128 && kHiddenCols == 256 && kActivationGradCols == 256, "the tile of the kernel");
static_assert(kWgradRows == 128 && kWgradCols == 256, "the tile of the kernel");

constexpr int kThreads = 384;
constexpr uint32_t kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr int kSlots = 2;  // one tile in execution, one whose loads are under way

enum class TileKind : int32_t { kExit, kSkip, kReduce, kNothing, kZero, kGemm1, kDgrad2, kDgrad1, kWgrad2, kWgrad13 };
enum class Share : int32_t { kNone, kB, kA };

// What the scheduler hands to the other warps.
struct Tile {
  TileKind kind;
  Share share;
  int32_t iterations;  // stages to walk; both CTAs of a cluster walk as many
  int32_t expert;
  int32_t tile_m;
  int32_t tile_n;
  int32_t valid_rows;
  int32_t store;       // 0 when the pass was aborted
  int32_t ring_block;
  int32_t saved;       // rows of the first macrobatch: x, gate and up are the context's
  int32_t num_tokens;  // reduce
  int32_t continues, continued;
  int32_t second;      // weight gradients: of w2
  int32_t bumps[2];
  int64_t first_row;  // GEMM: row in the schedule; reduce: token
  int64_t grad;       // weight gradients
  float* scratch;
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
  uint32_t last;
};
constexpr uint32_t kSharedBytes = sizeof(Shared) + 1024;  // stages must lie on 1024 bytes
static_assert(kSharedBytes <= 227 * 1024, "shared memory of an SM");

__device__ __forceinline__ bool of_second_matrix(const BackwardRecord& task) {
  return task.kind == TaskKind::kWgrad2 || (task.kind == TaskKind::kZero && task.block == 0);
}

// Takes tickets, waits for what tiles depend on, publishes them, and announces what the consumers have stored, as in the forward.
struct Scheduler {
  const BackwardParams& params;
  Shared& shared;
  uint32_t rank;  // in the cluster
  uint32_t published = 0, announced = 0;
  int32_t waited_expert = -1, waited_macrobatch = -1;  // weight gradients of these have been waited for

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
    while (published - announced == kSlots) announce_stored();
    const uint32_t slot = published % kSlots;
    ptx::barrier_wait(ptx::smem_address(&shared.tile_loaded[slot]), (published / kSlots & 1) ^ 1);
  }

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
      const int64_t index = of_second_matrix(task) ? task.tile_n * tiles_m2 + task.tile_m : tiles_m2 * tiles_n2 + task.tile_n * tiles_m13 + task.tile_m;
      tile.scratch = params.scratch + index * kWgradRows * kWgradCols;
    }
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
      const int64_t ticket =
          pass_aborted(shared.context) ? INT64_MAX : static_cast<int64_t>(atomicAdd(&params.state->compute_ticket, 2u));
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

  __device__ static Share share_of(const BackwardRecord& one, const BackwardRecord& other) {
    const bool weights = one.kind == TaskKind::kWgrad2 || one.kind == TaskKind::kWgrad13;
    if (one.kind == TaskKind::kReduce || one.kind == TaskKind::kZero || one.expert != other.expert) return Share::kNone;
    if (one.tile_n == other.tile_n) return Share::kB;
    return (weights ? one.tile_m == other.tile_m : one.block == other.block) ? Share::kA : Share::kNone;
  }

  __device__ void run() {
    const int64_t total = params.totals->compute_tasks;
    for (uint32_t turn = 0;; ++turn) {
      const int64_t first = take_tickets(turn);
      if (first >= total) break;
      const int count = first + 1 < total ? 2 : 1;
      const BackwardRecord& one = params.compute_records[first];
      const BackwardRecord& other = params.compute_records[first + count - 1];
      if (count == 2 && one.kind == other.kind) {
        publish_task(rank == 0 ? one : other, share_of(one, other));
        continue;
      }
      // Tasks of two kinds may depend on each other, so they run one after the other, the idle CTA keeping step.
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const BackwardRecord& task = i == 0 ? one : other;
        if (i == static_cast<int>(rank)) {
          publish_task(task, Share::kNone);
        } else {
          publish_skip(iterations_of(task));
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

// Next tile of a role, and the barriers by which the role says that it is through with a slot.
struct TileReader {
  uint32_t full, through;  // addresses of the slots' barriers
  uint32_t slot = 0, phase = 0;

  __device__ __forceinline__ uint32_t next() {
    ptx::barrier_wait(full + slot * 8, phase);
    return slot;
  }

  __device__ __forceinline__ void advance(bool arrive) {
    if (arrive) ptx::barrier_arrive(through + slot * 8);
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Where the boxes of an operand lie: box i of stage k at (column + i * box_column + k * stage_column, row + i * box_row + k * stage_row).
struct Operand {
  const CUtensorMap* map;
  int32_t column, row;
  int32_t box_column, box_row, stage_column, stage_row;

  __device__ __forceinline__ void load(uint32_t base, uint32_t barrier, int box, bool multicast) const {
    const int32_t at_column = column + box * box_column, at_row = row + box * box_row;
    if (multicast) {
      ptx::load_tile_multicast(base + box * kBoxBytes, map, barrier, at_column, at_row, 3);
    } else {
      ptx::load_tile(base + box * kBoxBytes, map, barrier, at_column, at_row);
    }
  }

  __device__ __forceinline__ void advance() {
    column += stage_column;
    row += stage_row;
  }
};

// K along the columns of a row-major matrix, from row `row` on; K along its rows, from column `column` on.
__device__ __forceinline__ Operand operand_k(const CUtensorMap* map, int32_t row) { return {map, 0, row, 0, 64, kStageK, 0}; }
__device__ __forceinline__ Operand operand_mn(const CUtensorMap* map, int32_t column, int32_t row) { return {map, column, row, 64, 0, 0, kStageK}; }

__device__ __forceinline__ void run_producer(const BackwardParams& params, Shared& shared, uint32_t cluster_rank) {
  const uint32_t stages = ptx::smem_address(shared.stages);
  const uint32_t full = ptx::smem_address(shared.pipeline.full), empty = ptx::smem_address(shared.pipeline.empty);
  TileReader reader{ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_loaded)};
  PipelineState at;
  const CUtensorMap* fenced[2] = {nullptr, nullptr};
  const int32_t intermediate = static_cast<int32_t>(params.shape.intermediate);
  while (true) {
    const Tile& tile = shared.tiles[reader.next()];
    const TileKind kind = tile.kind;
    if (kind == TileKind::kExit) return;
    const int iterations = tile.iterations;
    if (kind == TileKind::kSkip) {
      for (int k = 0; k < iterations; ++k) {
        ptx::barrier_wait(empty + at.stage * 8, at.phase ^ 1);
        ptx::barrier_arrive(full + at.stage * 8);
        at.advance();
      }
    } else if (iterations > 0) {
      Operand a, b;
      int32_t far_row = 0;  // gate/up tiles: from the gate rows' second box to the up rows
      const int32_t ring_row = tile.ring_block * static_cast<int32_t>(kBlockRows);
      if (kind == TileKind::kWgrad2 || kind == TileKind::kWgrad13) {
        const bool second = kind == TileKind::kWgrad2;
        a = operand_mn(second ? &params.map_dy : &params.map_d_gate_up, tile.tile_m * static_cast<int32_t>(kWgradRows), ring_row);
        b = operand_mn(second ? &params.map_activation : tile.saved ? &params.map_saved_x : &params.map_x,
                       tile.tile_n * static_cast<int32_t>(kWgradCols), ring_row);
      } else {
        const bool down = kind == TileKind::kDgrad2;
        const CUtensorMap* weights = params.weight_maps + (down ? params.shape.num_local_experts : 0) + tile.expert;
        if (fenced[down] != weights) {
          // The map was written by an earlier kernel's ordinary stores.
          ptx::tensor_map_acquire(weights);
          fenced[down] = weights;
        }
        a = operand_k(down ? &params.map_dy : kind == TileKind::kDgrad1 ? &params.map_d_gate_up : &params.map_x, ring_row);
        if (kind == TileKind::kGemm1) {
          b = operand_k(weights, tile.tile_n * static_cast<int32_t>(kGateUpCols));
          far_row = intermediate - 128;
        } else {
          b = operand_mn(weights, tile.tile_n * 256, 0);
        }
      }
      ptx::fence_async_global();
      const Share share = tile.share;
      for (int k = 0; k < iterations; ++k) {
        ptx::barrier_wait(empty + at.stage * 8, at.phase ^ 1);
        const uint32_t barrier = full + at.stage * 8;
        const uint32_t base = stages + at.stage * kStageBytes;
        ptx::barrier_expect_bytes(barrier, kStageBytes);
        const bool share_a = share == Share::kA, share_b = share == Share::kB;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          if (!share_a || box == static_cast<int>(cluster_rank)) a.load(base, barrier, box, share_a);
        }
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          Operand shifted = b;
          if (box >= 2) shifted.row += far_row;
          if (!share_b || box / 2 == static_cast<int>(cluster_rank)) shifted.load(base + kABytes, barrier, box, share_b);
        }
        a.advance();
        b.advance();
        at.advance();
      }
    }
    reader.advance(true);
  }
}

// ---- consumers -----------------------------------------------------------------------------------------------------------------------------

// The warp's 16 rows of gate and up, rounded, half a tile at a time through 4 KB of shared memory. Pointer: the warp's first row, first column.
__device__ __forceinline__ void store_gate_up(float (&accumulators)[128], uint32_t staging, __nv_bfloat16* target, int64_t inner, int32_t columns,
                                              uint32_t lane) {
  const auto chunk_at = [&](uint32_t row, uint32_t chunk) { return staging + row * 256 + ((chunk ^ (row & 7)) << 4); };
  const uint32_t matrix = lane >> 3, matrix_row = (matrix & 1) * 8 + (lane & 7), matrix_chunk = matrix >> 1;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    if (static_cast<int32_t>(half) * 64 >= columns) break;
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
#pragma unroll
      for (uint32_t j = 0; j < 8; j += 2) {
        const float* a = accumulators + 64 * part + 4 * (8 * half + j);
        ptx::store_matrices(chunk_at(matrix_row, 8 * part + j + matrix_chunk), pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]),
                            pack_bf16(a[6], a[7]));
      }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = 4 * i + (lane >> 3), chunk = lane & 7;
      __nv_bfloat16* at = target + row * 2 * inner + half * 64 + chunk * 8;
      ptx::store_16(at, ptx::load_shared_16(chunk_at(row, chunk)));
      ptx::store_16(at + inner, ptx::load_shared_16(chunk_at(row, 8 + chunk)));
    }
    __syncwarp();
  }
}

// Gate and up of the warp's 16 padding rows are zero.
__device__ __forceinline__ void clear_gate_up(const BackwardParams& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  const int64_t inner = params.shape.intermediate, column = tile.tile_n * kGateUpCols + lane % 16 * 8;
  if (column >= inner) return;
  for (int64_t row = tile.ring_block * kBlockRows + warp * 16 + lane / 16, i = 0; i < 8; ++i, row += 2) {
    __nv_bfloat16* target = params.gate_up + row_offset(row, 2 * inner) + column;
    ptx::store_16(target, make_uint4(0, 0, 0, 0));
    ptx::store_16(target + inner, make_uint4(0, 0, 0, 0));
  }
}

// Hides from the compiler that a value is the same for all tiles: what epilogues compute from it would be kept in registers across the products.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

struct ConsumerPipeline {
  uint32_t stages, full, empty;
  PipelineState at;
  uint32_t warpgroup, lane;

  template <Major kMajorA, Major kMajorB, bool kAccumulate = false>
  __device__ __forceinline__ void multiply(float (&accumulators)[128], int iterations) {
    multiply_operands<kMajorA, kMajorB, kAccumulate>(accumulators, stages, full, empty, at, iterations, warpgroup, lane);
  }
};

__device__ __forceinline__ void run_dgrad2(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging, uint32_t warp,
                                           uint32_t lane) {
  const int64_t inner = params.shape.intermediate, ring_row = tile.ring_block * kBlockRows + warp * 16, column = tile.tile_n * kActivationGradCols;
  SwigluBackwardTarget target;
  target.gate = (tile.saved ? params.saved_gate_up : params.gate_up) + row_offset(ring_row, 2 * inner) + column;
  target.d_gate = params.d_gate_up + row_offset(ring_row, 2 * inner) + column;
  target.activation = params.activation + row_offset(ring_row, inner) + column;
  target.inner = inner;
  target.columns = static_cast<int32_t>(inner - column);
  const float weight = lane < 16 ? __ldcg(params.weight_ring + ring_row + lane) : 0.0f;
  const GateUpChunk first = load_gate_up(target, 0, lane), second = load_gate_up(target, 1, lane);
  float accumulators[128];
  pipeline.multiply<kMajorK, kMajorMn>(accumulators, tile.iterations);
  staging = opaque(staging);
  lane = opaque(lane);
  if (!tile.store) return;
  const float d_weight = store_swiglu_backward(accumulators, staging, target, weight, first, second, lane);
  const int64_t tiles = ceil_div(inner, kActivationGradCols);
  if (lane < 16) params.partial_ring[(ring_row + lane) * tiles + tile.tile_n] = d_weight;
}

__device__ __forceinline__ void run_dgrad1(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging, uint32_t warp,
                                           uint32_t lane) {
  int64_t target = 0, weight_target = 0;
  float d_weight = 0.0f;
  if (lane < 16 && tile.store) {
    const int64_t row = tile.first_row + warp * 16 + lane;
    const int32_t rank = params.row_source_rank[row];
    if (rank >= 0) {
      const int64_t slot = params.row_source_slot[row];
      target = params.peers.combine[rank] + (row_offset(slot, params.shape.hidden) + tile.tile_n * kHiddenCols) * 2;
      if (tile.tile_n == 0) {
        weight_target = params.peers.d_router_weights[rank] + slot * 4;
        const int32_t tiles = static_cast<int32_t>(ceil_div(params.shape.intermediate, kActivationGradCols));
        const float* partials = params.partial_ring + (tile.ring_block * kBlockRows + warp * 16 + lane) * tiles;
        d_weight = __ldcg(partials);
        for (int32_t i = 1; i < tiles; ++i) d_weight = __fadd_rn(d_weight, __ldcg(partials + i));
      }
    }
  }
  float accumulators[128];
  pipeline.multiply<kMajorK, kMajorMn>(accumulators, tile.iterations);
  staging = opaque(staging);
  lane = opaque(lane);
  push_rows(accumulators, staging, target, static_cast<int32_t>(params.shape.hidden - tile.tile_n * kHiddenCols), lane);
  if (weight_target != 0) *reinterpret_cast<float*>(weight_target) = d_weight;
}

__device__ __forceinline__ void run_gemm1(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging, uint32_t warp,
                                          uint32_t lane) {
  float accumulators[128];
  pipeline.multiply<kMajorK, kMajorK>(accumulators, tile.iterations);
  staging = opaque(staging);
  lane = opaque(lane);
  if (!tile.store) return;
  const int64_t inner = params.shape.intermediate, ring_row = tile.ring_block * kBlockRows + warp * 16, column = tile.tile_n * kGateUpCols;
  store_gate_up(accumulators, staging, params.gate_up + row_offset(ring_row, 2 * inner) + column, inner, static_cast<int32_t>(inner - column), lane);
}

__device__ __forceinline__ void run_wgrad(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging, uint32_t warp,
                                          uint32_t lane) {
  float accumulators[128];
  if (tile.continues && tile.store) {
    load_sum(accumulators, tile.scratch, warp, lane);
  } else {
#pragma unroll
    for (int i = 0; i < 128; ++i) accumulators[i] = 0.0f;
  }
  pipeline.multiply<kMajorMn, kMajorMn, true>(accumulators, tile.iterations);
  staging = opaque(staging);
  lane = opaque(lane);
  if (!tile.store) return;
  if (tile.continued) {
    store_sum(accumulators, tile.scratch, warp, lane);
    return;
  }
  const int64_t pitch = tile.second ? params.shape.intermediate : params.shape.hidden, column = tile.tile_n * kWgradCols;
  const int64_t first = row_offset(tile.tile_m * kWgradRows + warp * 16, pitch) + column;
  store_weight_grad(accumulators, staging, tile.grad, first, pitch, static_cast<int32_t>(pitch - column), lane);
}

__device__ __forceinline__ void run_zero(const BackwardParams& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  if (!tile.store || tile.valid_rows <= static_cast<int32_t>(warp) * 16) return;
  const int64_t pitch = tile.second ? params.shape.intermediate : params.shape.hidden, column = tile.tile_n * kWgradCols;
  clear_weight_grad(tile.grad, row_offset(tile.tile_m * kWgradRows + warp * 16, pitch) + column, pitch, static_cast<int32_t>(pitch - column), lane);
}

__device__ __forceinline__ void run_reduce(const BackwardParams& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  if (!tile.store) return;
  const int64_t end = tile.first_row + tile.num_tokens;
  reduce_tokens(params, tile.first_row + warp, end, kConsumerWarps, lane);
  const float* weights = reinterpret_cast<const float*>(params.peers.d_router_weights[params.shape.rank]);
  const int64_t last = end * params.topk;
  for (int64_t slot = tile.first_row * params.topk + warp * 32 + lane; slot < last; slot += kConsumerWarps * 32) {
    params.d_router_weights[slot] = params.topk_experts[slot] >= 0 ? __ldcg(weights + slot) : 0.0f;
  }
}

__device__ __forceinline__ void run_consumer(const BackwardParams& params, Shared& shared, uint32_t warp, uint32_t lane) {
  const uint32_t staging = ptx::smem_address(shared.staging[warp]);
  ConsumerPipeline pipeline{ptx::smem_address(shared.stages), ptx::smem_address(shared.pipeline.full), ptx::smem_address(shared.pipeline.empty),
                            {}, warp / 4, lane};
  TileReader reader{ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_stored)};
  while (true) {
    const Tile& tile = shared.tiles[reader.next()];
    const TileKind kind = tile.kind;
    if (kind == TileKind::kExit) return;
    if (kind == TileKind::kReduce) {
      run_reduce(params, tile, warp, lane);
    } else if (kind == TileKind::kZero) {
      run_zero(params, tile, warp, lane);
    } else if (kind == TileKind::kSkip) {
      drain_stages(pipeline.full, pipeline.empty, pipeline.at, tile.iterations, lane);
    } else if (kind != TileKind::kNothing) {
      if (tile.valid_rows <= static_cast<int32_t>(pipeline.warpgroup) * 64) {
        // All rows of this half are padding, which nobody reads but who looks into a context; or the weight has no such rows.
        drain_stages(pipeline.full, pipeline.empty, pipeline.at, tile.iterations, lane);
        if (kind == TileKind::kGemm1 && tile.store) clear_gate_up(params, tile, warp, lane);
      } else if (kind == TileKind::kDgrad2) {
        run_dgrad2(params, tile, pipeline, staging, warp, lane);
      } else if (kind == TileKind::kDgrad1) {
        run_dgrad1(params, tile, pipeline, staging, warp, lane);
      } else if (kind == TileKind::kGemm1) {
        run_gemm1(params, tile, pipeline, staging, warp, lane);
      } else {
        run_wgrad(params, tile, pipeline, staging, warp, lane);
      }
      // What was stored is read by bulk copies of other SMs.
      ptx::fence_async_global();
    }
    __syncwarp();
    reader.advance(lane == 0);
  }
}

// The last CTA waits for the peers, clears what the pass has counted, and makes the next call's number current.
__device__ __forceinline__ void leave_pass(const BackwardParams& params, Shared& shared) {
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t exited = atomicAdd(&params.state->exited, 1u);
    __threadfence();
    shared.last = exited + 1 == gridDim.x;
    if (shared.last && !pass_aborted(shared.context)) wait_peers(shared.context, kFlagDone, kPhaseDone);
  }
  __syncthreads();
  if (!shared.last) return;
  Plan plan;
  plan.shape = params.shape;
  const int64_t num_blocks = params.totals->num_blocks;
  for (int64_t block = threadIdx.x; block < num_blocks; block += kThreads) {
    params.counters[plan.dispatched(block)] = 0;
    params.counters[plan.gemm1_done(block)] = 0;
    params.counters[plan.dispatched_dy(block)] = 0;
    params.counters[plan.dgrad2_done(block)] = 0;
    params.counters[plan.dgrad1_done(block)] = 0;
  }
  for (int64_t expert = threadIdx.x; expert < params.shape.num_local_experts; expert += kThreads) params.counters[plan.expert_wgrad_done(expert)] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    params.counters[plan.transfers_done()] = 0;
    params.state->compute_ticket = 0;
    params.state->comm_ticket = 0;
    params.state->first_ticket = 0;
    params.state->exited = 0;
    params.state->call += 1;
  }
}

__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t cluster_rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(ptx::smem_address(&shared.pipeline.full[i]), 1);
      ptx::barrier_init(ptx::smem_address(&shared.pipeline.empty[i]), kConsumerWarps * kClusterSize);
    }
    for (int i = 0; i < kSlots; ++i) {
      ptx::barrier_init(ptx::smem_address(&shared.tile_full[i]), 1);
      ptx::barrier_init(ptx::smem_address(&shared.tile_loaded[i]), 1);
      ptx::barrier_init(ptx::smem_address(&shared.tile_stored[i]), kConsumerWarps);
      ptx::barrier_init(ptx::smem_address(&shared.ticket_full[i]), 1);
      ptx::barrier_init(ptx::smem_address(&shared.ticket_empty[i]), 1);
    }
    ptx::fence_barrier_init();
    shared.context = {params.state,          params.fault,          &params.peers, params.shape.rank, params.shape.ep_size,
                      params.state->call + 1, params.timeout_nanoseconds};
  }
  __syncthreads();
  ptx::cluster_sync();
  help_backward_opening(params, shared.context, lane);

  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) run_producer(params, shared, cluster_rank);
    } else if (warp == 1) {
      if (lane == 0) Scheduler{params, shared, cluster_rank}.run();
    } else {
      run_backward_communication(params, shared.context, lane);
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    run_consumer(params, shared, warp - 4, lane);
  }
  __syncwarp();
  __syncthreads();
  // A CTA must not leave while its partner may still arrive at its barriers.
  ptx::cluster_sync();
  leave_pass(params, shared);
}

int launch_backward(const BackwardCall& call, Pass pass, cudaStream_t stream) {
  static const int kSms = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  // An attribute of the function on the current device.
  cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  BackwardParams params;
  const int code = enter_backward(call, pass, kSms, stream, &params);
  if (code != 0) return code;
  const int grid = (kSms - static_cast<int>(call.sm_reserve)) / kClusterSize * kClusterSize;
  if (grid <= 0) return cudaErrorInvalidConfiguration;
  backward_kernel<<<grid, kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace
}  // namespace mok

extern "C" int mok_sm90_backward(const mok::BackwardCall* call, void* stream) {
  return mok::launch_backward(*call, mok::Pass::kBackward, static_cast<cudaStream_t>(stream));
}

extern "C" int mok_sm90_recompute(const mok::BackwardCall* call, void* stream) {
  return mok::launch_backward(*call, mok::Pass::kRecompute, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t mok_backward_call_bytes() { return sizeof(mok::BackwardCall); }

extern "C" int64_t mok_backward_scratch_bytes(int64_t hidden, int64_t intermediate) {
  using namespace mok;
  return (ceil_div(hidden, kWgradRows) * ceil_div(intermediate, kWgradCols) + ceil_div(2 * intermediate, kWgradRows) * ceil_div(hidden, kWgradCols)) *
         kWgradRows * kWgradCols * static_cast<int64_t>(sizeof(float));
}

extern "C" int64_t mok_backward_record_bytes(int64_t capacity_blocks, int64_t macrobatch_blocks, int64_t max_tokens, int64_t hidden, int64_t intermediate,
                                             int64_t num_local_experts) {
  return mok::backward_table(capacity_blocks, macrobatch_blocks, max_tokens, hidden, intermediate, num_local_experts).bytes;
}
