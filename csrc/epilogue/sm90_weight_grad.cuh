// Epilogue of the weight gradients: a 128 x 256 tile in fp32 goes to its gradient once, or to scratch when the expert's rows go on in the next
// macrobatch.
#pragma once

#include "sm90_push.cuh"

namespace mok {

// A gradient's address with two flags in its lowest bits; 0: no gradient is wanted. Matrices lie on 16 bytes.
constexpr int64_t kGradOverwrite = 1, kGradBf16 = 2, kGradAddress = ~int64_t{15};

// fp32 gradients are added to by L2, with copies out of shared memory for which nobody waits: nothing is loaded, and the epilogue is half as
// long. But L2 adds at a quarter of the rate at which it reads and writes (about 1 TB/s on H200, 17 us for a tile in each multiprocessor), while
// a stage, 64 rows of the expert, takes 0.9 us of products and, spread over the pass, as much of the input gradients: tiles of few stages are
// through before L2 is. They load, add and store (measured: 4 and 8 stages are a tie, from 12 on is slower). The bits are the same on either
// way: an element gets one addition a pass, rounded to nearest, subnormal numbers kept.
constexpr int32_t kLeastStagesOfL2Adds = 6;

__device__ __forceinline__ bool adds_in_l2(int64_t grad, int32_t stages) {
  return !(grad & (kGradBf16 | kGradOverwrite)) && stages >= kLeastStagesOfL2Adds;
}

// Boxes of the tensor maps of fp32 gradients: 16 rows of 128 bytes.
constexpr uint32_t kGradBoxRows = 16, kGradBoxCols = 32, kGradBoxBytes = kGradBoxRows * kGradBoxCols * 4;

// Asks for one warp's 16 rows of a gradient that its epilogue loads before the products, so that they wait in L2 when the sum is there.
__device__ __forceinline__ void prefetch_weight_grad(int64_t grad, int64_t first, int64_t pitch, int32_t columns, uint32_t lane) {
  if (grad & kGradOverwrite || lane >= 16) return;
  const int64_t bytes = grad & kGradBf16 ? 2 : 4;
  const int64_t address = (grad & kGradAddress) + (first + lane * pitch) * bytes;
  ptx::prefetch_bulk(reinterpret_cast<const void*>(address), static_cast<uint32_t>(min(columns, 256) * bytes));
}

// The scratch tile in the order of the registers of a warp.
__device__ __forceinline__ float4* scratch_at(float* tile, uint32_t warp, uint32_t lane) {
  return reinterpret_cast<float4*>(tile) + warp * 1024 + lane;
}

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

// fp32: a quarter of the columns at a time goes through 4 KB of shared memory, so that whole lines of the gradient are read and written.
__device__ __forceinline__ void store_fp32_grad(const float (&accumulators)[128], uint32_t staging, float* matrix, bool overwrite, int64_t pitch,
                                                int32_t columns, uint32_t lane) {
  // 16 rows of 256 bytes in 16-byte chunks, swizzled by row so that neither side meets a bank conflict.
  const auto chunk_at = [&](uint32_t row, uint32_t chunk) { return staging + row * 256 + ((chunk ^ (2 * (row & 7))) << 4); };
  float4* const target = reinterpret_cast<float4*>(matrix + (lane >> 4) * pitch + (lane & 15) * 4);
#pragma unroll
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    if (static_cast<int32_t>(quarter) * 64 >= columns) break;
    float4 before[8];
    float4* const rows = target + quarter * 16;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) before[i] = overwrite ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcg(rows + i * pitch / 2);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      const float* a = accumulators + 4 * (8 * quarter + j);
      const uint32_t chunk = 2 * j + ((lane & 3) >> 1), offset = (lane & 1) * 8;
      ptx::store_shared_pair(chunk_at(lane >> 2, chunk) + offset, a[0], a[1]);
      ptx::store_shared_pair(chunk_at((lane >> 2) + 8, chunk) + offset, a[2], a[3]);
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const float4 sum = ptx::load_shared_floats(chunk_at(2 * i + (lane >> 4), lane & 15));
      rows[i * pitch / 2] = overwrite ? sum
                                      : make_float4(__fadd_rn(before[i].x, sum.x), __fadd_rn(before[i].y, sum.y), __fadd_rn(before[i].z, sum.z),
                                                    __fadd_rn(before[i].w, sum.w));
    }
    __syncwarp();
  }
}

// fp32, added in L2: one warp's 16 rows of the tile, box by box through two places in shared memory. `row` and `column` are those of the
// gradient, `columns` lie right of it.
__device__ __forceinline__ void add_fp32_grad(const float (&accumulators)[128], uint32_t staging, const CUtensorMap* map, int32_t row,
                                              int32_t column, int32_t columns, uint32_t lane) {
  // Rows of 128 bytes in 16-byte chunks, in the maps' swizzle.
  const auto chunk_at = [&](uint32_t box, uint32_t at_row, uint32_t chunk) {
    return staging + (box & 1) * kGradBoxBytes + at_row * 128 + ((chunk ^ (at_row & 7)) << 4);
  };
#pragma unroll
  for (uint32_t box = 0; box < 256 / kGradBoxCols; ++box) {
    if (static_cast<int32_t>(box * kGradBoxCols) >= columns) break;
    if (box >= 2) {
      if (lane == 0) ptx::bulk_wait_read<1>();
      __syncwarp();
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const float* a = accumulators + 4 * (4 * box + j);
      const uint32_t chunk = 2 * j + ((lane & 3) >> 1), offset = (lane & 1) * 8;
      ptx::store_shared_pair(chunk_at(box, lane >> 2, chunk) + offset, a[0], a[1]);
      ptx::store_shared_pair(chunk_at(box, (lane >> 2) + 8, chunk) + offset, a[2], a[3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::add_tile(map, staging + (box & 1) * kGradBoxBytes, column + static_cast<int32_t>(box * kGradBoxCols), row);
      ptx::bulk_commit();
    }
  }
}

// Before the warp writes to its staging memory: copies out of it have been read.
__device__ __forceinline__ void wait_staging_free(uint32_t lane) {
  if (lane == 0) ptx::bulk_wait_read<0>();
  __syncwarp();
}

// Other gradients: one warp's 16 rows of the tile, from element `first` of the gradient on; `columns` of the matrix lie right of it.
__device__ __forceinline__ void store_weight_grad(float (&accumulators)[128], uint32_t staging, int64_t grad, int64_t first, int64_t pitch,
                                                  int32_t columns, uint32_t lane) {
  if (!(grad & kGradBf16)) {
    store_fp32_grad(accumulators, staging, reinterpret_cast<float*>(grad & kGradAddress) + first, grad & kGradOverwrite, pitch, columns, lane);
    return;
  }
  const int64_t row = lane >> 2;
  const uint32_t column = 2 * (lane & 3);
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
