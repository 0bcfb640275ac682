// Tensor maps of row-major bf16 or fp32 matrices, for boxes of 128 bytes of columns in the 128-byte swizzle.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace mok {

// `address` null: a template whose address is set on the device. The driver's function is looked up, so that the library needs no libcuda to
// load.
inline int encode_tensor_map(CUtensorMap* map, void* address, int64_t rows, int64_t columns, uint32_t box_rows, bool fp32 = false) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess)
      return Encode(nullptr);
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  // A template gets some aligned address: the driver refuses none.
  void* base = address != nullptr ? address : reinterpret_cast<void*>(uintptr_t{1} << 20);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * (fp32 ? 4 : 2)};
  const cuuint32_t box[2] = {fp32 ? 32u : 64u, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, sizes, pitch, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace mok
