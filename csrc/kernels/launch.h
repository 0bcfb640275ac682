// C interface between the operators and the kernels: plain data in, a CUDA error code out. No torch types, no exceptions.
#pragma once

#include <cstdint>

namespace mok {

constexpr int kMaxRanks = 8;
constexpr int kMaxLocalExperts = 256;
// Words of one peer's row of flags (mok_megatron/protocol.py names them). Of the three status records the kernels write the fatal one.
constexpr int kFlagWords = 15;
enum FlagWord : int {
  kFlagEntered = 0,
  kFlagDone = 1,
  kFlagSignature = 2,
  kFlagStatusCall = 11,
  kFlagStatusCode = 12,
  kFlagStatusMissing = 13,
  kFlagStatusLength = 14
};
constexpr int64_t kStatusTimedOut = 2, kStatusOverflow = 4;  // overflow: `missing` holds the rows needed, `length` those available

// A launch returns a CUDA error code, or one of these plus the expert's index: its matrix does not lie on 16 bytes.
constexpr int kMisalignedW13 = 100'000, kMisalignedW2 = 101'000;

// What a wait that ran out leaves in host memory, for the thread that raises it.
struct FaultRecord {
  int64_t code;   // 0: none; 1: a flag or counter did not arrive in time; 2: a peer reported a fault; 3: bad route; 4: too many rows
  int64_t phase;  // 0: entered, 1: done, 2: a local counter, 3: schedule exchange
  int64_t call;
  int64_t rank;
  int64_t missing;  // bit mask of ranks
  int64_t expected;
  int64_t seen;
  int64_t waited_nanoseconds;
  int64_t detail[8];
};

// Words of a rank that its kernels share. Zero when the workspace is made; every pass leaves it as it found it, but for the call number.
struct DeviceState {
  int64_t call;  // finished calls
  uint32_t compute_ticket;
  uint32_t comm_ticket;
  uint32_t first_ticket;
  uint32_t exited;
  uint32_t arrived;
  uint32_t aborted;
  uint32_t entered_blocks;
  uint32_t schedule_blocks;
};

// Symmetric memory of every rank, as this rank maps it.
struct PeerMemory {
  int64_t x[kMaxRanks];                 // bf16 [num_local_tokens, H]
  int64_t router_weights[kMaxRanks];    // fp32 [num_local_tokens, K]
  int64_t combine[kMaxRanks];           // bf16 [num_local_tokens * K, H]
  int64_t flags[kMaxRanks];             // int64 [ranks, kFlagWords]
  int64_t routes[kMaxRanks];            // int32 [2, num_local_tokens, K]
  int64_t num_tokens[kMaxRanks];        // int64 [2]
  int64_t dy[kMaxRanks];                // bf16 [num_local_tokens, H]
  int64_t d_router_weights[kMaxRanks];  // fp32 [num_local_tokens * K]
};

struct ForwardCall {
  PeerMemory peers;
  int64_t rank, ep_size, num_tokens, topk, hidden, intermediate, num_local_experts;
  int64_t minibatch_blocks, macrobatch_blocks, capacity_blocks;
  int64_t num_comm_sms, sm_reserve, timeout_nanoseconds;
  // Schedule tables (device).
  int64_t row_source_rank, row_source_slot, expert_rows, expert_row_offsets, topk_experts;
  // Inputs and outputs (device). `gate_up` 0: nothing is kept for the backward.
  int64_t x, router_weights, y, x_rows, gate_up;
  // Scratch of the workspace (device).
  int64_t ring_weights, ring_activation, weight_maps, counters, records, state;
  int64_t fault;  // FaultRecord in mapped host memory
  int64_t w13[kMaxLocalExperts], w2[kMaxLocalExperts];
};

// A backward, or a recompute of a forward's context: then `x_rows` and `gate_up` are written, and dy, dx, gradients and all rings are unused.
struct BackwardCall {
  PeerMemory peers;
  int64_t rank, ep_size, num_tokens, topk, hidden, intermediate, num_local_experts;
  int64_t minibatch_blocks, macrobatch_blocks, capacity_blocks;
  int64_t sm_reserve, timeout_nanoseconds;
  // Schedule tables (device).
  int64_t row_source_rank, row_source_slot, expert_rows, expert_row_offsets, topk_experts;
  // Inputs and outputs (device).
  int64_t x, dy, router_weights, dx, d_router_weights, x_rows, gate_up;
  // Scratch of the workspace (device). `scratch`: fp32 sums of an expert that straddles two macrobatches, a tile of 128 x 256 after the other.
  int64_t ring_x, ring_dy, ring_gate_up, ring_activation, ring_d_gate_up, ring_weights, ring_partials, scratch;
  int64_t weight_maps, counters, records, state;
  int64_t fault;  // FaultRecord in mapped host memory
  int64_t w13[kMaxLocalExperts], w2[kMaxLocalExperts];
  // Gradients: an address on 16 bytes, + 1: overwritten instead of accumulated, + 2: bf16 instead of fp32. 0: none is wanted.
  int64_t grads13[kMaxLocalExperts], grads2[kMaxLocalExperts];
};

struct ScheduleCall {
  PeerMemory peers;
  int64_t rank, ep_size, num_tokens, max_tokens, topk, num_local_experts, capacity_rows;
  int64_t timeout_nanoseconds;
  int64_t topk_experts;  // int32 or int64 [num_tokens, K]
  int64_t wide_ids;      // 1: int64
  int64_t row_source_rank, row_source_slot, expert_rows, expert_row_offsets, num_rows, own_routes;
  int64_t scratch;  // int32 [schedule_scratch_words()]
  int64_t state, fault;
};

}  // namespace mok

