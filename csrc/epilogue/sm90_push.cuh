// Epilogue of the down GEMM: every row goes straight to its source rank's slot, 512 contiguous bytes a row and tile.
#pragma once

#include "sm90_swiglu.cuh"

namespace mok {

// `target` of lanes 0-15: where row `lane` of the warp's 16 goes (first column of the tile), null for padding.
__device__ __forceinline__ void push_rows(float (&accumulators)[128], uint32_t staging, int64_t target, int32_t columns, uint32_t lane) {
  const bool inside = static_cast<int32_t>(lane) * 8 < columns;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t j = 0; j < 32; j += 4) {
      uint32_t v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) v[i] = pack_bf16(accumulators[4 * (j + i) + 2 * half], accumulators[4 * (j + i) + 2 * half + 1]);
      const uint32_t row = lane & 7, chunk = j + (lane >> 3);
      ptx::store_matrices(staging + row * 512 + ((chunk ^ row) << 4), v[0], v[1], v[2], v[3]);
    }
    __syncwarp();
#pragma unroll
    for (uint32_t row = 0; row < 8; ++row) {
      const int64_t address = __shfl_sync(0xffffffffu, target, half * 8 + row);
      const uint4 value = ptx::load_shared_16(staging + row * 512 + ((lane ^ row) << 4));
      if (address != 0 && inside) ptx::store_16(reinterpret_cast<void*>(address + lane * 16), value);
    }
    __syncwarp();
  }
}

}  // namespace mok
