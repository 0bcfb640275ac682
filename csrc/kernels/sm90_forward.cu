// The forward megakernel for sm_90a, BF16: dispatch, gate/up GEMM with SwiGLU, down GEMM with push combine, and the final sum, in one launch.
//
// Persistent, one CTA an SM, in clusters of two. Warpgroup 0 holds the producer warp (bulk tensor loads), the scheduler warp (tickets, waiting
// for counters, announcing) and two communication warps; warpgroups 1 and 2 multiply: together a 128 x 256 tile. A cluster takes two
// neighbouring tickets; where their tiles share rows or weights, each CTA loads half of what is shared for both.
#include <cuda_runtime.h>

#include "../comm/sm90_dispatch.cuh"
#include "../comm/sm90_wait.cuh"
#include "../epilogue/sm90_push.cuh"
#include "../epilogue/sm90_reduce.cuh"
#include "../epilogue/sm90_swiglu.cuh"
#include "../mma/sm90_pipeline.cuh"
#include "sm90_arguments.cuh"
#include "sm90_enter.cuh"
#include "sm90_launch.h"
#include "sm90_padding.cuh"
#include "sm90_params.cuh"
#include "sm90_pass.cuh"
#include "sm90_scheduler.cuh"
#include "sm90_tensor_map.h"

namespace mok {
namespace {

static_assert(kBlockRows == 128 && kGateUpCols == 128 && kHiddenCols == 256, "the tile of the kernel");

__device__ __forceinline__ void run_producer(const ForwardParams& params, Shared& shared, uint32_t cluster_rank) {
  const uint32_t stages = ptx::smem_address(shared.stages);
  const uint32_t full = ptx::smem_address(shared.pipeline.full), empty = ptx::smem_address(shared.pipeline.empty);
  TileReader reader{ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_loaded)};
  PipelineState at;
  const CUtensorMap* fenced[2] = {nullptr, nullptr};
  const int32_t intermediate = static_cast<int32_t>(params.shape.intermediate);
  while (true) {
    const Tile& tile = shared.tiles[reader.next()];
    if (tile.kind == TileKind::kExit) return;
    if (tile.kind == TileKind::kSkip) {
      skip_stages(full, empty, at, tile.iterations);
    } else if (tile.kind != TileKind::kReduce) {
      const bool first = tile.kind == TileKind::kGemm1;
      const CUtensorMap* rows_map = first ? &params.map_x : &params.map_activation;
      const CUtensorMap* weights_map = params.weight_maps + (first ? 0 : params.shape.num_local_experts) + tile.expert;
      fence_weight_map(fenced, first, weights_map);
      ptx::fence_async_global();
      const int32_t row = tile.ring_block * static_cast<int32_t>(kBlockRows);
      const int32_t weight_row = first ? tile.tile_n * static_cast<int32_t>(kGateUpCols) : tile.tile_n * static_cast<int32_t>(kHiddenCols);
      const int32_t second_half = first ? intermediate : 128;  // from gate rows to up rows; or the next 128 rows
      const Share share = tile.share;
      const int iterations = tile.iterations;
      for (int k = 0; k < iterations; ++k) {
        ptx::barrier_wait(empty + at.stage * 8, at.phase ^ 1);
        const uint32_t barrier = full + at.stage * 8;
        const uint32_t base = stages + at.stage * kStageBytes;
        const int32_t column = k * kStageK;
        ptx::barrier_expect_bytes(barrier, kStageBytes);
        if (share == Share::kRows) {
          ptx::load_tile_multicast(base + cluster_rank * kHalfABytes, rows_map, barrier, column, row + cluster_rank * 64, 3);
        } else {
          ptx::load_tile(base, rows_map, barrier, column, row);
          ptx::load_tile(base + kHalfABytes, rows_map, barrier, column, row + 64);
        }
        if (share == Share::kWeights) {
          ptx::load_tile_multicast(base + kABytes + cluster_rank * kHalfBBytes, weights_map, barrier, column,
                                   weight_row + (cluster_rank == 0 ? 0 : second_half), 3);
        } else {
          ptx::load_tile(base + kABytes, weights_map, barrier, column, weight_row);
          ptx::load_tile(base + kABytes + kHalfBBytes, weights_map, barrier, column, weight_row + second_half);
        }
        at.advance();
      }
    }
    reader.advance(true);
  }
}

// What the epilogue needs of the warp's 16 rows, row `lane` in lanes 0-15. Loaded before the products, which hide it.
struct RowInfo {
  float weight;    // gate/up GEMM: router weight
  int64_t target;  // down GEMM: where the row goes, first column of the tile; 0: nowhere
};

__device__ __forceinline__ RowInfo load_row_info(const ForwardParams& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  RowInfo info = {0.0f, 0};
  if (lane >= 16) return info;
  if (tile.kind == TileKind::kGemm1) {
    info.weight = params.weight_ring[tile.ring_block * kBlockRows + warp * 16 + lane];
  } else if (tile.store) {
    const int64_t row = tile.first_row + warp * 16 + lane;
    const int32_t rank = params.row_source_rank[row];
    if (rank >= 0) {
      info.target = params.peers.combine[rank] + (row_offset(params.row_source_slot[row], params.shape.hidden) + tile.tile_n * kHiddenCols) * 2;
    }
  }
  return info;
}

__device__ __forceinline__ void finish_gemm1(const ForwardParams& params, const Tile& tile, float (&accumulators)[128], uint32_t staging,
                                             const RowInfo& info, uint32_t warp, uint32_t lane) {
  if (!tile.store) return;
  SwigluTarget target;
  target.inner = params.shape.intermediate;
  const int64_t ring_row = tile.ring_block * kBlockRows + warp * 16, column = tile.tile_n * kGateUpCols;
  target.activation = params.activation + row_offset(ring_row, target.inner) + column;
  target.gate = tile.keep ? params.gate_up + row_offset(ring_row, 2 * target.inner) + column : nullptr;
  target.columns = static_cast<int32_t>(target.inner - column);
  store_swiglu(accumulators, staging, target, info.weight, lane);
}

__device__ __forceinline__ void run_consumer(const ForwardParams& params, Shared& shared, uint32_t warp, uint32_t lane) {
  const uint32_t stages = ptx::smem_address(shared.stages);
  const uint32_t full = ptx::smem_address(shared.pipeline.full), empty = ptx::smem_address(shared.pipeline.empty);
  const uint32_t staging = ptx::smem_address(shared.staging[warp]);
  const uint32_t warpgroup = warp / 4;
  TileReader reader{ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_stored)};
  PipelineState at;
  // Nothing to multiply yet: fetch.
  if (peers_entered(params, shared.context, lane)) {
    while (!reader.ready() && fetch_opening_row(params, opening_rows(params), lane)) {
    }
  }
  while (true) {
    const Tile& tile = shared.tiles[reader.next()];
    if (tile.kind == TileKind::kExit) return;
    if (tile.kind == TileKind::kSkip) {
      drain_stages(full, empty, at, tile.iterations, lane);
    } else if (tile.kind == TileKind::kReduce) {
      if (tile.store) reduce_tokens(params, tile.first_row + warp, tile.first_row + tile.num_tokens, kConsumerWarps, lane);
    } else if (tile.valid_rows <= static_cast<int32_t>(warpgroup) * 64) {
      // All rows of this half are padding. Nobody multiplies them in the second GEMM or pushes them; only the backward reads their gate and up.
      drain_stages(full, empty, at, tile.iterations, lane);
      if (tile.kind == TileKind::kGemm1 && tile.keep && tile.store) clear_gate_up(params, tile, warp, lane);
    } else {
      const RowInfo info = load_row_info(params, tile, warp, lane);
      float accumulators[128];
      multiply_stages(accumulators, stages, full, empty, at, tile.iterations, warpgroup, lane);
      if (tile.kind == TileKind::kGemm1) {
        finish_gemm1(params, tile, accumulators, staging, info, warp, lane);
      } else {
        push_rows(accumulators, staging, info.target, static_cast<int32_t>(params.shape.hidden - tile.tile_n * kHiddenCols), lane);
      }
      // The activation is read by bulk copies of other SMs.
      ptx::fence_async_global();
    }
    __syncwarp();
    reader.advance(lane == 0);
  }
}

