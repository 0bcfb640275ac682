// Epilogue of the gate/up GEMM: h = bf16(silu(gate) * up * p), with gate and up rounded to bf16 first; gate and up are kept on demand.
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

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
}

// One warp's staging: 16 rows x 128 columns of bf16, 16-byte chunks swizzled by row so that neither side meets a bank conflict.
struct WarpTile {
  uint32_t base;  // shared-memory address of 4 KB

  __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t chunk) const { return base + row * 256 + ((chunk ^ (row & 7)) << 4); }

  // Fragments of column groups j and j + 1 (8 columns each), rows 0-7 and 8-15.
  __device__ __forceinline__ void put(uint32_t j, uint32_t lane, uint32_t a_top, uint32_t a_bottom, uint32_t b_top, uint32_t b_bottom) const {
    const uint32_t matrix = lane >> 3;
    ptx::store_matrices(at((matrix & 1) * 8 + (lane & 7), j + (matrix >> 1)), a_top, a_bottom, b_top, b_bottom);
  }

  // Rows of 256 bytes to global memory; columns from `columns` on are masked.
  __device__ __forceinline__ void write(__nv_bfloat16* target, int64_t pitch, int32_t columns, uint32_t lane) const {
    __syncwarp();
    const uint32_t chunk = lane & 15;
    const bool inside = static_cast<int32_t>(chunk) * 8 < columns;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t row = 2 * i + (lane >> 4);
      const uint4 value = ptx::load_shared_16(at(row, chunk));
      if (inside) ptx::store_16(target + row * pitch + chunk * 8, value);
    }
    __syncwarp();
  }
};

// `accumulators` of one warp: 16 rows, 128 gate columns then the same 128 up columns. Pointers are those of the warp's first row and the tile's
// first column.
__device__ __forceinline__ void swiglu_store_activation(float (&accumulators)[128], const WarpTile& tile, __nv_bfloat16* activation, int64_t pitch,
                                                        int32_t columns, float weight_top, float weight_bottom, bool store, uint32_t lane) {
#pragma unroll
  for (uint32_t j = 0; j < 16; j += 2) {
    // Also keeps the compiler from interleaving all sixteen groups, which spills.
    if (static_cast<int32_t>(j) * 8 >= columns) break;
    uint32_t h[4];
#pragma unroll
    for (uint32_t part = 0; part < 4; ++part) {
      const uint32_t at = 4 * (j + part / 2) + 2 * (part & 1);
      const float weight = part & 1 ? weight_bottom : weight_top;
      const float2 gate = unpack_bf16(pack_bf16(accumulators[at], accumulators[at + 1]));
      const float2 up = unpack_bf16(pack_bf16(accumulators[64 + at], accumulators[64 + at + 1]));
      h[part] = pack_bf16(weighted_swiglu(gate.x, up.x, weight), weighted_swiglu(gate.y, up.y, weight));
    }
    tile.put(j, lane, h[0], h[1], h[2], h[3]);
  }
  tile.write(activation, pitch, store ? columns : 0, lane);
}

template <int kFirst>
__device__ __forceinline__ void store_projection(float (&accumulators)[128], const WarpTile& tile, __nv_bfloat16* target, int64_t pitch,
                                                 int32_t columns, uint32_t lane) {
#pragma unroll
  for (uint32_t j = 0; j < 16; j += 2) {
    if (static_cast<int32_t>(j) * 8 >= columns) break;
    const uint32_t at = kFirst + 4 * j;
    tile.put(j, lane, pack_bf16(accumulators[at], accumulators[at + 1]), pack_bf16(accumulators[at + 2], accumulators[at + 3]),
             pack_bf16(accumulators[at + 4], accumulators[at + 5]), pack_bf16(accumulators[at + 6], accumulators[at + 7]));
  }
  tile.write(target, pitch, columns, lane);
}

}  // namespace mok
