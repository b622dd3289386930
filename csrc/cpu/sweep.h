// What a row of scores goes through in a sweep over prefixes (fastsim/engine/sweep.py).
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Makes the products of a prefix's own columns its scores, with the share of those of the next
// shorter one, `scores`, times `ratio` and `ratios` of row and columns (null: as they are; of the
// `first` prefix there is none). `scores` gets them too.
template <class T>
void scores_of_width(T* panel, T* scores, bool first, int64_t columns, T ratio, const T* ratios) {
  if (first) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) scores[j] = panel[j];
  } else if (ratios) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      scores[j] = panel[j] = fused(scores[j], ratio * ratios[j], panel[j]);
    }
  } else {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) scores[j] = panel[j] = scores[j] + panel[j];
  }
}

// Adds score gradient times score to the row's `dot` and the columns' `dots`.
template <class T>
void score_dots(const T* score_grads, const T* scores, int64_t columns, double* dot, T* dots) {
  double sum = 0;
  for_chunks(0, columns, [&](int64_t at, int64_t n) {
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = at; j < at + n; ++j) {
      const T product = score_grads[j] * scores[j];
      part += product;
      dots[j] += product;
    }
    sum += part;
  });
  *dot += sum;
}

// Adds to the score gradients of a prefix what those of the next longer one are to it: times
// `ratio` and `ratios` of row and columns (null: 1).
template <class T>
void carry_row(T* to, const T* from, int64_t columns, T ratio, const T* ratios) {
  if (ratios) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) to[j] = fused(from[j], ratio * ratios[j], to[j]);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
