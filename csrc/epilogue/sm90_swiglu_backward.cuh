// Epilogue of the down projection's input gradient: from dh in fp32 and the kept gate and up, the activation h again bit for bit, the gradients
// of gate and up, and a row's share of its router weight's gradient over these columns.
#pragma once

#include "sm90_swiglu.cuh"

namespace mok {

struct SwigluGrads {
  float h, gate, up, weight;  // `weight`: the term dh * silu(gate) * up
};

// Explicit intrinsics, in the forward's order for h: contraction by the compiler would give other bits.
__device__ __forceinline__ SwigluGrads swiglu_backward(float gate, float up, float weight, float dh) {
  const float sigmoid = ptx::reciprocal(__fadd_rn(1.0f, ptx::exp2(__fmul_rn(gate, -1.4426950408889634f))));
  const float silu = __fmul_rn(gate, sigmoid);
  const float unweighted = __fmul_rn(silu, up);
  const float d_act = __fmul_rn(dh, weight);
  const float slope = __fmul_rn(sigmoid, __fmaf_rn(gate, __fsub_rn(1.0f, sigmoid), 1.0f));
  return {__fmul_rn(unweighted, weight), __fmul_rn(__fmul_rn(d_act, up), slope), __fmul_rn(d_act, silu), __fmul_rn(dh, unweighted)};
}

// Pointers are those of the warp's first row and the tile's first column; gate columns first, up columns `inner` later, pitch 2I.
struct SwigluBackwardTarget {
  const __nv_bfloat16* gate;
  __nv_bfloat16* d_gate;
  __nv_bfloat16* activation;  // pitch I
  int64_t inner;              // I
  int32_t columns;            // columns of I from the tile's first one on
};

// 16-byte chunks (8 columns) of gate and up that a lane handles in one step.
struct GateUpChunk {
  uint4 gate, up;
};

// Step t of a warp: rows 4 * (t % 4) + lane / 8, columns 64 * (t / 4) + 8 * (lane % 8).
__device__ __forceinline__ GateUpChunk load_gate_up(const SwigluBackwardTarget& target, uint32_t step, uint32_t lane) {
  const int64_t row = 4 * (step & 3) + (lane >> 3);
  const __nv_bfloat16* gate = target.gate + row * 2 * target.inner + (step >> 2) * 64 + (lane & 7) * 8;
  return {ptx::load_stream_16(gate), ptx::load_stream_16(gate + target.inner)};
}

// Epilogue of one warp: 16 rows x 256 columns of dh. A quarter of the columns at a time goes through 4 KB of shared memory as fp32, so that a
// lane then holds eight neighbouring columns of a row. `weight` of lanes 0-15 is the router weight of row `lane`; so is the returned sum for its
// gradient. `first` and `second` are the chunks of steps 0 and 1, loaded before the products, which hide it.
__device__ __forceinline__ float store_swiglu_backward(float (&accumulators)[128], uint32_t staging, const SwigluBackwardTarget& target,
                                                       float weight, GateUpChunk first, GateUpChunk second, uint32_t lane) {
  // 16 rows of 256 bytes in 16-byte chunks, swizzled by row so that neither side meets a bank conflict.
  const auto chunk_at = [&](uint32_t row, uint32_t chunk) { return staging + row * 256 + ((chunk ^ (2 * (row & 7))) << 4); };
  const uint32_t steps = target.columns >= 256 ? 16 : static_cast<uint32_t>(target.columns) / 16;
  float d_weight = 0.0f;
#pragma unroll
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    if (quarter * 4 >= steps) break;
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      const float* a = accumulators + 4 * (8 * quarter + j);
      const uint32_t chunk = 2 * j + ((lane & 3) >> 1), offset = (lane & 1) * 8;
      ptx::store_shared_pair(chunk_at(lane >> 2, chunk) + offset, a[0], a[1]);
      ptx::store_shared_pair(chunk_at((lane >> 2) + 8, chunk) + offset, a[2], a[3]);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 0; i < 4; ++i) {
      const GateUpChunk now = first;
      first = second;
      const uint32_t step = quarter * 4 + i;
      if (step + 2 < steps) second = load_gate_up(target, step + 2, lane);
      const uint32_t row = 4 * i + (lane >> 3), column = lane & 7;
      // Lanes 4-7 of a row read their two chunks the other way round: no bank conflict.
      const bool swapped = column & 4;
      const float4 one = ptx::load_shared_floats(chunk_at(row, 2 * column + swapped)),
                   other = ptx::load_shared_floats(chunk_at(row, 2 * column + !swapped));
      const float4 low = swapped ? other : one, high = swapped ? one : other;
      const float dh[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float row_weight = __shfl_sync(0xffffffffu, weight, row);
      const uint32_t gates[4] = {now.gate.x, now.gate.y, now.gate.z, now.gate.w}, ups[4] = {now.up.x, now.up.y, now.up.z, now.up.w};
      uint32_t h[4], d_gate[4], d_up[4];
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 g = unpack_bf16(gates[w]), u = unpack_bf16(ups[w]);
        const SwigluGrads left = swiglu_backward(g.x, u.x, row_weight, dh[2 * w]), right = swiglu_backward(g.y, u.y, row_weight, dh[2 * w + 1]);
        h[w] = pack_bf16(left.h, right.h);
        d_gate[w] = pack_bf16(left.gate, right.gate);
        d_up[w] = pack_bf16(left.up, right.up);
        sum = __fadd_rn(sum, __fadd_rn(left.weight, right.weight));
      }
      const int64_t at_column = quarter * 64 + column * 8;
      ptx::store_16(target.activation + row * target.inner + at_column, make_uint4(h[0], h[1], h[2], h[3]));
      __nv_bfloat16* gate_target = target.d_gate + row * 2 * target.inner + at_column;
      ptx::store_16(gate_target, make_uint4(d_gate[0], d_gate[1], d_gate[2], d_gate[3]));
      ptx::store_16(gate_target + target.inner, make_uint4(d_up[0], d_up[1], d_up[2], d_up[3]));
      // The eight lanes of a row, in a fixed tree; then lane `row` keeps the row's sum.
#pragma unroll
      for (uint32_t distance = 1; distance < 8; distance *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
      const float of_row = __shfl_sync(0xffffffffu, sum, (lane & 3) * 8);
      if ((lane >> 2) == i) d_weight = __fadd_rn(d_weight, of_row);
    }
    __syncwarp();
  }
  return d_weight;
}

}  // namespace mok
