// Tile shapes of the task stream. One place, because the CPU executor and the kernels must agree on them: a counter's target is a number of
// tiles.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace mok {

// Rows of a tile; every expert's rows are padded to a multiple of it.
constexpr int64_t kBlockRows = 128;
// A block is fetched by several tasks, so that its first tiles need not wait for one worker to move 128 rows.
constexpr int64_t kDispatchRows = 32;
constexpr int64_t kDispatchTasksPerBlock = kBlockRows / kDispatchRows;
// Columns of I in a gate/up tile: the B operand is these gate rows over the same up rows, 256 in all.
constexpr int64_t kGateUpCols = 128;
// Columns of H in a tile of the down projection and of its mirror, the gate/up input gradient.
constexpr int64_t kHiddenCols = 256;
// Columns of I in a tile of the down input gradient; the router-weight gradient has one partial sum per such tile.
constexpr int64_t kActivationGradCols = 256;
// Weight-gradient tiles, rows by columns of the weight.
constexpr int64_t kWgradRows = 128;
constexpr int64_t kWgradCols = 256;
// Tokens that one task of the final sum takes.
constexpr int64_t kReduceTokens = 32;
// Tiles are walked column by column over groups of this many row blocks, so that neighbours in time share weights and rows in L2.
constexpr int64_t kSwizzleBlocks = 8;
// Minibatches by which a second GEMM trails the first.
constexpr int64_t kLag = 3;
// Rows an expert, on average, from which on weight gradients follow a macrobatch's other products. With fewer, adding a sum to its fp32 gradient
// takes longer than the sum, and they stand between the other products.
constexpr int64_t kRowsOfLongSums = 1536;
// There, minibatches by which the weight gradients of an expert trail its last rows' first GEMM, and tickets of them that stand between as many
// others: those that a cluster takes at once.
constexpr int64_t kWgradLag = kLag + 1;
constexpr int64_t kWgradRun = 2;

MOK_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOK_HOST_DEVICE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The first of lo .. hi - 1 for which `holds`, a monotone predicate, is true; hi if there is none.
template <typename Predicate>
MOK_HOST_DEVICE int64_t first_where(int64_t lo, int64_t hi, const Predicate& holds) {
  while (lo < hi) {
    const int64_t mid = (lo + hi) / 2;
    if (holds(mid)) {
      hi = mid;
    } else {
      lo = mid + 1;
    }
  }
  return lo;
}

// Element offset of a row. 64-bit: at H = 7168 the 299,594th row already lies beyond 2^31 elements.
MOK_HOST_DEVICE int64_t row_offset(int64_t row, int64_t row_elements) { return row * row_elements; }

}  // namespace mok
