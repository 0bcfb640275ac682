// Launches of a chain of kernels, each of which may come up while the one before it still runs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mok {

// Bulk copies read matrices on 16 bytes. 0, or `code` plus the index of the first address that is not.
inline int check_aligned(const int64_t* addresses, int64_t count, int code) {
  for (int64_t i = 0; i < count; ++i) {
    if (addresses[i] % 16 != 0) return code + static_cast<int>(i);
  }
  return cudaSuccess;
}

// The kernel must wait for the previous one before it reads or writes anything that one touches.
template <typename Params>
int launch_chained(void (*kernel)(Params), int grid, int threads, int shared_bytes, cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace mok
