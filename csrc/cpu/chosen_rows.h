// The kernels on rows with the few columns chosen for each: distances or dot products, and their
// gradients.
#pragma once

#include "isa.h"
#include "rows.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// |a - b|^2
template <class T>
double squared_distance(const T* a, const T* b, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < count; ++k) {
    const double gap = double(a[k]) - double(b[k]);
    sum += gap * gap;
  }
  return sum;
}

// Writes the values (count, rows) of the pairs; a value without a column keeps what it has.
template <class T>
void chosen_rows(const Partners<T>& p, T* values, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = p.x + row * p.width;
    for (int64_t k = 0; k < p.count; ++k) {
      const int64_t at = k * p.rows + row, column = p.columns[at];
      if (column < 0) continue;
      const T* y = p.y + column * p.width;
      values[at] = T(p.distances ? __builtin_sqrt(squared_distance(x, y, p.width))
                                 : dot(x, y, p.width));
    }
  }
}

// The most terms of a gradient that are added up in their own type. Longer sums are in float64: if
// all rows are nearly the same, one of them may be the closest to thousands of others.
constexpr int64_t kTermsInType = 64;

// Adds the gradient of the value of a pair to `grad`, the gradient of its row `own`, times
// score_grad. For a distance, score_grad has been divided by the distance.
template <class T, class Sum>
void add_gradient(const T* own, const T* other, double score_grad, bool distances, int64_t width,
                  Sum* grad) {
  if (distances) {
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) grad[k] += Sum(score_grad * (own[k] - other[k]));
  } else {
    const T factor = T(score_grad);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) grad[k] += factor * other[k];
  }
}

// Adds to grad_x (rows, width) the gradients of the rows [begin, end) of x.
template <class T>
void chosen_rows_of_rows(const Partners<T>& p, const double* score_grads, T* grad_x, int64_t begin,
                         int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = row; at < p.count * p.rows; at += p.rows) {
      if (p.columns[at] < 0) continue;
      add_gradient(p.x + row * p.width, p.y + p.columns[at] * p.width, score_grads[at], p.distances,
                   p.width, grad_x + row * p.width);
    }
  }
}

// Adds to grad_y the gradients of the rows [begin, end) of y, which are columns of the pairs.
// naming: the pairs of each column.
template <class T>
void chosen_rows_of_columns(const Partners<T>& p, const double* score_grads, const Naming& naming,
                            T* grad_y, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) {
    const int64_t first = naming.first[column], last = naming.first[column + 1];
    // Adds the gradient's entries [from, from + width) to `sum`.
    const auto add_columns = [&](int64_t from, int64_t width, auto* sum) {
      for (int64_t e = first; e < last; ++e) {
        const int64_t at = naming.entries[e];
        add_gradient(p.y + column * p.width + from, p.x + at % p.rows * p.width + from,
                     score_grads[at], p.distances, width, sum);
      }
    };
    T* const grad = grad_y + column * p.width;
    if (last - first <= kTermsInType) {
      add_columns(0, p.width, grad);
      continue;
    }
    constexpr int64_t kPart = 256;
    for (int64_t from = 0; from < p.width; from += kPart) {
      const int64_t width = min_of(kPart, p.width - from);
      double sum[kPart];
      for (int64_t k = 0; k < width; ++k) sum[k] = grad[from + k];
      add_columns(from, width, sum);
      for (int64_t k = 0; k < width; ++k) grad[from + k] = T(sum[k]);
    }
  }
}

// Computes the gradients of the rows [begin, end) to `grad` (rows, width). memory: 2 * width
// numbers. wide (width,): the sum of a long list of terms. A gradient is written once, when it is
// complete: if terms were added to it in place, each addition would wait for cache lines that are
// not in cache yet.
template <class T>
void shared_gradient(const SharedGradient<T>& g, T* memory, double* wide, T* grad, int64_t begin,
                     int64_t end) {
  const int64_t width = g.width;
  const int64_t last = g.first[end];
  T *sum = memory, *as_read = memory + width;
  for (int64_t row = begin; row < end; ++row) {
    const T common_factor = g.common_factors ? g.common_factors[row] : T(1),
            inverse = g.inverse[row];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) sum[k] = common_factor * g.common_row[k];
    const bool is_long = g.first[row + 1] - g.first[row] > kTermsInType;
    for (int64_t k = 0; is_long && k < width; ++k) wide[k] = 0;
    const auto add_to_wide = [&] {
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) wide[k] += sum[k];
      for (int64_t k = 0; k < width; ++k) sum[k] = 0;
    };
    for (int64_t s = g.first[row]; s < g.first[row + 1]; ++s) {
      if (s + kRowsAhead < last) prefetch_row(g.others, g.shares[s + kRowsAhead].row, width);
      const T* other = read(g.others, g.shares[s].row, 0, width, as_read);
      const T factor = T(g.shares[s].factor), other_inverse = g.inverse_others[g.shares[s].row];
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) sum[k] += factor * (other_inverse * other[k]);
      if (is_long && (s - g.first[row]) % kTermsInType == kTermsInType - 1) add_to_wide();
    }
    if (is_long) {
      add_to_wide();
      for (int64_t k = 0; k < width; ++k) sum[k] = T(wide[k]);
    }
    const T* own = read(g.rows, row, 0, width, as_read);
    const T coefficient = T(dot(own, sum, width) * inverse) * inverse;
    T* out = grad + row * width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] = inverse * (sum[k] - coefficient * own[k]);
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
