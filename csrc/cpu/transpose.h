// Transposes a matrix. It is used on rows that a product needs as columns, and on parts of a panel
// of scores of rows with themselves, which are symmetric.
#pragma once

#include <utility>

#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// One step of the transposition of a square of vectors: exchanges the upper right and the lower
// left quarter of every block of 2 side x 2 side lanes. `upper` and `lower` are two rows, `side`
// apart, of such blocks.
template <int side, class V, int... lane>
inline void exchange(V& upper, V& lower, std::integer_sequence<int, lane...>) {
  constexpr int count = sizeof...(lane);
#if __has_builtin(__builtin_shufflevector)
  const V high =
      __builtin_shufflevector(upper, lower, (lane & side ? count + lane - side : lane)...);
  lower = __builtin_shufflevector(upper, lower, (lane & side ? count + lane : lane + side)...);
  upper = high;
#else
  const V above = upper, below = lower;
  ((upper[lane] = lane & side ? below[lane - side < 0 ? 0 : lane - side] : above[lane]), ...);
  ((lower[lane] = lane & side ? below[lane] : above[lane + side < count ? lane + side : 0]), ...);
#endif
}

// Transposes a square of kLanes<T> vectors in place.
template <class T, int side = 1>
inline void transpose_vectors(Vector<T>* rows) {
  constexpr int count = kLanes<T>;
  if constexpr (side < count) {
#pragma GCC unroll 16
    for (int r = 0; r < count; ++r) {
      if (r & side) continue;
      exchange<side>(rows[r], rows[r + side], std::make_integer_sequence<int, count>());
    }
    transpose_vectors<T, 2 * side>(rows);
  }
}

// to = from^T, or with `add` to += from^T, in the rows [begin, end) of `to`, which has `columns`
// columns.
template <class T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t columns,
               bool add, int64_t begin, int64_t end) {
  constexpr int64_t count = kLanes<T>;
  using V = Vector<T>;
  for (int64_t top = begin; top < end; top += count) {
    for (int64_t left = 0; left < columns; left += count) {
      if (end - top < count || columns - left < count) {
        for (int64_t r = top; r < min_of(top + count, end); ++r) {
          for (int64_t c = left; c < min_of(left + count, columns); ++c) {
            T& target = to[r * to_stride + c];
            target = add ? target + from[c * from_stride + r] : from[c * from_stride + r];
          }
        }
        continue;
      }
      V square[count];
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) {
        square[r] = vector_at(from + (left + r) * from_stride + top);
      }
      transpose_vectors<T>(square);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) {
        T* target = to + (top + r) * to_stride + left;
        put_vector<T>(add ? vector_at(target) + square[r] : square[r], target);
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
