// Rows against the few columns chosen for each: distances or products, and their gradients.
#pragma once

#include "isa.h"
#include "rows.h"

namespace fastsim::FASTSIM_ISA {
namespace {

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

// A row without a partner keeps its value.
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

// Adds score gradient * d(pair) / d(own) to `grad`, where for a distance the score gradient has been
// divided by it.
template <class T>
void add_gradient(const T* own, const T* other, double score_grad, bool distances, int64_t width,
                  T* grad) {
  if (distances) {
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) grad[k] += T(score_grad * (own[k] - other[k]));
  } else {
    const T factor = T(score_grad);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) grad[k] += factor * other[k];
  }
}

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

template <class T>
void chosen_rows_of_columns(const Partners<T>& p, const double* score_grads, const Naming& naming,
                            T* grad_y, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) {
    for (int64_t e = naming.first[column]; e < naming.first[column + 1]; ++e) {
      const int64_t at = naming.entries[e];
      add_gradient(p.y + column * p.width, p.x + at % p.rows * p.width, score_grads[at],
                   p.distances, p.width, grad_y + column * p.width);
    }
  }
}

// The gradient of the rows [begin, end). memory: of two rows. A gradient is written once, when it
// is whole: lines that are not in cache yet would hold up all that is added to them.
template <class T>
void shared_gradient(const SharedGradient<T>& g, T* memory, T* grad, int64_t begin, int64_t end) {
  const int64_t width = g.width;
  const int64_t last = g.first[end];
  T *sum = memory, *as_read = memory + width;
  for (int64_t row = begin; row < end; ++row) {
    const T factor = g.of_every ? g.of_every[row] : T(1), norm = g.inverse[row];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) sum[k] = factor * g.every[k];
    for (int64_t s = g.first[row]; s < g.first[row + 1]; ++s) {
      if (s + kRowsAhead < last) ask_for_row(g.others, g.shares[s + kRowsAhead].row, width);
      const T* other = read(g.others, g.shares[s].row, 0, width, as_read);
      const T share = T(g.shares[s].factor), of_other = g.inverse_of_others[g.shares[s].row];
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) sum[k] += share * (of_other * other[k]);
    }
    const T* own = read(g.own, row, 0, width, as_read);
    const T along = T(dot(own, sum, width) * norm) * norm;
    T* out = grad + row * width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] = norm * (sum[k] - along * own[k]);
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
