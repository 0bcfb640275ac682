// The route schedule on the device: equal to schedule/route_schedule.h bit for bit.
//
// Three launches: publish this rank's routes; count every rank's routes of this rank's experts by chunks; add up and scatter. One rank counts
// its routes where it checks them, in two launches. A chunk is one block's; its warps walk a part each, 32 routes at a time, so positions come
// from prefix sums alone. Routes cross between GPUs once: whoever counts them leaves their local experts here.
#include <cuda_runtime.h>

#include "../comm/sm90_wait.cuh"
#include "../task/tiles.h"
#include "launch.h"
#include "sm90_launch.h"
#include "sm90_warp_sum.cuh"

namespace mok {
namespace {

constexpr int kChunkRoutes = 512;
constexpr int kPublishThreads = 256, kCountThreads = 256, kScatterThreads = 256;
constexpr int kScatterWarps = kScatterThreads / 32;

// At least one, so that a group that brings no token launches something.
int64_t chunks_of_rank(int64_t max_tokens, int64_t topk) {
  const int64_t chunks = ceil_div(max_tokens * topk, kChunkRoutes);
  return chunks == 0 ? 1 : chunks;
}

int64_t local_expert_words(int64_t chunks) {
  return chunks * kChunkRoutes * static_cast<int64_t>(sizeof(int16_t)) / static_cast<int64_t>(sizeof(int32_t));
}

struct ScheduleParams {
  ScheduleCall call;
  int32_t* chunk_counts;   // [chunks of all ranks, E_local]
  int16_t* local_experts;  // [chunks of all ranks, kChunkRoutes]; -1: a route of another rank's expert, or none
  int64_t chunks_per_rank;
};

__device__ __forceinline__ int64_t current_call(const ScheduleCall& call) { return reinterpret_cast<const DeviceState*>(call.state)->call + 1; }

__device__ __forceinline__ WaitContext wait_context(const ScheduleCall& call) {
  return {reinterpret_cast<DeviceState*>(call.state),
          reinterpret_cast<FaultRecord*>(call.fault),
          &call.peers,
          call.rank,
          call.ep_size,
          current_call(call),
          call.timeout_nanoseconds};
}

// An id that no expert has is written as -1, so that nothing after it goes out of bounds; the record tells the host.
__device__ void report_route(const ScheduleCall& call, int64_t kind, int64_t token, int64_t slot, int64_t expert) {
  FaultRecord* record = reinterpret_cast<FaultRecord*>(call.fault);
  record->call = current_call(call);
  record->rank = call.rank;
  record->detail[0] = kind;
  record->detail[1] = token;
  record->detail[2] = slot;
  record->detail[3] = expert;
  ptx::store_release_system(&record->code, 3);
}

// The id of route `i` of this rank, checked: -1 where it is bad, which is reported.
__device__ __forceinline__ int32_t checked_route(const ScheduleCall& call, int64_t i) {
  const auto id = [&](int64_t at) {
    return call.wide_ids != 0 ? reinterpret_cast<const int64_t*>(call.topk_experts)[at]
                              : static_cast<int64_t>(reinterpret_cast<const int32_t*>(call.topk_experts)[at]);
  };
  // Routes of a rank are fewer than 2^31; a division of 64-bit numbers would take longer than all the rest.
  const int64_t expert = id(i), token = static_cast<uint32_t>(i) / static_cast<uint32_t>(call.topk), slot = i - token * call.topk;
  if (expert < -1 || expert >= call.num_local_experts * call.ep_size) {
    report_route(call, 1, token, slot, expert);
    return -1;
  }
  for (int64_t earlier = token * call.topk; expert != -1 && earlier < i; ++earlier) {
    if (id(earlier) == expert) {
      report_route(call, 2, token, slot, expert);
      return -1;
    }
  }
  return static_cast<int32_t>(expert);
}

__device__ __forceinline__ int32_t* routes_of(const ScheduleCall& call, int64_t rank, int64_t parity) {
  return reinterpret_cast<int32_t*>(call.peers.routes[rank]) + parity * call.max_tokens * call.topk;
}

__global__ void __launch_bounds__(kPublishThreads) publish_kernel(const __grid_constant__ ScheduleParams params) {
  ptx::allow_next_kernel();
  const ScheduleCall& call = params.call;
  const int64_t number = current_call(call), parity = number % 2;
  const int64_t routes = call.num_tokens * call.topk;
  int32_t* shared_routes = routes_of(call, call.rank, parity);
  int32_t* own = reinterpret_cast<int32_t*>(call.own_routes);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kPublishThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPublishThreads + threadIdx.x; i < routes; i += threads) {
    shared_routes[i] = own[i] = checked_route(call, i);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceState* state = reinterpret_cast<DeviceState*>(call.state);
  __threadfence_system();
  if (atomicAdd(&state->schedule_blocks, 1u) + 1 != gridDim.x) return;
  state->schedule_blocks = 0;
  if (state->aborted != 0) return;
  reinterpret_cast<int64_t*>(call.peers.num_tokens[call.rank])[parity] = call.num_tokens;
  __threadfence_system();
  for (int64_t peer = 0; peer < call.ep_size; ++peer) {
    ptx::store_release_system(reinterpret_cast<int64_t*>(call.peers.flags[peer]) + call.rank * kFlagWords + kFlagEntered, number);
  }
}

// Counts of one chunk's routes by local expert, and the local experts, over all threads of a block; `visit(i)` tells that of route i of the
// chunk, or -1.
template <int kThreads, typename Visit>
__device__ __forceinline__ void count_chunk(const ScheduleParams& params, int32_t (&counts)[kMaxLocalExperts], Visit visit) {
  const int64_t experts = params.call.num_local_experts;
  int16_t* local = params.local_experts + static_cast<int64_t>(blockIdx.x) * kChunkRoutes;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kChunkRoutes / kThreads; ++step) {
    const int at = step * kThreads + static_cast<int>(threadIdx.x);
    const int32_t expert = visit(at);
    local[at] = static_cast<int16_t>(expert);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  int32_t* out = params.chunk_counts + static_cast<int64_t>(blockIdx.x) * experts;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) out[e] = counts[e];
}

// One rank: nobody to wait for, nobody to publish to. A block a chunk.
__global__ void __launch_bounds__(kPublishThreads) check_and_count_kernel(const __grid_constant__ ScheduleParams params) {
  ptx::allow_next_kernel();
  __shared__ int32_t counts[kMaxLocalExperts];
  const ScheduleCall& call = params.call;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunkRoutes, routes = call.num_tokens * call.topk;
  const bool aborted = reinterpret_cast<const DeviceState*>(call.state)->aborted != 0;
  int32_t* own = reinterpret_cast<int32_t*>(call.own_routes);
  count_chunk<kPublishThreads>(params, counts, [&](int at) {
    const int64_t i = first + at;
    if (i >= routes) return -1;
    const int32_t expert = checked_route(call, i);
    own[i] = expert;
    return aborted ? -1 : expert;
  });
}

// One warp's part of a chunk: the local experts of its routes, 32 a step, and how many routes of the same expert come before each in the part.
struct ChunkPart {
  static constexpr int kRoutes = kChunkRoutes / kScatterWarps, kSteps = kRoutes / 32;
  int32_t experts[kSteps];
  int32_t before[kSteps];
};
static_assert(kChunkRoutes % (kScatterWarps * 32) == 0, "whole steps of whole warps");

__device__ __forceinline__ ChunkPart load_part(const ScheduleParams& params, int64_t chunk, uint32_t warp, uint32_t lane) {
  ChunkPart part;
  const int16_t* local = params.local_experts + chunk * kChunkRoutes + warp * ChunkPart::kRoutes;
#pragma unroll
  for (int step = 0; step < ChunkPart::kSteps; ++step) part.experts[step] = local[step * 32 + lane];
  return part;
}

// `counts` [E_local], in shared memory: zeros, then the number of the part's routes of each expert.
__device__ __forceinline__ void count_part(ChunkPart& part, int32_t* counts, uint32_t lane) {
#pragma unroll
  for (int step = 0; step < ChunkPart::kSteps; ++step) {
    const int32_t expert = part.experts[step];
    const uint32_t same = __match_any_sync(0xffffffffu, expert);
    const int32_t earlier = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    part.before[step] = earlier + __popc(same & ((1u << lane) - 1));
    if (expert >= 0 && __ffs(same) - 1 == static_cast<int>(lane)) counts[expert] = earlier + __popc(same);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ ScheduleParams params) {
  ptx::allow_next_kernel();
  ptx::wait_previous_kernel();
  __shared__ int32_t counts[kMaxLocalExperts];
  __shared__ bool ready;
  const ScheduleCall& call = params.call;
  if (threadIdx.x == 0) ready = wait_peers(wait_context(call), kFlagEntered, kPhaseSchedule);
  __syncthreads();
  const int64_t parity = current_call(call) % 2, rank = blockIdx.x / params.chunks_per_rank;
  const int64_t first = blockIdx.x % params.chunks_per_rank * kChunkRoutes;
  const int64_t routes = ready ? reinterpret_cast<const int64_t*>(call.peers.num_tokens[rank])[parity] * call.topk : 0;
  const int64_t allocated = call.max_tokens * call.topk;
  const int32_t* ids = routes_of(call, rank, parity);
  const int32_t first_expert = static_cast<int32_t>(call.rank * call.num_local_experts);
  count_chunk<kCountThreads>(params, counts, [&](int at) {
    const int64_t i = first + at;
    // Loaded before the number of tokens is known: it comes from a peer, too.
    const int32_t expert = ready && i < allocated ? ids[i] - first_expert : -1;
    return i < routes && expert >= 0 && expert < call.num_local_experts ? expert : -1;
  });
}

// Every block adds up all chunks' counts for itself: positions of its own chunk's routes, rows and padded offsets of the experts. Then it
// scatters the chunk, and fills a share of the padding, and of the rows behind the last expert, with -1.
//
// Four blocks a multiprocessor: with fewer registers than that leaves, the compiler would put the loads of counts one behind the other.
__global__ void __launch_bounds__(kScatterThreads, 4) scatter_kernel(const __grid_constant__ ScheduleParams params) {
  ptx::allow_next_kernel();
  ptx::wait_previous_kernel();
  __shared__ int32_t cursor[kMaxLocalExperts];
  __shared__ int32_t expert_rows[kMaxLocalExperts];
  __shared__ int32_t part_cursor[kScatterWarps][kMaxLocalExperts];
  __shared__ int64_t offsets[kMaxLocalExperts + 1];
  __shared__ bool overflow;
  const ScheduleCall& call = params.call;
  const int64_t experts = call.num_local_experts, chunks = params.chunks_per_rank * call.ep_size, chunk = blockIdx.x;
  // Counted on before the call number moves on, below.
  const int64_t number = current_call(call);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ChunkPart part = load_part(params, chunk, warp, lane);
  for (int64_t expert = threadIdx.x; expert < experts; expert += kScatterThreads) {
    cursor[expert] = expert_rows[expert] = 0;
#pragma unroll
    for (int w = 0; w < kScatterWarps; ++w) part_cursor[w][expert] = 0;
  }
  __syncthreads();
  // Groups of threads as wide as the experts, each with a share of the chunks.
  const uint32_t width = static_cast<uint32_t>(min_of(experts, kScatterThreads)), groups = kScatterThreads / width;
  const uint32_t group = threadIdx.x / width;
  if (group < groups) {
    const int64_t share = (gridDim.x + groups - 1) / groups, begin = group * share, end = min_of(begin + share, chunks);
    for (int64_t expert = threadIdx.x % width; expert < experts; expert += width) {
      int32_t before = 0, sum = 0;
      constexpr int kUnroll = 16;
      for (int64_t first = begin; first < end; first += kUnroll) {
        int32_t counts[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) counts[i] = first + i < end ? params.chunk_counts[(first + i) * experts + expert] : 0;
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          sum += counts[i];
          if (first + i < chunk) before += counts[i];
        }
      }
      if (before != 0) atomicAdd(&cursor[expert], before);
      if (sum != 0) atomicAdd(&expert_rows[expert], sum);
    }
  }
  __syncwarp();
  count_part(part, part_cursor[warp], lane);
  __syncthreads();
  if (warp == 0) {
    int64_t rows = 0;
    for (int64_t first = 0; first < experts; first += 32) {
      const int64_t e = first + lane;
      const int64_t padded = e < experts ? ceil_div(expert_rows[e], kBlockRows) * kBlockRows : 0;
      const int64_t sum = sum_to_lane(padded, lane);
      if (e < experts) offsets[e] = rows + sum - padded;
      rows += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) {
      offsets[experts] = rows;
      overflow = rows > call.capacity_rows;
    }
  }
  // Where each warp's first route of an expert stands among the expert's rows.
  for (int64_t e = threadIdx.x; e < experts; e += kScatterThreads) {
    int32_t before = cursor[e];
#pragma unroll
    for (int w = 0; w < kScatterWarps; ++w) {
      const int32_t count = part_cursor[w][e];
      part_cursor[w][e] = before;
      before += count;
    }
  }
  __syncthreads();
  if (chunk == 0) {
    // Too many rows: nothing is dropped. With no rows at all the passes of this schedule do nothing, and the host raises.
    for (int64_t e = threadIdx.x; e <= experts; e += kScatterThreads) {
      reinterpret_cast<int64_t*>(call.expert_row_offsets)[e] = overflow ? 0 : offsets[e];
      if (e < experts) reinterpret_cast<int32_t*>(call.expert_rows)[e] = expert_rows[e];
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<int64_t*>(call.num_rows)[0] = offsets[experts];
      if (overflow) {
        FaultRecord* record = reinterpret_cast<FaultRecord*>(call.fault);
        record->call = number;
        record->rank = call.rank;
        record->detail[0] = offsets[experts];
        record->detail[1] = call.capacity_rows;
        ptx::store_release_system(&record->code, 4);
        // No later pass of this rank enters; its peers find the reason where they look for a fault.
        reinterpret_cast<DeviceState*>(call.state)->aborted = 1;
        for (int64_t peer = 0; peer < call.ep_size; ++peer) {
          if (peer == call.rank) continue;
          int64_t* row = reinterpret_cast<int64_t*>(call.peers.flags[peer]) + call.rank * kFlagWords;
          row[kFlagStatusMissing] = offsets[experts];
          row[kFlagStatusLength] = call.capacity_rows;
          row[kFlagStatusCall] = number;
          ptx::store_release_system(row + kFlagStatusCode, kStatusOverflow);
        }
      }
    }
  }
  int32_t* ranks = reinterpret_cast<int32_t*>(call.row_source_rank);
  int32_t* slots = reinterpret_cast<int32_t*>(call.row_source_slot);
  if (!overflow) {
    const uint32_t chunks_per_rank = static_cast<uint32_t>(params.chunks_per_rank), rank = blockIdx.x / chunks_per_rank;
    const uint32_t first_slot = (blockIdx.x - rank * chunks_per_rank) * kChunkRoutes + warp * ChunkPart::kRoutes;
#pragma unroll
    for (int step = 0; step < ChunkPart::kSteps; ++step) {
      const int32_t expert = part.experts[step];
      if (expert < 0) continue;
      const int64_t row = offsets[expert] + part_cursor[warp][expert] + part.before[step];
      ranks[row] = static_cast<int32_t>(rank);
      slots[row] = static_cast<int32_t>(first_slot + step * 32 + lane);
    }
  }
  const int64_t used = overflow ? 0 : offsets[experts];
  for (int64_t e = chunk; !overflow && e < experts; e += gridDim.x) {
    for (int64_t row = offsets[e] + expert_rows[e] + threadIdx.x; row < offsets[e + 1]; row += kScatterThreads) {
      ranks[row] = -1;
      slots[row] = -1;
    }
  }
  for (int64_t row = used + chunk * kScatterThreads + threadIdx.x; row < call.capacity_rows;
       row += static_cast<int64_t>(gridDim.x) * kScatterThreads) {
    ranks[row] = -1;
    slots[row] = -1;
  }
  // The call ends when every block has read its number.
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceState* state = reinterpret_cast<DeviceState*>(call.state);
  __threadfence();
  if (atomicAdd(&state->schedule_blocks, 1u) + 1 != gridDim.x) return;
  state->schedule_blocks = 0;
  state->call = number;
}

int launch_schedule(const ScheduleCall& call, cudaStream_t stream) {
  ScheduleParams params;
  params.call = call;
  params.chunks_per_rank = chunks_of_rank(call.max_tokens, call.topk);
  params.chunk_counts = reinterpret_cast<int32_t*>(call.scratch);
  params.local_experts = reinterpret_cast<int16_t*>(params.chunk_counts + params.chunks_per_rank * call.ep_size * call.num_local_experts);
  const int64_t routes = call.num_tokens * call.topk;
  const int publish_blocks = static_cast<int>(routes == 0 ? 1 : min_of(ceil_div(routes, kPublishThreads), 512));
  const int chunks = static_cast<int>(params.chunks_per_rank * call.ep_size);
  int code;
  if (call.ep_size == 1) {
    check_and_count_kernel<<<chunks, kPublishThreads, 0, stream>>>(params);
    code = cudaGetLastError();
  } else {
    publish_kernel<<<publish_blocks, kPublishThreads, 0, stream>>>(params);
    code = cudaGetLastError();
    if (code == cudaSuccess) code = launch_chained(count_kernel, chunks, kCountThreads, 0, stream, params);
  }
  if (code == cudaSuccess) code = launch_chained(scatter_kernel, chunks, kScatterThreads, 0, stream, params);
  return code;
}

}  // namespace

int load_schedule_kernels() {
  cudaFuncAttributes attributes;
  int code = cudaFuncGetAttributes(&attributes, publish_kernel);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, check_and_count_kernel);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, count_kernel);
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, scatter_kernel);
  return code;
}

}  // namespace mok

extern "C" int mok_sm90_schedule(const mok::ScheduleCall* call, void* stream) {
  return mok::launch_schedule(*call, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t mok_schedule_call_bytes() { return sizeof(mok::ScheduleCall); }

extern "C" int64_t mok_sm90_schedule_scratch_words(int64_t ep_size, int64_t max_tokens, int64_t topk, int64_t num_local_experts) {
  const int64_t chunks = mok::chunks_of_rank(max_tokens, topk) * ep_size;
  return chunks * num_local_experts + mok::local_expert_words(chunks);
}
