// Plain data that describes the caller's tensors, shared by all engines.
#pragma once

#include <cstdint>

namespace fastsim {

// Pairs that are left out because of their position in the score matrix: those on the diagonal, or
// those on and below it.
enum class Skip { nothing, diagonal, lower };

// A dtype that embeddings and dense targets may have.
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

// A strided matrix in the caller's memory and dtype. Strides count elements.
struct Matrix {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t row_stride = 0, column_stride = 0;

  // The matrix without its first `row` rows.
  Matrix from_row(int64_t row) const {
    const char* start = static_cast<const char*>(data) + row * row_stride * bytes_of(dtype);
    return {start, dtype, row_stride, column_stride};
  }

  // The matrix without its first `column` columns.
  Matrix from_column(int64_t column) const {
    const char* start = static_cast<const char*>(data) + column * column_stride * bytes_of(dtype);
    return {start, dtype, row_stride, column_stride};
  }
};

// Rows of T that are contiguous and follow one another.
template <class T>
Matrix row_major(const T* rows, int64_t width) {
  return {rows, kDtypeOf<T>, width, 1};
}

// Whether x holds numbers of T, and those of each row are contiguous.
template <class T>
bool lies_by_rows(const Matrix& x) {
  return x.dtype == kDtypeOf<T> && x.column_stride == 1;
}

// Whether x holds numbers of T, and those of each column are contiguous.
template <class T>
bool lies_by_columns(const Matrix& x) {
  return x.dtype == kDtypeOf<T> && x.row_stride == 1 && x.column_stride != 1;
}

}  // namespace fastsim
