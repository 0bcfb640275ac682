// The operand pipeline of a GEMM tile and the product of one warpgroup's half of it.
//
// A stage holds 64 columns of K: 128 rows of A over 256 rows of B, rows of 128 bytes in the 128-byte swizzle. The two CTAs of a cluster run in
// step: a stage is free only when the consumers of both have read it, since either may have filled it for both.
#pragma once

#include "../ptx/sm90.cuh"
#include "../ptx/sm90_mma.cuh"

namespace mok {

constexpr int kStages = 4;
constexpr int kStageK = 64;
constexpr uint32_t kHalfABytes = 64 * kStageK * 2;   // 64 rows: what one warpgroup multiplies
constexpr uint32_t kHalfBBytes = 128 * kStageK * 2;  // 128 rows of B
constexpr uint32_t kABytes = 2 * kHalfABytes;
constexpr uint32_t kBBytes = 2 * kHalfBBytes;
constexpr uint32_t kStageBytes = kABytes + kBBytes;
constexpr int kConsumerWarps = 8;
constexpr int kClusterSize = 2;

struct PipelineBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// Position of one role in the ring of stages.
struct PipelineState {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// wgmma descriptor of a K-major tile in the 128-byte swizzle: groups of 8 rows stand 1024 bytes apart. +2 moves 16 columns on.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kGroupStride = (1024ull >> 4) << 32, kUnused = 1ull << 16;
  return kSwizzle128 | kGroupStride | kUnused | ((address & 0x3FFFF) >> 4);
}

// Every warp of every consumer of both CTAs gives a stage back; lanes 0 and 1 tell one CTA each.
__device__ __forceinline__ void release_stage(uint32_t empty_barriers, uint32_t stage, uint32_t lane) {
  __syncwarp();
  if (lane < kClusterSize) ptx::barrier_arrive_cluster_unordered(empty_barriers + stage * 8, lane);
}

// Walk `iterations` stages without a product: for a CTA whose partner computes, or a warpgroup whose rows are all padding.
__device__ __forceinline__ void drain_stages(uint32_t full_barriers, uint32_t empty_barriers, PipelineState& at, int iterations, uint32_t lane) {
  for (int k = 0; k < iterations; ++k) {
    ptx::barrier_wait(full_barriers + at.stage * 8, at.phase);
    release_stage(empty_barriers, at.stage, lane);
    at.advance();
  }
}

// The producer's side of the same. A reference: read again for every stage, the count makes no unrolled code of a rare loop.
__device__ __forceinline__ void skip_stages(uint32_t full_barriers, uint32_t empty_barriers, PipelineState& at, const int& iterations) {
  for (int k = 0; k < iterations; ++k) {
    ptx::barrier_wait(empty_barriers + at.stage * 8, at.phase ^ 1);
    ptx::barrier_arrive(full_barriers + at.stage * 8);
    at.advance();
  }
}

// Before the producer loads through the map of a weight: an earlier kernel's ordinary stores wrote it. `fenced` holds the last map of either
// matrix.
__device__ __forceinline__ void fence_weight_map(const CUtensorMap* (&fenced)[2], bool matrix, const CUtensorMap* map) {
  if ((matrix ? fenced[1] : fenced[0]) == map) return;
  ptx::tensor_map_acquire(map);
  fenced[0] = matrix ? fenced[0] : map;
  fenced[1] = matrix ? map : fenced[1];
}

// accumulators = A[64 rows of `warpgroup`] * B^T over `iterations` stages.
__device__ __forceinline__ void multiply_stages(float (&accumulators)[128], uint32_t stages, uint32_t full_barriers, uint32_t empty_barriers,
                                                PipelineState& at, int iterations, uint32_t warpgroup, uint32_t lane) {
  uint32_t previous = 0;
  for (int k = 0; k < iterations; ++k) {
    ptx::barrier_wait(full_barriers + at.stage * 8, at.phase);
    const uint32_t base = stages + at.stage * kStageBytes;
    const uint64_t a = tile_descriptor(base + warpgroup * kHalfABytes);
    const uint64_t b = tile_descriptor(base + kABytes);
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kStageK / 16; ++step) {
      ptx::mma_m64n256k16(accumulators, a + 2 * step, b + 2 * step, k + step);
    }
    ptx::mma_commit();
    if (k > 0) {
      ptx::mma_wait<1>();
      release_stage(empty_barriers, previous, lane);
    }
    previous = at.stage;
    at.advance();
  }
  ptx::mma_wait<0>();
  release_stage(empty_barriers, previous, lane);
}

}  // namespace mok
