// Routes out of a router's boolean map, and the gradient of their probabilities back into the dense shape. A warp a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "launch.h"

namespace mok {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kWarps = 8;

struct Routes {
  const uint8_t* map;  // [T, E]
  const int32_t* ids;  // [T, K]
  int64_t tokens, experts;
  int32_t topk;
};

__device__ __forceinline__ int64_t token_of_warp() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

// Ids ascending, -1 behind the last. A token with more than K routes gets the id E, which no group has, in its first slot.
template <typename Probability>
__global__ void __launch_bounds__(32 * kWarps) compact_kernel(Routes routes, const Probability* probs, int32_t* ids, float* weights) {
  const int64_t token = token_of_warp();
  if (token >= routes.tokens) return;
  const uint32_t lane = threadIdx.x % 32;
  const int64_t row = token * routes.experts, slots = token * routes.topk;
  int32_t count = 0;
  for (int64_t base = 0; base < routes.experts; base += 32) {
    const int64_t expert = base + lane;
    const bool chosen = expert < routes.experts && routes.map[row + expert] != 0;
    const uint32_t mask = __ballot_sync(kAllLanes, chosen);
    const int32_t slot = count + __popc(mask & ((1u << lane) - 1));
    if (chosen && slot < routes.topk) {
      ids[slots + slot] = static_cast<int32_t>(expert);
      weights[slots + slot] = static_cast<float>(probs[row + expert]);
    }
    count += __popc(mask);
  }
  for (int32_t slot = count + static_cast<int32_t>(lane); slot < routes.topk; slot += 32) {
    ids[slots + slot] = -1;
    weights[slots + slot] = 0.0f;
  }
  if (count <= routes.topk) return;
  __syncwarp();  // the lane that wrote the first slot has done so
  if (lane == 0) {
    ids[slots] = static_cast<int32_t>(routes.experts);
    weights[slots] = 0.0f;
  }
}

// Zero where there is no route.
template <typename Probability>
__global__ void __launch_bounds__(32 * kWarps) spread_kernel(Routes routes, const float* grads, Probability* dense) {
  const int64_t token = token_of_warp();
  if (token >= routes.tokens) return;
  const uint32_t lane = threadIdx.x % 32;
  const bool has_slot = static_cast<int32_t>(lane) < routes.topk;
  const int32_t id = has_slot ? routes.ids[token * routes.topk + lane] : -1;
  const float grad = has_slot ? grads[token * routes.topk + lane] : 0.0f;
  for (int64_t base = 0; base < routes.experts; base += 32) {
    const int64_t expert = base + lane;
    float value = 0.0f;
    for (int32_t slot = 0; slot < routes.topk; ++slot) {
      const int32_t slot_id = __shfl_sync(kAllLanes, id, slot);
      const float slot_grad = __shfl_sync(kAllLanes, grad, slot);
      if (slot_id == expert) value = slot_grad;
    }
    if (expert < routes.experts) dense[token * routes.experts + expert] = static_cast<Probability>(value);
  }
}

// Calls `with(type)`, of which only the pointer's type counts.
template <typename With>
int with_dtype(int64_t dtype, With&& with) {
  switch (dtype) {
    case kFloat32:
      return with(static_cast<float*>(nullptr));
    case kBfloat16:
      return with(static_cast<__nv_bfloat16*>(nullptr));
    case kFloat16:
      return with(static_cast<__half*>(nullptr));
    case kFloat64:
      return with(static_cast<double*>(nullptr));
    default:
      return cudaErrorInvalidValue;
  }
}

bool is_good(const Routes& routes) { return routes.tokens > 0 && routes.experts > 0 && routes.topk > 0 && routes.topk <= 32; }

unsigned blocks_of(const Routes& routes) { return static_cast<unsigned>((routes.tokens + kWarps - 1) / kWarps); }

template <typename Probability>
int load_kernels_of() {
  cudaFuncAttributes attributes;
  const int code = cudaFuncGetAttributes(&attributes, compact_kernel<Probability>);
  return code == cudaSuccess ? cudaFuncGetAttributes(&attributes, spread_kernel<Probability>) : code;
}

}  // namespace

int load_route_kernels() {
  int code = cudaSuccess;
  for (int64_t dtype : {kFloat32, kBfloat16, kFloat16, kFloat64}) {
    if (code == cudaSuccess) code = with_dtype(dtype, [](auto* type) { return load_kernels_of<std::remove_pointer_t<decltype(type)>>(); });
  }
  return code;
}

}  // namespace mok

extern "C" int mok_sm90_compact_routes(int64_t map, int64_t probs, int64_t dtype, int64_t ids, int64_t weights, int64_t tokens, int64_t experts,
                                       int64_t topk, void* stream) {
  const mok::Routes routes = {reinterpret_cast<const uint8_t*>(map), nullptr, tokens, experts, static_cast<int32_t>(topk)};
  if (!mok::is_good(routes)) return cudaErrorInvalidValue;
  return mok::with_dtype(dtype, [&](auto* type) -> int {
    mok::compact_kernel<<<mok::blocks_of(routes), 32 * mok::kWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        routes, reinterpret_cast<const std::remove_pointer_t<decltype(type)>*>(probs), reinterpret_cast<int32_t*>(ids),
        reinterpret_cast<float*>(weights));
    return cudaGetLastError();
  });
}

extern "C" int mok_sm90_spread_gradients(int64_t grads, int64_t ids, int64_t dense, int64_t dtype, int64_t tokens, int64_t experts, int64_t topk,
                                         void* stream) {
  const mok::Routes routes = {nullptr, reinterpret_cast<const int32_t*>(ids), tokens, experts, static_cast<int32_t>(topk)};
  if (!mok::is_good(routes)) return cudaErrorInvalidValue;
  return mok::with_dtype(dtype, [&](auto* type) -> int {
    mok::spread_kernel<<<mok::blocks_of(routes), 32 * mok::kWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        routes, reinterpret_cast<const float*>(grads), reinterpret_cast<decltype(type)>(dense));
    return cudaGetLastError();
  });
}
