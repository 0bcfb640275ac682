// Functions that the megakernels evaluate per task on the device and that the host executor evaluates for the same tasks.
#pragma once

#if defined(__CUDACC__)
#define MOK_HOST_DEVICE __host__ __device__ inline
#else
#define MOK_HOST_DEVICE inline
#endif
