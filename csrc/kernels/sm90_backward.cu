// The backward megakernel for sm_90a, BF16: fetch of dy, the down projection's input gradient with the backward of SwiGLU, the gate/up
// projection's input gradient with push of dx, both weight gradients, and the final sums, in one launch; and the replay of the gate/up
// projection, which is all of a recompute.
//
// Built as the forward is: one CTA an SM in clusters of two, a producer, a scheduler and two communication warps, two consumer warpgroups that
// multiply a 128 x 256 tile. Weights are read as they lie (K along their rows in a dgrad), and so are both operands of a weight gradient.
#include <cuda_runtime.h>

#include "../comm/sm90_backward_dispatch.cuh"
#include "sm90_backward_consumer.cuh"
#include "sm90_backward_enter.cuh"
#include "sm90_backward_scheduler.cuh"
#include "sm90_launch.h"
#include "sm90_pass.cuh"

namespace mok {
namespace {

static_assert(kBlockRows == 128 && kGateUpCols == 128 && kHiddenCols == 256 && kActivationGradCols == 256, "the tile of the kernel");
static_assert(kWgradRows == 128 && kWgradCols == 256, "the tile of the kernel");

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
__device__ __forceinline__ Operand operand_mn(const CUtensorMap* map, int32_t column, int32_t row) {
  return {map, column, row, 64, 0, 0, kStageK};
}

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
      skip_stages(full, empty, at, iterations);
    } else if (iterations > 0) {
      Operand a, b;
      int32_t far_row = 0;  // gate/up tiles: from the gate rows' second box to the up rows
      const int32_t ring_row = tile.ring_block * static_cast<int32_t>(kBlockRows);
      if (kind == TileKind::kWgrad2 || kind == TileKind::kWgrad13) {
        const bool second = kind == TileKind::kWgrad2;
        a = operand_mn(second ? &params.map_dy : &params.map_d_gate_up, tile.tile_m * static_cast<int32_t>(kWgradRows), ring_row);
        b = operand_mn(second       ? &params.map_activation
                       : tile.saved ? &params.map_saved_x
                                    : &params.map_x,
                       tile.tile_n * static_cast<int32_t>(kWgradCols), ring_row);
      } else {
        const bool down = kind == TileKind::kDgrad2;
        const CUtensorMap* weights = params.weight_maps + (down ? params.shape.num_local_experts : 0) + tile.expert;
        fence_weight_map(fenced, down, weights);
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

__device__ __forceinline__ void clear_counters(const BackwardParams& params, const Plan& plan) {
  const int64_t num_blocks = params.totals->num_blocks;
  for (int64_t block = threadIdx.x; block < num_blocks; block += kThreads) {
    params.counters[plan.dispatched(block)] = 0;
    params.counters[plan.gemm1_done(block)] = 0;
    params.counters[plan.dispatched_dy(block)] = 0;
    params.counters[plan.dgrad2_done(block)] = 0;
    params.counters[plan.dgrad1_done(block)] = 0;
  }
  for (int64_t expert = threadIdx.x; expert < params.shape.num_local_experts; expert += kThreads)
    params.counters[plan.expert_wgrad_done(expert)] = 0;
}

__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t cluster_rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    init_barriers<kConsumerWarps * 32>(ptx::smem_address(shared.pipeline.full), ptx::smem_address(shared.pipeline.empty),
                                       ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_loaded),
                                       ptx::smem_address(shared.tile_stored), ptx::smem_address(shared.ticket_full),
                                       ptx::smem_address(shared.ticket_empty));
  }
  start_pass(params, shared);
  help_opening(params, shared.context, lane);

  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) run_producer(params, shared, cluster_rank);
    } else if (warp == 1) {
      if (lane == 0) BackwardScheduler{{params, shared, cluster_rank}}.run();
    } else {
      run_communication<const BackwardRecord&>(params, shared.context, lane);
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    run_consumer(params, shared, warp - 4, lane);
  }
  leave_pass(params, shared, [&](const Plan& plan) { clear_counters(params, plan); });
}

int launch_backward(const BackwardCall& call, Pass pass, cudaStream_t stream) {
  int sms = 0;
  BackwardParams params;
  int code = prepare_device<backward_kernel, kSharedBytes>(&sms);
  if (code == cudaSuccess) code = enter_backward(call, pass, sms, stream, &params);
  if (code != cudaSuccess) return code;
  const int grid = (sms - static_cast<int>(call.sm_reserve)) / kClusterSize * kClusterSize;
  if (grid <= 0) return cudaErrorInvalidConfiguration;
  return launch_chained(backward_kernel, grid, kThreads, kSharedBytes, stream, params);
}

}  // namespace

int load_backward_kernels() {
  int sms = 0;
  cudaFuncAttributes attributes;
  int code = prepare_device<backward_kernel, kSharedBytes>(&sms);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, backward_kernel);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, backward_enter_kernel);
  return code;
}

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
  return (ceil_div(hidden, kWgradRows) * ceil_div(intermediate, kWgradCols) +
          ceil_div(2 * intermediate, kWgradRows) * ceil_div(hidden, kWgradCols)) *
         kWgradRows * kWgradCols * static_cast<int64_t>(sizeof(float));
}

extern "C" int64_t mok_backward_record_bytes(int64_t capacity_blocks, int64_t macrobatch_blocks, int64_t max_tokens, int64_t hidden,
                                             int64_t intermediate, int64_t num_local_experts) {
  return mok::backward_table(capacity_blocks, macrobatch_blocks, max_tokens, hidden, intermediate, num_local_experts).bytes;
}
