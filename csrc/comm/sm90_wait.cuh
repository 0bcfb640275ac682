// Bounded waits. A wait that runs out, or that finds a peer at fault, writes a record for the host, tells the peers, and ends the pass: every
// other wait of this GPU then returns too.
#pragma once

#include "../kernels/launch.h"
#include "../ptx/sm90.cuh"

namespace mok {

struct WaitContext {
  DeviceState* state;
  FaultRecord* fault;  // host memory
  const PeerMemory* peers;
  int64_t rank;
  int64_t ep_size;
  int64_t call;
  int64_t timeout_nanoseconds;
};

enum WaitPhase : int64_t { kPhaseEntered = 0, kPhaseDone = 1, kPhaseCounter = 2, kPhaseSchedule = 3 };

__device__ __forceinline__ bool pass_aborted(const WaitContext& context) { return ptx::load_acquire_gpu(&context.state->aborted) != 0; }

static __device__ __noinline__ void abort_pass(const WaitContext& context, int64_t code, int64_t phase, int64_t missing, int64_t expected,
                                               int64_t seen, int64_t waited) {
  if (atomicExch(&context.state->aborted, 1u) != 0) return;
  FaultRecord* record = context.fault;
  record->phase = phase;
  record->call = context.call;
  record->rank = context.rank;
  record->missing = missing;
  record->expected = expected;
  record->seen = seen;
  record->waited_nanoseconds = waited;
  for (int64_t peer = 0; peer < context.ep_size; ++peer) {
    record->detail[peer] = ptx::load_acquire_system(reinterpret_cast<const int64_t*>(context.peers->flags[context.rank]) + peer * kFlagWords +
                                                    (phase == kPhaseDone ? kFlagDone : kFlagEntered));
  }
  ptx::store_release_system(&record->code, code);
  for (int64_t peer = 0; peer < context.ep_size; ++peer) {
    if (peer == context.rank) continue;
    int64_t* row = reinterpret_cast<int64_t*>(context.peers->flags[peer]) + context.rank * kFlagWords;
    row[kFlagStatusMissing] = missing;
    row[kFlagStatusCall] = context.call;
    ptx::store_release_system(row + kFlagStatusCode, kStatusTimedOut);
  }
}

// Polls between two looks at the clock and at the abort word.
constexpr uint32_t kPollsPerLook = 64;
// A local counter waits longer than a flag of a peer: the wait that can name the missing rank must be the one that reports.
constexpr int64_t kCounterGrace = 3'000'000'000;
// And the flag that a peer is done longer than the one that it is there: final sums may be waited for from a pass's start on, where the tasks
// before them have no rows, and whoever waits for a missing rank, this one too, is not done either. They are not missing.
constexpr int64_t kDoneGrace = kCounterGrace / 2;

// A waiter with nothing else to do.
struct Idle {
  __device__ __forceinline__ void operator()() const {}
};

// `meanwhile` is called between polls, here and below.
template <typename Meanwhile = Idle>
__device__ __forceinline__ bool wait_counter(const WaitContext& context, const uint32_t* counter, uint32_t target, Meanwhile meanwhile = {}) {
  uint64_t start = 0;
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t seen = ptx::load_acquire_gpu(counter);
    if (seen >= target) return true;
    if (polls % kPollsPerLook == 0) {
      if (pass_aborted(context)) return false;
      const uint64_t now = ptx::global_nanoseconds();
      if (start == 0) start = now;
      if (static_cast<int64_t>(now - start) > context.timeout_nanoseconds + kCounterGrace) {
        abort_pass(context, 1, kPhaseCounter, 0, target, seen, now - start);
        return false;
      }
    }
    meanwhile();
    __nanosleep(32);
  }
}

// Until word `flag` of every peer's row has reached the call.
template <typename Meanwhile = Idle>
__device__ __forceinline__ bool wait_peers(const WaitContext& context, int flag, int64_t phase, Meanwhile meanwhile = {}) {
  const int64_t* rows = reinterpret_cast<const int64_t*>(context.peers->flags[context.rank]);
  const int64_t limit = context.timeout_nanoseconds + (phase == kPhaseDone ? kDoneGrace : 0);
  uint64_t start = 0;
  for (int64_t peer = 0; peer < context.ep_size; ++peer) {
    for (uint32_t polls = 1;; ++polls) {
      if (ptx::load_acquire_system(rows + peer * kFlagWords + flag) >= context.call) break;
      if (polls % kPollsPerLook == 0) {
        if (pass_aborted(context)) return false;
        const uint64_t now = ptx::global_nanoseconds();
        if (start == 0) start = now;
        const bool late = static_cast<int64_t>(now - start) > limit;
        int64_t missing = 0, seen = 0, reported = 0;
        for (int64_t other = 0; other < context.ep_size; ++other) {
          const int64_t* row = rows + other * kFlagWords;
          if (ptx::load_acquire_system(row + kFlagStatusCode) != 0) reported |= row[kFlagStatusMissing] | (1ll << 62);
          const int64_t value = ptx::load_acquire_system(row + flag);
          if (value < context.call) {
            missing |= 1ll << other;
            seen = value;
          }
        }
        if (reported != 0) {
          abort_pass(context, 2, phase, reported & ~(1ll << 62), context.call, seen, now - start);
          return false;
        }
        if (late && missing != 0) {
          abort_pass(context, 1, phase, missing, context.call, seen, now - start);
          return false;
        }
      }
      meanwhile();
      __nanosleep(64);
    }
  }
  return true;
}

}  // namespace mok
