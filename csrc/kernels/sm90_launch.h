// Launches of a chain of kernels, each of which may come up while the one before it still runs.
#pragma once

#include <cuda_runtime.h>

namespace mok {

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
