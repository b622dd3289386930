// The pairs of a block: which are left out, their targets, and running sums of exponentials.
#pragma once

#include <limits>

#include "dtypes.h"
#include "lanes.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Sets the scores of the left-out pairs of a row to kLeftOut, and returns the column of the
// positive in the block, or -1. Pairs with equal ids are left out, but for the positive, and those
// that `skip` names.
template <class T>
int64_t mark_left_out(const Block<T>& b, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = b.positives ? b.positive(row) : -1;
  if (b.row_ids) {
    const int64_t id = b.row_ids[row];
    const T positive_score = positive >= 0 ? s[positive] : T(0);
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = b.column_ids[j] == id ? kLeftOut<T> : s[j];
    if (positive >= 0) s[positive] = positive_score;
  }
  const int64_t diagonal = b.row0 + row - b.column0;
  if (b.skip == Skip::diagonal && diagonal >= 0 && diagonal < b.columns) s[diagonal] = kLeftOut<T>;
  if (b.skip == Skip::lower) {
    for (int64_t j = 0; j < min_of(diagonal + 1, b.columns); ++j) s[j] = kLeftOut<T>;
  }
  return positive;
}

// Leaves out the pairs whose guide score is above the threshold of their row. A guide score of Inf
// counts as not above, like a NaN, so that what is not finite reaches the loss.
template <class T>
void leave_out_above(const Block<T>& b, const T* guide, int64_t guide_stride, const T* thresholds,
                     int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const T *g = guide + row * guide_stride, threshold = thresholds[row];
    constexpr T largest_finite = std::numeric_limits<T>::max();
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) {
      const bool above = g[j] > threshold && g[j] <= largest_finite;
      s[j] = above ? kLeftOut<T> : s[j];
    }
  }
}

// Whether the targets are a matrix or groups, instead of one positive for each row.
template <class T>
bool has_matrix_targets(const Block<T>& b) {
  return b.dense.data || b.row_groups;
}

// Writes the targets of `count` columns from `column` on to `out`. The target of a pair on a
// skipped diagonal is 0.
template <class T>
void load_targets(const Block<T>& b, int64_t row, int64_t column, int64_t count, T* out) {
  if (b.dense.data) {
    load(b.dense, row, column, count, out);
  } else {
    const int64_t group = b.row_groups[row], *groups = b.column_groups + column;
    const T negative_target = b.negative_target;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = groups[j] == group ? T(1) : negative_target;
  }
  const int64_t diagonal = b.row0 + row - b.column0 - column;
  if (b.skip == Skip::diagonal && diagonal >= 0 && diagonal < count) out[diagonal] = T(0);
}

// Returns a pointer to the same targets: to the target matrix itself if it holds them in this form,
// otherwise to `out`, into which they are loaded.
template <class T>
const T* read_targets(const Block<T>& b, int64_t row, int64_t column, int64_t count, T* out) {
  if (b.dense.data && b.skip != Skip::diagonal) return read(b.dense, row, column, count, out);
  load_targets(b, row, column, count, out);
  return out;
}

// The maximum of `count` scores, kLeftOut if no pair takes part. NaNs are ignored.
template <class T>
T maximum(const T* s, int64_t count) {
  return largest(s, count, kLeftOut<T>);
}

// Whether a maximum, and the sum of exponentials relative to it, come from any pair. A NaN loses
// every comparison of maxima, but shows in the sum: a row of nothing but NaNs is not empty.
template <class T>
bool any_pair(T top, double sum) {
  return top > kLeftOut<T> || sum != sum;
}

// Merges a maximum and the sum of exponentials relative to it, e^(scale (s - top)), into entry
// `index` of a state.
inline void merge(const MaxSum& state, int64_t index, double top, double sum, double scale) {
  if (state.sum[index] == 0) {  // empty so far
    state.max[index] = top;
    state.sum[index] = sum;
    return;
  }
  const double state_top = state.max[index];
  const double merged_top = top > state_top ? top : state_top;
  state.sum[index] = state.sum[index] * exponential(state_top - merged_top, scale) +
                     sum * exponential(top - merged_top, scale);
  state.max[index] = merged_top;
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