__device__ __forceinline__ void clear_counters(const ForwardParams& params, const Plan& plan) {
  const int64_t num_blocks = params.totals->num_blocks;
  for (int64_t block = threadIdx.x; block < num_blocks; block += kThreads) {
    params.counters[plan.dispatched(block)] = 0;
    params.counters[plan.gemm1_done(block)] = 0;
    params.counters[plan.gemm2_done(block)] = 0;
  }
}

__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t cluster_rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    init_barriers<kConsumerWarps>(ptx::smem_address(shared.pipeline.full), ptx::smem_address(shared.pipeline.empty),
                                  ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_loaded),
                                  ptx::smem_address(shared.tile_stored), ptx::smem_address(shared.ticket_full),
                                  ptx::smem_address(shared.ticket_empty));
  }
  start_pass(params, shared);
  if (params.comm_clusters > 0) {
    // The clusters that come first only move rows: by order of arrival, so that one that is not resident holds up nobody.
    if (threadIdx.x == 0 && cluster_rank == 0) {
      const bool first = atomicAdd(&params.state->arrived, 1u) < static_cast<uint32_t>(params.comm_clusters);
      for (uint32_t cta = 0; cta < kClusterSize; ++cta) ptx::store_cluster(ptx::smem_address(&shared.only_moves_rows), cta, first);
    }
    ptx::cluster_sync();
  }
  const bool only_moves_rows = params.comm_clusters > 0 && shared.only_moves_rows != 0;
  help_opening(params, shared.context, lane);

  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (only_moves_rows || (warp >= 2 && params.comm_clusters == 0)) {
      run_communication<const TaskRecord>(params, shared.context, lane);
    } else if (warp == 0) {
      if (lane == 0) run_producer(params, shared, cluster_rank);
    } else if (warp == 1) {
      if (lane == 0) ForwardScheduler{{params, shared, cluster_rank}}.run();
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    if (!only_moves_rows) run_consumer(params, shared, warp - 4, lane);
  }
  leave_pass(params, shared, [&](const Plan& plan) { clear_counters(params, plan); });
}

