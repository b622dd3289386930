// Reads and writes numbers of the caller's dtypes.
#pragma once

#include <cstring>

#include "float16.h"
#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Converts a number of the caller's dtype S to T.
template <class S>
struct Convert {
  template <class T>
  static T to(S value) {
    return static_cast<T>(value);
  }
};

struct BFloat16 {
  uint16_t bits;
};

template <>
struct Convert<BFloat16> {
  template <class T>
  static T to(BFloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return static_cast<T>(out);
  }
};

// Rounds to nearest, ties to even. A NaN stays a NaN.
inline BFloat16 round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0 : rounded)};
}

// `load` from a matrix whose dtype is S.
template <class S, class T>
void convert(const Matrix& m, int64_t row, int64_t column, int64_t count, T* out) {
  const S* from = static_cast<const S*>(m.data) + row * m.row_stride;
  if (m.column_stride == 1) {
    for (int64_t j = 0; j < count; ++j) out[j] = Convert<S>::template to<T>(from[column + j]);
  } else {
    for (int64_t j = 0; j < count; ++j) {
      out[j] = Convert<S>::template to<T>(from[(column + j) * m.column_stride]);
    }
  }
}

// Loads `count` numbers of row `row` of m, from column `column` on, into `out`, as T.
template <class T>
void load(const Matrix& m, int64_t row, int64_t column, int64_t count, T* out) {
  switch (m.dtype) {
    case Dtype::int8: return convert<int8_t>(m, row, column, count, out);
    case Dtype::uint8: return convert<uint8_t>(m, row, column, count, out);
    case Dtype::int16: return convert<int16_t>(m, row, column, count, out);
    case Dtype::int32: return convert<int32_t>(m, row, column, count, out);
    case Dtype::int64: return convert<int64_t>(m, row, column, count, out);
    case Dtype::float16: return convert<Float16>(m, row, column, count, out);
    case Dtype::bfloat16: return convert<BFloat16>(m, row, column, count, out);
    case Dtype::float32: return convert<float>(m, row, column, count, out);
    case Dtype::float64: return convert<double>(m, row, column, count, out);
  }
}

// Returns a pointer to the same numbers: to those in m itself if it holds them as a contiguous row
// of T, otherwise to `out`, into which they are loaded.
template <class T>
const T* read(const Matrix& m, int64_t row, int64_t column, int64_t count, T* out) {
  if (lies_by_rows<T>(m)) {
    return static_cast<const T*>(m.data) + row * m.row_stride + column;
  }
  load(m, row, column, count, out);
  return out;
}

// Writes `count` numbers to the elements of `to` from `at` on. dtype: that of T, float16 or
// bfloat16.
template <class T>
void store(const T* from, int64_t count, void* to, Dtype dtype, int64_t at) {
  if (dtype == Dtype::float16) {
    Float16* out = static_cast<Float16*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = static_cast<Float16>(from[k]);
  } else if (dtype == Dtype::bfloat16) {
    BFloat16* out = static_cast<BFloat16*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = round_to_bfloat16(static_cast<float>(from[k]));
  } else {
    T* out = static_cast<T*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = from[k];
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
