// The final sum: y of a token is the sum of its K rows in ascending slot order, in fp32, rounded once.
#pragma once

#include "../kernels/sm90_params.cuh"
#include "sm90_swiglu.cuh"

namespace mok {

// Rows and columns in flight: 2 * 8 loads of 16 bytes a lane keep memory busy with the eight consumer warps alone.
constexpr int kReduceRows = 8;
constexpr int kReduceChunks = 2;

// Tokens first, first + stride, ... below `end`, one at a time, by one warp.
template <typename Params>
__device__ __forceinline__ void reduce_tokens(const Params& params, int64_t first, int64_t end, int64_t stride, uint32_t lane) {
  const int32_t topk = params.topk;
  const int32_t chunks = static_cast<int32_t>(params.shape.hidden / 8);
  const uint4* rows = reinterpret_cast<const uint4*>(params.peers.combine[params.shape.rank]);
  for (int64_t token = first; token < end; token += stride) {
    const bool routed = static_cast<int32_t>(lane) < topk && params.topk_experts[token * topk + lane] >= 0;
    const uint32_t mask = __ballot_sync(0xffffffffu, routed);
    const uint4* at = rows + row_offset(token * topk, chunks);
    for (int32_t base = 0; base < chunks; base += 32 * kReduceChunks) {
      float sum[kReduceChunks][8] = {};
      for (int32_t slot = 0; slot < topk; slot += kReduceRows) {
        const uint32_t bits = mask >> slot;  // clear from K on
        uint4 values[kReduceRows][kReduceChunks];
#pragma unroll
        for (int i = 0; i < kReduceRows; ++i) {
#pragma unroll
          for (int c = 0; c < kReduceChunks; ++c) {
            const int32_t chunk = base + c * 32 + lane;
            // Without a value on every path these registers would be taken for live in the whole kernel.
            values[i][c] = make_uint4(0, 0, 0, 0);
            if ((bits >> i & 1) && chunk < chunks) values[i][c] = ptx::load_stream_16(at + static_cast<int64_t>(slot + i) * chunks + chunk);
          }
        }
#pragma unroll
        for (int i = 0; i < kReduceRows; ++i) {
          // A row that is not there adds +0, which changes no sum: none is -0, since they start at +0.
#pragma unroll
          for (int c = 0; c < kReduceChunks; ++c) {
            const uint32_t words[4] = {values[i][c].x, values[i][c].y, values[i][c].z, values[i][c].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const float2 pair = unpack_bf16(words[w]);
              sum[c][2 * w] = __fadd_rn(sum[c][2 * w], pair.x);
              sum[c][2 * w + 1] = __fadd_rn(sum[c][2 * w + 1], pair.y);
            }
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kReduceChunks; ++c) {
        const int32_t chunk = base + c * 32 + lane;
        const uint4 out = {pack_bf16(sum[c][0], sum[c][1]), pack_bf16(sum[c][2], sum[c][3]), pack_bf16(sum[c][4], sum[c][5]),
                           pack_bf16(sum[c][6], sum[c][7])};
        if (chunk < chunks) ptx::store_16(params.y + row_offset(token, params.shape.hidden) + chunk * 8, out);
      }
    }
  }
}

}  // namespace mok
