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

// Of the score gradients of every width, panel after panel: adds to each those of the next wider one
// times the ratios of rows and columns between them (null: 1), the widest first, in the rows
// [begin, end). A chunk of all panels stays in the first-level cache.
template <class T>
void carry_rows(const Carry<T>& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for_chunks(0, c.columns, [&](int64_t at, int64_t n) {
      for (int64_t k = c.count - 2; k >= 0; --k) {
        T* to = c.panels + k * c.panel_stride + row * c.stride + at;
        const T* from = to + c.panel_stride;
        if (!c.row_ratios) {
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) to[j] += from[j];
          continue;
        }
        const T ratio = c.row_ratios[k * c.row_ratios_stride + row];
        const T* ratios = c.column_ratios + k * c.column_ratios_stride + at;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) to[j] += from[j] * (ratio * ratios[j]);
      }
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
