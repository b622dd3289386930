// What every engine is told of the caller's tensors. Plain data.
#pragma once

#include <cstdint>

namespace fastsim {

// Pairs that take no part because of where they lie.
enum class Skip { nothing, diagonal, lower };

// The dtypes that embeddings and dense targets may have.
enum class Dtype { int8, uint8, int16, int32, int64, float16, bfloat16, float32, float64 };

// A strided matrix of the caller's, read in its own dtype.
struct Matrix {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t row_stride = 0, column_stride = 0;
};

}  // namespace fastsim
