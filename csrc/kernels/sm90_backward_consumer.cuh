// The consumers of the backward megakernel: products and epilogues of every kind of tile.
#pragma once

#include "../epilogue/sm90_push.cuh"
#include "../epilogue/sm90_reduce.cuh"
#include "../epilogue/sm90_swiglu_backward.cuh"
#include "sm90_backward_scheduler.cuh"
#include "sm90_padding.cuh"

namespace mok {
namespace {

// The warp's 16 rows of gate and up, rounded, half a tile at a time through 4 KB of shared memory. Pointer: the warp's first row, first column.
__device__ __forceinline__ void store_gate_up(float (&accumulators)[128], uint32_t staging, __nv_bfloat16* target, int64_t inner,
                                              int32_t columns, uint32_t lane) {
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
        ptx::store_matrices(chunk_at(matrix_row, 8 * part + j + matrix_chunk), pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]),
                            pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7]));
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

// Hides from the compiler that a value is the same for all tiles: what epilogues compute from it would be kept in registers across the products.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

struct ConsumerPipeline {
  uint32_t stages, full, empty;
  PipelineState at;
  uint32_t warpgroup, lane;

  template <Major kMajorA, Major kMajorB>
  __device__ __forceinline__ void multiply(float (&accumulators)[128], int iterations) {
    multiply_operands<kMajorA, kMajorB, false, false>(accumulators, stages, full, empty, at, iterations, kStageSteps, warpgroup, lane);
  }

  // Rows of an expert along K, added to what the accumulators hold.
  __device__ __forceinline__ void add_rows(float (&accumulators)[128], int iterations, int last_steps) {
    multiply_operands<kMajorMn, kMajorMn, true, true>(accumulators, stages, full, empty, at, iterations, last_steps, warpgroup, lane);
  }
};

__device__ __forceinline__ void run_dgrad2(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging,
                                           uint32_t warp, uint32_t lane) {
  const int64_t inner = params.shape.intermediate, ring_row = tile.ring_block * kBlockRows + warp * 16,
                column = tile.tile_n * kActivationGradCols;
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
  wait_staging_free(lane);
  const float d_weight = store_swiglu_backward(accumulators, staging, target, weight, first, second, lane);
  const int64_t tiles = ceil_div(inner, kActivationGradCols);
  if (lane < 16) params.partial_ring[(ring_row + lane) * tiles + tile.tile_n] = d_weight;
}

__device__ __forceinline__ void run_dgrad1(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging,
                                           uint32_t warp, uint32_t lane) {
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
  wait_staging_free(lane);
  push_rows(accumulators, staging, target, static_cast<int32_t>(params.shape.hidden - tile.tile_n * kHiddenCols), lane);
  if (weight_target != 0) *reinterpret_cast<float*>(weight_target) = d_weight;
}

__device__ __forceinline__ void run_gemm1(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging,
                                          uint32_t warp, uint32_t lane) {
  float accumulators[128];
  pipeline.multiply<kMajorK, kMajorK>(accumulators, tile.iterations);
  staging = opaque(staging);
  lane = opaque(lane);
  if (!tile.store) return;
  wait_staging_free(lane);
  const int64_t inner = params.shape.intermediate, ring_row = tile.ring_block * kBlockRows + warp * 16, column = tile.tile_n * kGateUpCols;
  store_gate_up(accumulators, staging, params.gate_up + row_offset(ring_row, 2 * inner) + column, inner, static_cast<int32_t>(inner - column),
                lane);
}

__device__ __forceinline__ void run_wgrad(const BackwardParams& params, const Tile& tile, ConsumerPipeline& pipeline, uint32_t staging,
                                          uint32_t warp, uint32_t lane) {
  const int64_t pitch = tile.second ? params.shape.intermediate : params.shape.hidden, column = tile.tile_n * kWgradCols;
  const int64_t row = tile.tile_m * kWgradRows + warp * 16, first = row_offset(row, pitch) + column;
  const CUtensorMap* map = params.weight_maps + (tile.second ? 3 : 2) * params.shape.num_local_experts + tile.expert;
  const bool in_l2 = adds_in_l2(tile.grad, tile.iterations);
  if (in_l2) {
    if (lane == 0) ptx::tensor_map_acquire(map);  // written by an earlier kernel's ordinary stores
  } else if (!tile.continued) {
    prefetch_weight_grad(tile.grad, first, pitch, static_cast<int32_t>(pitch - column), lane);
  }
  float accumulators[128];
  if (tile.continues && tile.store) {
    load_sum(accumulators, tile.scratch, warp, lane);
  } else {
#pragma unroll
    for (int i = 0; i < 128; ++i) accumulators[i] = 0.0f;
  }
  pipeline.add_rows(accumulators, tile.iterations, tile.last_steps);
  staging = opaque(staging);
  lane = opaque(lane);
  if (!tile.store) return;
  if (tile.continued) {
    store_sum(accumulators, tile.scratch, warp, lane);
    return;
  }
  wait_staging_free(lane);
  if (in_l2) {
    add_fp32_grad(accumulators, staging, map, static_cast<int32_t>(row), static_cast<int32_t>(column), static_cast<int32_t>(pitch - column),
                  lane);
  } else {
    store_weight_grad(accumulators, staging, tile.grad, first, pitch, static_cast<int32_t>(pitch - column), lane);
  }
}

__device__ __forceinline__ void run_zero(const BackwardParams& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  if (!tile.store || tile.valid_rows <= static_cast<int32_t>(warp) * 16) return;
  const int64_t pitch = tile.second ? params.shape.intermediate : params.shape.hidden, column = tile.tile_n * kWgradCols;
  clear_weight_grad(tile.grad, row_offset(tile.tile_m * kWgradRows + warp * 16, pitch) + column, pitch, static_cast<int32_t>(pitch - column),
                    lane);
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
  ConsumerPipeline pipeline{
      ptx::smem_address(shared.stages), ptx::smem_address(shared.pipeline.full), ptx::smem_address(shared.pipeline.empty), {}, warp / 4, lane};
  TileReader reader{ptx::smem_address(shared.tile_full), ptx::smem_address(shared.tile_stored)};
  while (true) {
    const Tile& tile = shared.tiles[reader.next()];
    const TileKind kind = tile.kind;
    if (kind == TileKind::kExit) break;
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
    reader.advance(true);
  }
  // Shared memory must outlive the copies out of it.
  wait_staging_free(lane);
}

}  // namespace
}  // namespace mok
