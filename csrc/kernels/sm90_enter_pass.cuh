// What the kernels before both megakernels have in common: copying the inputs to symmetric memory, and telling the peers.
#pragma once

#include "../ptx/sm90.cuh"
#include "../task/tiles.h"
#include "launch.h"

namespace mok {

constexpr int kEnterThreads = 512;   // copying
constexpr int kDecodeThreads = 128;  // decoding tickets alone

struct EnterGrid {
  int blocks, threads;
};

// With nothing to copy a few small blocks do, a task a thread, and the megakernel's blocks come up on the other multiprocessors.
inline EnterGrid enter_grid(bool copies, int sms, int64_t most_tasks) {
  if (copies) return {sms, kEnterThreads};
  return {static_cast<int>(min_of(sms, ceil_div(most_tasks, kDecodeThreads))), kDecodeThreads};
}

// By all threads of the grid, `decode(ticket)` each of them; the threads from number `first` on come first. Neighbours are of one warp, since
// they are tasks of one kind; the next 32 are of another block, since stacks and instructions of many such warps do not fit into the L1 of one
// multiprocessor.
template <typename Decode>
__device__ __forceinline__ void decode_tickets(int64_t first, int64_t tickets, Decode decode) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t warp = threadIdx.x / 32 * static_cast<int64_t>(gridDim.x) + blockIdx.x;
  int64_t ticket = warp * 32 + threadIdx.x % 32 - first % threads;
  if (ticket < 0) ticket += threads;
  for (; ticket < tickets; ticket += threads) decode(ticket);
}

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
