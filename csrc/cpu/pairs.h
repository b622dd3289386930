// Which pairs of a block take part, their targets, and running sums of exponentials.
#pragma once

#include "dtypes.h"
#include "lanes.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Marks the row's pairs that take no part, and returns the positive's column in the block or -1.
template <class T>
int64_t mark_left_out(const Block<T>& b, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = b.positives ? b.positive(row) : -1;
  if (b.row_ids) {
    const int64_t id = b.row_ids[row];
    const T kept = positive >= 0 ? s[positive] : T(0);
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = b.column_ids[j] == id ? kLeftOut<T> : s[j];
    if (positive >= 0) s[positive] = kept;
  }
  const int64_t diagonal = b.row0 + row - b.column0;
  if (b.skip == Skip::diagonal && diagonal >= 0 && diagonal < b.columns) s[diagonal] = kLeftOut<T>;
  if (b.skip == Skip::lower) {
    for (int64_t j = 0; j < smaller(diagonal + 1, b.columns); ++j) s[j] = kLeftOut<T>;
  }
  return positive;
}

// Marks the row's pairs whose guide score is above the row's threshold; a NaN is not above.
template <class T>
void leave_out_above(const Block<T>& b, const T* guide, int64_t guide_stride, const T* thresholds,
                     int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const T *g = guide + row * guide_stride, threshold = thresholds[row];
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = g[j] > threshold ? kLeftOut<T> : s[j];
  }
}

template <class T>
bool has_matrix_targets(const Block<T>& b) {
  return b.dense.data || b.row_groups;
}

// The targets of `count` columns from `column` on, left-out pairs (a skipped diagonal) as 0.
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

// The same, where they lie if they are as in `out`.
template <class T>
const T* read_targets(const Block<T>& b, int64_t row, int64_t column, int64_t count, T* out) {
  if (b.dense.data && b.skip != Skip::diagonal) return read(b.dense, row, column, count, out);
  load_targets(b, row, column, count, out);
  return out;
}

template <class T>
T maximum(const T* s, int64_t count) {
  return largest(s, count, kLeftOut<T>);
}

// Whether a maximum and the sum of exponentials relative to it are those of any pair. A NaN loses
// every comparison of maxima but shows in the sum: a row that holds nothing else is not empty.
template <class T>
bool any_pair(T top, double sum) {
  return top > kLeftOut<T> || sum != sum;
}

// Merges (top, sum) into the running state at `at`; the exponents are in units of `scale`.
inline void merge(const MaxSum& state, int64_t at, double top, double sum, double scale) {
  if (state.sum[at] == 0) {  // nothing yet
    state.max[at] = top;
    state.sum[at] = sum;
    return;
  }
  const double old = state.max[at];
  const double both = top > old ? top : old;
  state.sum[at] = state.sum[at] * exponential(old - both, scale) +
                  sum * exponential(top - both, scale);
  state.max[at] = both;
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
