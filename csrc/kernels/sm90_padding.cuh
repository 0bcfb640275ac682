// What a pass stores for rows that hold no token.
#pragma once

#include "../ptx/sm90.cuh"
#include "../task/tiles.h"

namespace mok {

// Gate and up of the warp's 16 rows are zero.
template <typename Params, typename Tile>
__device__ __forceinline__ void clear_gate_up(const Params& params, const Tile& tile, uint32_t warp, uint32_t lane) {
  const int64_t inner = params.shape.intermediate, column = tile.tile_n * kGateUpCols + lane % 16 * 8;
  if (column >= inner) return;
  for (int64_t row = tile.ring_block * kBlockRows + warp * 16 + lane / 16, i = 0; i < 8; ++i, row += 2) {
    __nv_bfloat16* target = params.gate_up + row_offset(row, 2 * inner) + column;
    ptx::store_16(target, make_uint4(0, 0, 0, 0));
    ptx::store_16(target + inner, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace mok
