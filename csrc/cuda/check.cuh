// Every CUDA call goes through `check`.
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

}  // namespace fastsim
