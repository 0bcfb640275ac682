// What every megakernel does around its roles: start, in step with its cluster and behind the kernel before it; leave, with all counters at zero
// for the next pass. And the host's side of a launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "../task/plan.h"
#include "sm90_tickets.cuh"

namespace mok {

constexpr int kThreads = 384;
constexpr uint32_t kProducerRegisters = 72, kConsumerRegisters = 216;

// By one thread. `kStoredArrivals`: of the consumers, when they are through with a tile. Addresses and not the struct: only in the kernel itself
// does the compiler see that these pointers are to shared memory.
template <uint32_t kStoredArrivals>
__device__ __forceinline__ void init_barriers(uint32_t full, uint32_t empty, uint32_t tile_full, uint32_t tile_loaded, uint32_t tile_stored,
                                              uint32_t ticket_full, uint32_t ticket_empty) {
  for (int i = 0; i < kStages; ++i) {
    ptx::barrier_init(full + i * 8, 1);
    ptx::barrier_init(empty + i * 8, kConsumerWarps * kClusterSize);
  }
  for (int i = 0; i < kSlots; ++i) {
    ptx::barrier_init(tile_full + i * 8, 1);
    ptx::barrier_init(tile_loaded + i * 8, 1);
    ptx::barrier_init(tile_stored + i * 8, kStoredArrivals);
    ptx::barrier_init(ticket_full + i * 8, 1);
    ptx::barrier_init(ticket_empty + i * 8, 1);
  }
  ptx::fence_barrier_init();
}

// Afterwards the kernel before this one is through, and barriers and context are in place for the whole cluster.
template <typename Params, typename Shared>
__device__ __forceinline__ void start_pass(const Params& params, Shared& shared) {
  ptx::wait_previous_kernel();
  if (threadIdx.x == 0) {
    shared.context = {
        params.state, params.fault, &params.peers, params.shape.rank, params.shape.ep_size, params.state->call + 1, params.timeout_nanoseconds};
  }
  __syncthreads();
  ptx::cluster_sync();
}

// The last CTA waits for the peers, clears what the pass has counted, and makes the next call's number current. All of its threads call
// `clear_counters(plan)`, for the counters of blocks and experts.
template <typename Params, typename Shared, typename ClearCounters>
__device__ __forceinline__ void leave_pass(const Params& params, Shared& shared, ClearCounters clear_counters) {
  __syncwarp();
  __syncthreads();
  // A CTA must not leave while its partner may still arrive at its barriers.
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t exited = atomicAdd(&params.state->exited, 1u);
    __threadfence();
    shared.last = exited + 1 == gridDim.x;
    if (shared.last && !pass_aborted(shared.context)) wait_peers(shared.context, kFlagDone, kPhaseDone);
  }
  __syncthreads();
  if (!shared.last) return;
  Plan plan;
  plan.shape = params.shape;
  clear_counters(plan);
  __syncthreads();
  if (threadIdx.x == 0) {
    params.counters[plan.transfers_done()] = 0;
    params.state->compute_ticket = 0;
    params.state->comm_ticket = 0;
    params.state->first_ticket = 0;
    if constexpr (Shared::kCountsArrivals) params.state->arrived = 0;
    params.state->exited = 0;
    params.state->call += 1;
  }
}

// Multiprocessors of the current device. The kernel's limit on dynamic shared memory is raised at the first call: the setting is one of each
// device.
template <auto kKernel, uint32_t kBytes>
int prepare_device(int* sms) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  int code = cudaGetDevice(&device);
  if (code != cudaSuccess) return code;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  *sms = known[device].load();
  if (*sms != 0) return cudaSuccess;
  code = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
  if (code == cudaSuccess) code = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (code == cudaSuccess) known[device].store(*sms);
  return code;
}

}  // namespace mok
