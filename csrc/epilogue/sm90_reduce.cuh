// The final sum: y of a token is the sum of its K rows in ascending slot order, in fp32, rounded once.
#pragma once

#include "../kernels/sm90_params.cuh"
#include "sm90_swiglu.cuh"

namespace mok {

constexpr int kReduceUnroll = 4;

// Tokens first, first + stride, ... below `end`, one at a time, by one warp.
__device__ __forceinline__ void reduce_tokens(const ForwardParams& params, int64_t first, int64_t end, int64_t stride, uint32_t lane) {
  const int32_t topk = params.topk;
  const int32_t chunks = static_cast<int32_t>(params.shape.hidden / 8);
  const uint4* rows = reinterpret_cast<const uint4*>(params.peers.combine[params.shape.rank]);
  for (int64_t token = first; token < end; token += stride) {
    const bool routed = static_cast<int32_t>(lane) < topk && params.topk_experts[token * topk + lane] >= 0;
    const uint32_t mask = __ballot_sync(0xffffffffu, routed);
    for (int32_t chunk = lane; chunk < chunks; chunk += 32) {
      const uint4* at = rows + row_offset(token * topk, chunks) + chunk;
      float sum[8] = {};
      for (int32_t slot = 0; slot < topk; slot += kReduceUnroll) {
        uint4 values[kReduceUnroll];
#pragma unroll
        for (int i = 0; i < kReduceUnroll; ++i) {
          // Bits at and beyond K are clear in the mask.
          if (mask >> (slot + i) & 1) values[i] = ptx::load_stream_16(at + static_cast<int64_t>(slot + i) * chunks);
        }
#pragma unroll
        for (int i = 0; i < kReduceUnroll; ++i) {
          if (!(mask >> (slot + i) & 1)) continue;
          const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack_bf16(words[w]);
            sum[2 * w] = __fadd_rn(sum[2 * w], pair.x);
            sum[2 * w + 1] = __fadd_rn(sum[2 * w + 1], pair.y);
          }
        }
      }
      uint4 out = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
      ptx::store_16(params.y + row_offset(token, params.shape.hidden) + chunk * 8, out);
    }
  }
}

}  // namespace mok
