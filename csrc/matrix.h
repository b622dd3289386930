// What every engine is told of the caller's tensors. Plain data.
#pragma once

#include <cstdint>

namespace fastsim {

// Pairs that take no part because of where they lie.
enum class Skip { nothing, diagonal, lower };

// The dtypes that embeddings and dense targets may have.
enum class Dtype { int8, uint8, int16, int32, int64, float16, bfloat16, float32, float64 };

// The dtype of T, float or double.
template <class T>
inline constexpr Dtype kDtypeOf = sizeof(T) == sizeof(float) ? Dtype::float32 : Dtype::float64;

inline int64_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::int8:
    case Dtype::uint8: return 1;
    case Dtype::int16:
    case Dtype::float16:
    case Dtype::bfloat16: return 2;
    case Dtype::int32:
    case Dtype::float32: return 4;
    default: return 8;
  }
}

// A strided matrix of the caller's, read in its own dtype.
struct Matrix {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t row_stride = 0, column_stride = 0;

  // The same without its first rows.
  Matrix from_row(int64_t row) const {
    const char* start = static_cast<const char*>(data) + row * row_stride * bytes_of(dtype);
    return {start, dtype, row_stride, column_stride};
  }

  // The same without its first columns.
  Matrix from_column(int64_t column) const {
    const char* start = static_cast<const char*>(data) + column * column_stride * bytes_of(dtype);
    return {start, dtype, row_stride, column_stride};
  }
};

}  // namespace fastsim