namespace mok {
int load_schedule_kernels();
int load_backward_kernels();
int load_route_kernels();

// Of a router's probabilities.
constexpr int64_t kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat64 = 3;
}  // namespace mok

extern "C" {
#define MOK_EXPORT __attribute__((visibility("default")))
// Each returns a cudaError_t, or a code of a misaligned weight; `stream` is a cudaStream_t.
// Loads all kernels on the current device. Without it the first launch of each would, and a load waits for kernels that run: with one of a
// peer's or of a collective among them, that is a deadlock between ranks.
MOK_EXPORT int mok_sm90_load();
MOK_EXPORT int mok_sm90_forward(const mok::ForwardCall* call, void* stream);
MOK_EXPORT int mok_sm90_backward(const mok::BackwardCall* call, void* stream);
MOK_EXPORT int mok_sm90_recompute(const mok::BackwardCall* call, void* stream);
MOK_EXPORT int mok_sm90_schedule(const mok::ScheduleCall* call, void* stream);
// Of a map [tokens, experts] of bytes and probabilities of the same shape: int32 ids and fp32 weights [tokens, topk].
MOK_EXPORT int mok_sm90_compact_routes(int64_t map, int64_t probs, int64_t dtype, int64_t ids, int64_t weights, int64_t tokens, int64_t experts,
                                       int64_t topk, void* stream);
// fp32 gradients [tokens, topk] to the probabilities' [tokens, experts].
MOK_EXPORT int mok_sm90_spread_gradients(int64_t grads, int64_t ids, int64_t dense, int64_t dtype, int64_t tokens, int64_t experts, int64_t topk,
                                         void* stream);
MOK_EXPORT int64_t mok_sm90_schedule_scratch_words(int64_t ep_size, int64_t max_tokens, int64_t topk, int64_t num_local_experts);
MOK_EXPORT int64_t mok_num_counters(int64_t capacity_blocks, int64_t num_local_experts);
// Bytes of the table of tasks of a forward pass.
MOK_EXPORT int64_t mok_forward_record_bytes(int64_t capacity_blocks, int64_t max_tokens, int64_t hidden, int64_t intermediate);
// Bytes of the table of tasks of a backward pass, and of the sums of an expert that straddles two macrobatches.
MOK_EXPORT int64_t mok_backward_record_bytes(int64_t capacity_blocks, int64_t macrobatch_blocks, int64_t max_tokens, int64_t hidden,
                                             int64_t intermediate, int64_t num_local_experts);
MOK_EXPORT int64_t mok_backward_scratch_bytes(int64_t hidden, int64_t intermediate);
MOK_EXPORT int64_t mok_forward_call_bytes();
MOK_EXPORT int64_t mok_backward_call_bytes();
MOK_EXPORT int64_t mok_schedule_call_bytes();
}
