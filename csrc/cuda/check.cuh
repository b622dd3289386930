// Checks of CUDA calls, and launches of kernels. Every CUDA call goes through `check`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastsim {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fastsim: ") + what + ": " + cudaGetErrorString(error));
  }
}

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// How a kernel is launched: the number of thread blocks, the threads of a block, the bytes of
// dynamic shared memory of a block, and the blocks of a cluster.
struct Shape {
  unsigned blocks, threads, shared = 0, cluster = 1;
};

#if !defined(FASTSIM_EMULATED)
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Shape& shape, void* stream,
                   Arguments... arguments) {
  if (shape.blocks == 0) return;  // CUDA refuses an empty grid, and a rank may have no rows
  if (shape.shared > 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared)),
          "shared memory of a kernel");
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = shape.cluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream_of(stream);
  config.attrs = &cluster;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
        "launch of a kernel");
}
#endif

}  // namespace fastsim
