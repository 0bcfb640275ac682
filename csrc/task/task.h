// One task of a pass: what it computes, what it waits for, what it announces, and which ring slots it touches.
#pragma once

#include <cstdint>

namespace mok {

enum class Pass : int32_t { kForward = 0, kRecompute = 1, kBackward = 2 };

// A pass has two ticket sequences; `order` of a task gives its place in the one total order over both.
enum class Stream : int32_t { kCompute = 0, kComm = 1 };

enum class TaskKind : int32_t {
  kDispatch = 0,    // pull x rows (and router weights) of a quarter block
  kDispatchDy = 1,  // pull dy rows (and router weights) of a quarter block
  kGemm1 = 2,       // gate/up projection and SwiGLU
  kGemm2 = 3,       // down projection, rows pushed to their source rank
  kDgrad2 = 4,      // gradient of the down projection's input, SwiGLU backward
  kDgrad1 = 5,      // gradient of the gate/up projection's input, rows pushed to their source rank
  kWgrad2 = 6,
  kWgrad13 = 7,
  kZero = 8,        // weight-gradient tile of an expert without rows
  kSignalDone = 9,  // tell every peer that the last pull from it and push to it are complete
  kReduce = 10,     // sum of the K rows of a token
};

enum class RingBuffer : int32_t {
  kX = 0,
  kGateUp = 1,
  kActivation = 2,
  kDy = 3,
  kDGateUp = 4,
  kSavedX = 5,  // the context's rows: read by the backward's first macrobatch
  kSavedGateUp = 6,
};

enum AccessMode : int32_t { kRead = 1, kWrite = 2, kRelease = 4 };  // kRelease: the slot's next writer waits for this task's counter

enum class PeerWait : int32_t { kNone = 0, kEntered = 1, kDone = 2 };

// Every counter in [first, first + count) must have reached `target`.
struct CounterWait {
  int64_t first = 0;
  int64_t count = 0;
  int64_t target = 0;
};

struct RingAccess {
  int32_t buffer = 0;
  int32_t mode = 0;
  int64_t first_block = 0;  // ring slot in blocks of 128 rows
  int64_t num_blocks = 0;
};

constexpr int kMaxWaits = 4;
constexpr int kMaxBumps = 2;
constexpr int kMaxAccesses = 4;

struct Task {
  TaskKind kind = TaskKind::kReduce;
  Stream stream = Stream::kCompute;
  PeerWait peer_wait = PeerWait::kNone;
  int64_t order = 0;
  int64_t macrobatch = -1;
  int64_t minibatch = -1;
  int64_t block = -1;       // row block of the rank's schedule, -1 where a task spans several
  int64_t ring_block = -1;  // its slot
  int64_t first_row = 0;    // dispatch: row in the schedule; reduce: token
  int64_t num_rows = 0;
  int64_t expert = -1;
  int64_t tile_m = 0;
  int64_t tile_n = 0;
  int64_t first_block = 0;  // weight gradients: the expert's row blocks inside this macrobatch
  int64_t num_blocks = 0;
  bool continues = false;  // weight gradients: start from the scratch tile of the previous macrobatch
  bool continued = false;  // weight gradients: leave the sum in the scratch tile for the next macrobatch
  int num_waits = 0;
  CounterWait waits[kMaxWaits];
  int num_bumps = 0;
  int64_t bumps[kMaxBumps] = {0, 0};
  int num_accesses = 0;
  RingAccess accesses[kMaxAccesses];
};

}  // namespace mok