// The table holds the totals in one record's place, then the communication tasks, then the compute tasks.
int64_t max_comm_tasks(int64_t capacity_blocks) { return capacity_blocks * kDispatchTasksPerBlock + 1; }
static_assert(sizeof(PassTotals) <= sizeof(TaskRecord), "totals take one place");

int launch_forward(const ForwardCall& call, cudaStream_t stream) {
  EnterParams enter;
  ForwardParams params;
  int code = check_aligned(call.w13, call.num_local_experts, kMisalignedW13);
  if (code == 0) code = check_aligned(call.w2, call.num_local_experts, kMisalignedW2);
  if (code == 0) code = encode_tensor_map(&enter.map_w13, nullptr, 2 * call.intermediate, call.hidden, 128);
  if (code == 0) code = encode_tensor_map(&enter.map_w2, nullptr, call.hidden, call.intermediate, 128);
  const int64_t ring_rows = call.macrobatch_blocks * kBlockRows;
  if (code == 0) code = encode_tensor_map(&params.map_x, reinterpret_cast<void*>(call.x_rows), ring_rows, call.hidden, 64);
  if (code == 0)
    code = encode_tensor_map(&params.map_activation, reinterpret_cast<void*>(call.ring_activation), ring_rows, call.intermediate, 64);
  if (code != 0) return code;

  int sms = 0;
  code = prepare_device<forward_kernel, kSharedBytes>(&sms);
  if (code != 0) return code;

  fill_enter(enter, call, Pass::kForward);
  enter.rank = call.rank;
  enter.ep_size = call.ep_size;
  enter.num_local_experts = call.num_local_experts;
  enter.totals = reinterpret_cast<PassTotals*>(call.records);
  enter.comm_records = reinterpret_cast<TaskRecord*>(call.records + sizeof(TaskRecord));
  enter.compute_records = enter.comm_records + max_comm_tasks(call.capacity_blocks);
  const int64_t most_tasks = call.capacity_blocks * (ceil_div(call.intermediate, kGateUpCols) + ceil_div(call.hidden, kHiddenCols)) +
                             ceil_div(call.num_tokens, kReduceTokens) + max_comm_tasks(call.capacity_blocks);
  const EnterGrid enter_blocks = enter_grid(call.ep_size > 1, sms, most_tasks);
  code = launch_chained(enter_kernel, enter_blocks.blocks, enter_blocks.threads, 0, stream, enter);
  if (code != cudaSuccess) return code;

  fill_pass(params, enter, call);
  params.y = reinterpret_cast<__nv_bfloat16*>(call.y);
  params.x_ring = reinterpret_cast<__nv_bfloat16*>(call.x_rows);
  params.gate_up = reinterpret_cast<__nv_bfloat16*>(call.gate_up);
  const int grid = (sms - static_cast<int>(call.sm_reserve)) / kClusterSize * kClusterSize;
  params.comm_clusters = static_cast<int32_t>(ceil_div(call.num_comm_sms, kClusterSize));
  if (params.comm_clusters * kClusterSize >= grid) return cudaErrorInvalidConfiguration;
  return launch_chained(forward_kernel, grid, kThreads, kSharedBytes, stream, params);
}

}  // namespace
}  // namespace mok

extern "C" int mok_sm90_load() {
  int sms = 0;
  cudaFuncAttributes attributes;
  int code = mok::prepare_device<mok::forward_kernel, mok::kSharedBytes>(&sms);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, mok::forward_kernel);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, mok::enter_kernel);
  if (code == cudaSuccess) code = mok::load_backward_kernels();
  if (code == cudaSuccess) code = mok::load_route_kernels();
  return code == cudaSuccess ? mok::load_schedule_kernels() : code;
}

extern "C" int mok_sm90_forward(const mok::ForwardCall* call, void* stream) {
  return mok::launch_forward(*call, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t mok_forward_call_bytes() { return sizeof(mok::ForwardCall); }

extern "C" int64_t mok_num_counters(int64_t capacity_blocks, int64_t num_local_experts) {
  mok::PassShape shape;
  shape.capacity_blocks = capacity_blocks;
  shape.num_local_experts = num_local_experts;
  mok::Plan plan;
  plan.shape = shape;
  return plan.num_counters();
}

extern "C" int64_t mok_forward_record_bytes(int64_t capacity_blocks, int64_t max_tokens, int64_t hidden, int64_t intermediate) {
  const int64_t compute = capacity_blocks * (mok::ceil_div(intermediate, mok::kGateUpCols) + mok::ceil_div(hidden, mok::kHiddenCols)) +
                          mok::ceil_div(max_tokens, mok::kReduceTokens);
  return (1 + mok::max_comm_tasks(capacity_blocks) + compute) * static_cast<int64_t>(sizeof(mok::TaskRecord));
}
