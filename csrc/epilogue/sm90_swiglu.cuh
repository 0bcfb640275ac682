// Epilogue of the gate/up GEMM: h = bf16(silu(gate) * up * p), with gate and up rounded to bf16 first, and kept on demand.
#pragma once

#include "../ptx/sm90.cuh"

namespace mok {

// silu(gate) * up * p. Explicit intrinsics: a contracted multiply-add would give other bits in the backward, which computes h again.
__device__ __forceinline__ float weighted_swiglu(float gate, float up, float weight) {
  const float sigmoid = ptx::reciprocal(__fadd_rn(1.0f, ptx::exp2(__fmul_rn(gate, -1.4426950408889634f))));
  return __fmul_rn(__fmul_rn(__fmul_rn(gate, sigmoid), up), weight);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed)); }

// Epilogue of one warp: 16 rows, 128 gate columns and then the same 128 up columns. Half a tile at a time (64 columns of each, rounded) goes
// through 4 KB of shared memory, so that what follows works on whole 16-byte chunks of a row in a short loop: unrolled over the accumulators,
// the same arithmetic is 13 KB of code a tile, and fetching that takes longer than running it.
struct SwigluTarget {
  __nv_bfloat16* activation;  // the warp's first row, the tile's first column; pitch I
  __nv_bfloat16* gate;        // likewise, pitch 2I; null: gate and up are not kept
  int64_t inner;              // I
  int32_t columns;            // columns of I from the tile's first one on
};

// `weight` of lanes 0-15 is the router weight of row `lane`. I is a multiple of 64, so half a tile lies inside it or outside.
__device__ __forceinline__ void store_swiglu(float (&accumulators)[128], uint32_t staging, const SwigluTarget& target, float weight,
                                             uint32_t lane) {
  // 16 rows of 256 bytes, gate chunks 0-7 and up chunks 8-15, swizzled by row so that neither side meets a bank conflict.
  const auto chunk_at = [&](uint32_t row, uint32_t chunk) { return staging + row * 256 + ((chunk ^ (row & 7)) << 4); };
  const uint32_t matrix = lane >> 3, matrix_row = (matrix & 1) * 8 + (lane & 7), matrix_chunk = matrix >> 1;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    if (static_cast<int32_t>(half) * 64 >= target.columns) break;
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
#pragma unroll 2
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = 4 * i + (lane >> 3), chunk = lane & 7;
      const float row_weight = __shfl_sync(0xffffffffu, weight, row);
      const uint4 gate = ptx::load_shared_16(chunk_at(row, chunk)), up = ptx::load_shared_16(chunk_at(row, 8 + chunk));
      const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
      uint32_t h[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 g = unpack_bf16(gates[w]), u = unpack_bf16(ups[w]);
        h[w] = pack_bf16(weighted_swiglu(g.x, u.x, row_weight), weighted_swiglu(g.y, u.y, row_weight));
      }
      const int64_t column = half * 64 + chunk * 8;
      ptx::store_16(target.activation + row * target.inner + column, make_uint4(h[0], h[1], h[2], h[3]));
      if (target.gate != nullptr) {
        ptx::store_16(target.gate + row * 2 * target.inner + column, gate);
        ptx::store_16(target.gate + (row * 2 + 1) * target.inner + column, up);
      }
    }
    __syncwarp();
  }
}

}  // namespace mok
