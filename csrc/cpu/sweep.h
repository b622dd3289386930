// What a row of scores goes through between two widths of a sweep over prefixes, and how the score
// gradients of a wider prefix become part of a narrower one's (fastsim/engine/sweep.py).
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// One pass over a row, whose sums are added to `dot` and `dots`.
template <bool with_dots, bool with_ratios, class T>
void end_of_width_of(const T* score_grads, T* scores, int64_t columns, T ratio, const T* ratios,
                     double* dot, T* dots) {
  double sum = 0;
  for_chunks(0, columns, [&](int64_t at, int64_t n) {
    const T* g = score_grads + at;
    T* s = scores + at;
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; ++j) {
      if constexpr (with_dots) {
        const T product = g[j] * s[j];
        part += product;
        dots[at + j] += product;
      }
      if constexpr (with_ratios) s[j] *= ratio * ratios[at + j];
    }
    sum += part;
  });
  if constexpr (with_dots) *dot += sum;
}

// Adds score gradient times score to the row's `dot` and the columns' `dots` (null: to neither),
// then makes the scores of a prefix the share they have in those of the next longer one: times
// `ratio` and `ratios` of row and columns (null: they stay).
template <class T>
void end_of_width(const T* score_grads, T* scores, int64_t columns, T ratio, const T* ratios,
                  double* dot, T* dots) {
  const auto run = dot ? (ratios ? end_of_width_of<true, true, T> : end_of_width_of<true, false, T>)
                       : (ratios ? end_of_width_of<false, true, T> : end_of_width_of<false, false, T>);
  run(score_grads, scores, columns, ratio, ratios, dot, dots);
}

// to += from times the ratios of rows and columns (null: 1), in the rows [begin, end).
template <class T>
void carry_rows(const T* from, int64_t from_stride, T* to, int64_t stride, int64_t columns,
                const T* row_ratios, const T* column_ratios, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* f = from + row * from_stride;
    T* t = to + row * stride;
    if (!row_ratios) {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) t[j] += f[j];
      continue;
    }
    const T ratio = row_ratios[row];
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) t[j] += f[j] * (ratio * column_ratios[j]);
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
