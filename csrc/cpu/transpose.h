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

// Calls put(values, row, column) for all numbers of from^T in its rows [begin, end) and its
// `columns` columns. `values` is a vector of the numbers of a row from `column` on, or one number
// where no whole square of vectors is left.
template <class T, class Put>
FASTSIM_INLINE void each_transposed(const T* from, int64_t from_stride, int64_t columns,
                                    int64_t begin, int64_t end, const Put& put) {
  constexpr int64_t count = kLanes<T>;
  for (int64_t top = begin; top < end; top += count) {
    for (int64_t left = 0; left < columns; left += count) {
      if (end - top < count || columns - left < count) {
        for (int64_t r = top; r < min_of(top + count, end); ++r) {
          for (int64_t c = left; c < min_of(left + count, columns); ++c) {
            put(from[c * from_stride + r], r, c);
          }
        }
        continue;
      }
      Vector<T> square[count];
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) {
        square[r] = vector_at(from + (left + r) * from_stride + top);
      }
      transpose_vectors<T>(square);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) put(square[r], top + r, left);
    }
  }
}

// to = from^T, or with `add` to += from^T, in the rows [begin, end) of `to`, which has `columns`
// columns.
template <class T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t columns,
               bool add, int64_t begin, int64_t end) {
  each_transposed(from, from_stride, columns, begin, end, [&](auto values, int64_t r, int64_t c) {
    T* target = to + r * to_stride + c;
    put_values(add ? values_at<decltype(values)>(target) + values : values, target);
  });
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
