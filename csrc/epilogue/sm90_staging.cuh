// Rows of a finished tile on their way from the warps that multiply to the warps that finish them: bf16 in shared memory.
#pragma once

#include "../ptx/sm90.cuh"

namespace mok {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed)); }

// 16 rows of 256 columns: what one warp has of a tile.
constexpr uint32_t kStagedBytes = 16 * 512;

// Chunk (16 bytes) of a staged row, swizzled so that neither side meets a bank conflict.
__device__ __forceinline__ uint32_t staged_chunk(uint32_t staging, uint32_t row, uint32_t chunk) {
  return staging + row * 512 + ((chunk ^ (row & 7)) << 4);
}

// One warp's accumulators, rounded.
__device__ __forceinline__ void stage_rows(const float (&accumulators)[128], uint32_t staging, uint32_t lane) {
  const uint32_t matrix = lane >> 3, row = (matrix & 1) * 8 + (lane & 7), chunk = matrix >> 1;
#pragma unroll
  for (uint32_t j = 0; j < 32; j += 2) {
    const float* a = accumulators + 4 * j;
    ptx::store_matrices(staged_chunk(staging, row, j + chunk), pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]),
                        pack_bf16(a[6], a[7]));
  }
}

}  // namespace mok
