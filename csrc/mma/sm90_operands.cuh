// Products whose operands lie either way: K-major, or with K along the rows (weights in a dgrad, both operands of a weight gradient).
//
// A stage holds 64 of K in six boxes of 64 x 64 elements, two of A and four of B, in the 128-byte swizzle. A K-major box has 64 rows of M or N
// by 64 of K; the other kind 64 of K by 64 columns of M or N.
#pragma once

#include "sm90_pipeline.cuh"

namespace mok {

constexpr uint32_t kBoxBytes = 64 * kStageK * 2;
static_assert(kABytes == 2 * kBoxBytes && kBBytes == 4 * kBoxBytes, "six boxes a stage");

enum Major : int { kMajorK = 0, kMajorMn = 1 };

// Descriptor of boxes with K along the rows: groups of 8 of K stand 1024 bytes apart, the next 64 columns one box on.
__device__ __forceinline__ uint64_t tile_descriptor_mn(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kGroupStride = (1024ull >> 4) << 32, kBoxStride = (static_cast<uint64_t>(kBoxBytes) >> 4) << 16;
  return kSwizzle128 | kGroupStride | kBoxStride | ((address & 0x3FFFF) >> 4);
}

constexpr int kStepK = 16;  // of K in one instruction
constexpr int kStageSteps = kStageK / kStepK;

// The products of a stage's first `kSteps` steps, issued and committed. `accumulate` 0 starts from zero.
template <Major kMajorA, Major kMajorB, int kSteps = kStageSteps>
__device__ __forceinline__ void issue_stage(float (&accumulators)[128], uint32_t base, uint32_t warpgroup, bool accumulate) {
  // A step of K on, in 16-byte units.
  constexpr uint32_t kStepA = kMajorA == kMajorK ? 2 : 128, kStepB = kMajorB == kMajorK ? 2 : 128;
  const uint32_t address_a = base + warpgroup * kHalfABytes, address_b = base + kABytes;
  const uint64_t a = kMajorA == kMajorK ? tile_descriptor(address_a) : tile_descriptor_mn(address_a);
  const uint64_t b = kMajorB == kMajorK ? tile_descriptor(address_b) : tile_descriptor_mn(address_b);
  ptx::mma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::mma_m64n256k16<kMajorA, kMajorB>(accumulators, a + step * kStepA, b + step * kStepB, accumulate || step > 0);
  }
  ptx::mma_commit();
}

// `last_steps`, 1 to kStageSteps, of the last stage's steps; what lies behind them is not multiplied.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void issue_last_stage(float (&accumulators)[128], uint32_t base, uint32_t warpgroup, bool accumulate,
                                                 int last_steps) {
  static_assert(kStageSteps == 4, "the cases below");
  switch (last_steps) {
    case 1:
      return issue_stage<kMajorA, kMajorB, 1>(accumulators, base, warpgroup, accumulate);
    case 2:
      return issue_stage<kMajorA, kMajorB, 2>(accumulators, base, warpgroup, accumulate);
    case 3:
      return issue_stage<kMajorA, kMajorB, 3>(accumulators, base, warpgroup, accumulate);
    default:
      return issue_stage<kMajorA, kMajorB>(accumulators, base, warpgroup, accumulate);
  }
}

// accumulators (+)= A[64 rows of `warpgroup`] * B over `iterations` >= 1 stages, of the last one its first `last_steps` steps where K may end
// within it; from zero unless `kAccumulate`. The first stage stands before the loop: registers that other instructions define must not enter a
// loop in which products are in flight.
template <Major kMajorA, Major kMajorB, bool kAccumulate, bool kEndsWithin>
__device__ __forceinline__ void multiply_operands(float (&accumulators)[128], uint32_t stages, uint32_t full_barriers, uint32_t empty_barriers,
                                                  PipelineState& at, int iterations, int last_steps, uint32_t warpgroup, uint32_t lane) {
  ptx::barrier_wait(full_barriers + at.stage * 8, at.phase);
  if (kEndsWithin && iterations == 1) {
    issue_last_stage<kMajorA, kMajorB>(accumulators, stages + at.stage * kStageBytes, warpgroup, kAccumulate, last_steps);
  } else {
    issue_stage<kMajorA, kMajorB>(accumulators, stages + at.stage * kStageBytes, warpgroup, kAccumulate);
  }
  uint32_t previous = at.stage;
  at.advance();
  for (int k = 1; k < iterations - (kEndsWithin ? 1 : 0); ++k) {
    ptx::barrier_wait(full_barriers + at.stage * 8, at.phase);
    issue_stage<kMajorA, kMajorB>(accumulators, stages + at.stage * kStageBytes, warpgroup, true);
    ptx::mma_wait<1>();
    release_stage(empty_barriers, previous, lane);
    previous = at.stage;
    at.advance();
  }
  if (kEndsWithin && iterations > 1) {
    ptx::barrier_wait(full_barriers + at.stage * 8, at.phase);
    issue_last_stage<kMajorA, kMajorB>(accumulators, stages + at.stage * kStageBytes, warpgroup, true, last_steps);
    ptx::mma_wait<1>();
    release_stage(empty_barriers, previous, lane);
    previous = at.stage;
    at.advance();
  }
  ptx::mma_wait<0>();
  release_stage(empty_barriers, previous, lane);
}

}  // namespace mok
