// What happens to a row of scores in a sweep over prefixes (the terms: fastsim/engine/sweep.py).
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Computes the scores of a row for one prefix: the products of its own columns, `own`, plus the
// scores of the next shorter prefix, `shorter`, times `ratio` of the row and `ratios` of the
// columns. Null `shorter`: there is no shorter prefix. Null `ratios`: all factors are 1. The scores
// are written to `scores` and to `out`, which may be `own`. next: as in `prefetch_ahead`, for
// `own`.
template <class T>
void scores_of_width(const T* own, const T* shorter, T* scores, T* out, int64_t columns, T ratio,
                     const T* ratios, int64_t next) {
  for_chunks(0, columns, [&](int64_t at, int64_t n) {
    prefetch_ahead(own + at, next, n);
    if (!shorter) {
#pragma omp simd
      for (int64_t j = at; j < at + n; ++j) scores[j] = out[j] = own[j];
    } else if (ratios) {
#pragma omp simd
      for (int64_t j = at; j < at + n; ++j) {
        scores[j] = out[j] = fused(shorter[j], ratio * ratios[j], own[j]);
      }
    } else {
#pragma omp simd
      for (int64_t j = at; j < at + n; ++j) scores[j] = out[j] = shorter[j] + own[j];
    }
  });
}

// Adds to the score gradients `to` of a prefix those of the next longer prefix, `from`, times
// `ratio` of the row and `ratios` of the columns (null: all factors are 1). If there are ratios,
// the products of what is added and the scores of the prefix are summed too: over the row in `dot`,
// and by column in `dots`.
template <class T>
void carry_row(T* to, const T* from, const T* scores, int64_t columns, T ratio, const T* ratios,
               double* dot, T* dots) {
  if (!ratios) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
    return;
  }
  double sum = 0;
  for_chunks(0, columns, [&](int64_t at, int64_t n) {
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = at; j < at + n; ++j) {
      const T carried = from[j] * (ratio * ratios[j]);
      to[j] += carried;
      part += carried * scores[j];  // clang does not take `fused` for a sum
      dots[j] = fused(carried, scores[j], dots[j]);
    }
    sum += part;
  });
  *dot += sum;
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
