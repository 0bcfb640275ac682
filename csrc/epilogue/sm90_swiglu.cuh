// Epilogue of the gate/up GEMM: h = bf16(silu(gate) * up * p), with gate and up rounded to bf16 first, and kept on demand.
#pragma once

#include "sm90_staging.cuh"

namespace mok {

// silu(gate) * up * p. Explicit intrinsics: a contracted multiply-add would give other bits in the backward, which computes h again.
__device__ __forceinline__ float weighted_swiglu(float gate, float up, float weight) {
  const float sigmoid = ptx::reciprocal(__fadd_rn(1.0f, ptx::exp2(__fmul_rn(gate, -1.4426950408889634f))));
  return __fmul_rn(__fmul_rn(__fmul_rn(gate, sigmoid), up), weight);
}

// Where a warp's 16 rows of a gate/up tile go.
struct SwigluTarget {
  __nv_bfloat16* activation;  // the warp's first row, the tile's first column; pitch I
  __nv_bfloat16* gate;        // likewise, pitch 2I; null: gate and up are not kept
  int64_t inner;              // I
  int32_t columns;            // columns of I from the tile's first one on
};

// Staged rows: 128 gate columns, chunks 0-15, and the same 128 up columns, chunks 16-31. `weight(row)` is a
// row's router weight.
template <typename Weight>
__device__ __forceinline__ void store_staged_swiglu(uint32_t staging, const SwigluTarget& target, Weight weight, uint32_t lane) {
  const uint32_t chunk = lane & 15;
  const bool inside = static_cast<int32_t>(chunk * 8) < target.columns;
#pragma unroll 4
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t row = 2 * i + (lane >> 4);
    const float row_weight = weight(row);
    const uint4 gate = ptx::load_shared_16(staged_chunk(staging, row, chunk)), up = ptx::load_shared_16(staged_chunk(staging, row, 16 + chunk));
    const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
    uint32_t h[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 g = unpack_bf16(gates[w]), u = unpack_bf16(ups[w]);
      h[w] = pack_bf16(weighted_swiglu(g.x, u.x, row_weight), weighted_swiglu(g.y, u.y, row_weight));
    }
    if (!inside) continue;
    ptx::store_16(target.activation + row * target.inner + chunk * 8, make_uint4(h[0], h[1], h[2], h[3]));
    if (target.gate != nullptr) {
      ptx::store_16(target.gate + row * 2 * target.inner + chunk * 8, gate);
      ptx::store_16(target.gate + (row * 2 + 1) * target.inner + chunk * 8, up);
    }
  }
}

}  // namespace mok
