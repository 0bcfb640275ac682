// What the kernels before both megakernels have in common: copying the inputs to symmetric memory, and telling the peers.
#pragma once

#include "../ptx/sm90.cuh"
#include "launch.h"

namespace mok {

constexpr int kEnterThreads = 512;

// By all threads of the grid. `Source` and `Count` may be references into a kernel's arguments: then they are read from there, not held.
template <typename Source = const uint4*, typename Count = int64_t>
__device__ __forceinline__ void copy_chunks(Source source, uint4* target, Count count, int64_t thread, int64_t threads) {
  constexpr int kUnroll = 4;
  int64_t at = thread;
  for (; at + (kUnroll - 1) * threads < count; at += kUnroll * threads) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = ptx::load_stream_16(source + at + i * threads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) target[at + i * threads] = values[i];
  }
  for (; at < count; at += threads) target[at] = source[at];
}

// By all threads of a block. The grid's last block tells every peer that this rank's inputs are in place. (References: the values are read where
// they are used, behind the fences, and hold no register before.)
template <typename Params>
__device__ __forceinline__ void announce_entered(const Params& params, const int64_t& rank, const int64_t& ep_size) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // One rank tells its own next kernel, which follows this one.
  if (ep_size > 1) __threadfence_system();
  if (atomicAdd(&params.state->entered_blocks, 1u) + 1 != gridDim.x) return;
  if (ep_size > 1) __threadfence_system();
  params.state->entered_blocks = 0;
  // After a fault this rank does not enter: its peers must not wait for rows that will not come.
  if (ptx::load_acquire_gpu(&params.state->aborted) != 0) return;
  const int64_t call = params.state->call + 1;
  for (int64_t peer = 0; peer < ep_size; ++peer) {
    ptx::store_release_system(reinterpret_cast<int64_t*>(params.peers.flags[peer]) + rank * kFlagWords + kFlagEntered, call);
  }
}

}  // namespace mok
