// Epilogue of the weight gradients: a 128 x 256 tile in fp32 goes to its gradient once, or to scratch when the expert's rows go on in the next macrobatch.
#pragma once

#include "sm90_push.cuh"

namespace mok {

// A gradient's address with two flags in its lowest bits; 0: no gradient is wanted. Matrices lie on 16 bytes.
constexpr int64_t kGradOverwrite = 1, kGradBf16 = 2, kGradAddress = ~int64_t{15};

__device__ __forceinline__ void add_pair(float* target, float a, float b) {
  // One addition an element and pass: the order of the tiles does not matter.
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_pair(float* target, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(a), "f"(b) : "memory");
}

// The scratch tile in the order of the registers of a warp.
__device__ __forceinline__ float4* scratch_at(float* tile, uint32_t warp, uint32_t lane) { return reinterpret_cast<float4*>(tile) + warp * 1024 + lane; }

__device__ __forceinline__ void load_sum(float (&accumulators)[128], float* tile, uint32_t warp, uint32_t lane) {
  const float4* source = scratch_at(tile, warp, lane);
#pragma unroll
  for (uint32_t j = 0; j < 32; ++j) {
    const float4 v = __ldcg(source + j * 32);
    accumulators[4 * j] = v.x;
    accumulators[4 * j + 1] = v.y;
    accumulators[4 * j + 2] = v.z;
    accumulators[4 * j + 3] = v.w;
  }
}

__device__ __forceinline__ void store_sum(const float (&accumulators)[128], float* tile, uint32_t warp, uint32_t lane) {
  float4* target = scratch_at(tile, warp, lane);
#pragma unroll
  for (uint32_t j = 0; j < 32; ++j) {
    target[j * 32] = make_float4(accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2], accumulators[4 * j + 3]);
  }
}

// One warp's 16 rows of the tile, from element `first` of the gradient on; `columns` of the matrix lie right of it.
__device__ __forceinline__ void store_weight_grad(float (&accumulators)[128], uint32_t staging, int64_t grad, int64_t first, int64_t pitch,
                                                  int32_t columns, uint32_t lane) {
  const int64_t row = lane >> 2;
  const uint32_t column = 2 * (lane & 3);
  if (!(grad & kGradBf16)) {
    float* top = reinterpret_cast<float*>(grad & kGradAddress) + first + row * pitch + column;
    float* bottom = top + 8 * pitch;
    const bool overwrite = grad & kGradOverwrite;
#pragma unroll
    for (uint32_t j = 0; j < 32; ++j) {
      if (static_cast<int32_t>(8 * j) >= columns) break;
      const float* a = accumulators + 4 * j;
      if (overwrite) {
        store_pair(top + 8 * j, a[0], a[1]);
        store_pair(bottom + 8 * j, a[2], a[3]);
      } else {
        add_pair(top + 8 * j, a[0], a[1]);
        add_pair(bottom + 8 * j, a[2], a[3]);
      }
    }
    return;
  }
  __nv_bfloat16* matrix = reinterpret_cast<__nv_bfloat16*>(grad & kGradAddress) + first;
  if (!(grad & kGradOverwrite)) {
    const uint32_t* top = reinterpret_cast<const uint32_t*>(matrix + row * pitch + column);
    const uint32_t* bottom = reinterpret_cast<const uint32_t*>(matrix + (row + 8) * pitch + column);
#pragma unroll
    for (uint32_t j = 0; j < 32; ++j) {
      if (static_cast<int32_t>(8 * j) >= columns) break;
      float* a = accumulators + 4 * j;
      const float2 before_top = unpack_bf16(__ldcg(top + 4 * j)), before_bottom = unpack_bf16(__ldcg(bottom + 4 * j));
      a[0] = __fadd_rn(before_top.x, a[0]);
      a[1] = __fadd_rn(before_top.y, a[1]);
      a[2] = __fadd_rn(before_bottom.x, a[2]);
      a[3] = __fadd_rn(before_bottom.y, a[3]);
    }
  }
  push_rows(accumulators, staging, reinterpret_cast<int64_t>(matrix + (lane & 15) * pitch), columns, lane);
}

// Zeros in one warp's 16 rows of an overwritten tile.
__device__ __forceinline__ void clear_weight_grad(int64_t grad, int64_t first, int64_t pitch, int32_t columns, uint32_t lane) {
  const int64_t bytes = grad & kGradBf16 ? 2 : 4, chunks = min(columns, 256) * bytes / 16;
  uint8_t* matrix = reinterpret_cast<uint8_t*>(grad & kGradAddress) + first * bytes;
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t chunk = lane; chunk < chunks; chunk += 32) ptx::store_16(matrix + row * pitch * bytes + chunk * 16, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace mok
