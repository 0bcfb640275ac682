// The route schedule of one rank: which row of which rank goes where.
//
// Rows stand in the order (local expert, source rank, token, slot), every expert padded to kBlockRows. The order depends on the routes alone,
// not on how experts are spread over ranks, which is what keeps results the same over expert-parallel sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "../task/tiles.h"

namespace mok {

struct RouteFault {
  enum Kind : int64_t { kNone = 0, kOutOfRange = 1, kDuplicate = 2 };
  int64_t kind = kNone;
  int64_t token = -1;
  int64_t slot = -1;
  int64_t expert = -1;
};

// The first id of topk [num_tokens, topk_size] that is neither -1 nor a global expert, or that repeats inside its row.
inline RouteFault find_route_fault(const int32_t* topk, int64_t num_tokens, int64_t topk_size, int64_t num_experts) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int32_t* row = topk + token * topk_size;
    for (int64_t slot = 0; slot < topk_size; ++slot) {
      const int32_t expert = row[slot];
      if (expert == -1) continue;
      if (expert < 0 || expert >= num_experts) return {RouteFault::kOutOfRange, token, slot, expert};
      for (int64_t earlier = 0; earlier < slot; ++earlier) {
        if (row[earlier] == expert) return {RouteFault::kDuplicate, token, slot, expert};
      }
    }
  }
  return {};
}

struct RouteSchedule {
  int32_t* row_source_rank;     // [capacity_rows], -1 = padding
  int32_t* row_source_slot;     // [capacity_rows], token * K + slot at the source, -1 = padding
  int32_t* expert_rows;         // [E_local], without padding
  int64_t* expert_row_offsets;  // [E_local + 1], with padding
};

// `topk` is [ep_size, max_tokens, topk_size]; of rank r the first num_tokens[r] rows count. Returns the padded number of rows that are needed;
// when it exceeds capacity_rows, only the counts and offsets are written.
inline int64_t build_route_schedule(const int32_t* topk, const int64_t* num_tokens, int64_t ep_size, int64_t max_tokens, int64_t topk_size,
                                    int64_t first_expert, int64_t num_local_experts, int64_t capacity_rows, const RouteSchedule& out) {
  for (int64_t e = 0; e < num_local_experts; ++e) out.expert_rows[e] = 0;
  for (int64_t rank = 0; rank < ep_size; ++rank) {
    const int32_t* routes = topk + rank * max_tokens * topk_size;
    for (int64_t i = 0; i < num_tokens[rank] * topk_size; ++i) {
      const int64_t local = routes[i] - first_expert;
      if (local >= 0 && local < num_local_experts) ++out.expert_rows[local];
    }
  }
  out.expert_row_offsets[0] = 0;
  for (int64_t e = 0; e < num_local_experts; ++e) {
    out.expert_row_offsets[e + 1] = out.expert_row_offsets[e] + ceil_div(out.expert_rows[e], kBlockRows) * kBlockRows;
  }
  const int64_t rows = out.expert_row_offsets[num_local_experts];
  if (rows > capacity_rows) return rows;

  std::vector<int64_t> cursor(out.expert_row_offsets, out.expert_row_offsets + num_local_experts);
  for (int64_t rank = 0; rank < ep_size; ++rank) {
    const int32_t* routes = topk + rank * max_tokens * topk_size;
    for (int64_t i = 0; i < num_tokens[rank] * topk_size; ++i) {
      const int64_t local = routes[i] - first_expert;
      if (local < 0 || local >= num_local_experts) continue;
      const int64_t row = cursor[local]++;
      out.row_source_rank[row] = static_cast<int32_t>(rank);
      out.row_source_slot[row] = static_cast<int32_t>(i);
    }
  }
  for (int64_t e = 0; e < num_local_experts; ++e) {
    for (int64_t row = cursor[e]; row < out.expert_row_offsets[e + 1]; ++row) {
      out.row_source_rank[row] = -1;
      out.row_source_slot[row] = -1;
    }
  }
  for (int64_t row = rows; row < capacity_rows; ++row) {
    out.row_source_rank[row] = -1;
    out.row_source_slot[row] = -1;
  }
  return rows;
}

}  // namespace mok
