// What a row of scores goes through in a sweep over prefixes (fastsim/engine/sweep.py).
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The scores of a prefix: the products of its own columns and the share of the next shorter one's
// scores, `shorter`, times `ratio` and `ratios` of row and columns (null: as they are; of the first
// prefix there is none). `out`, which may be where the products are, gets them too. next: as of
// `ask_for`, in the products.
template <class T>
void scores_of_width(const T* own, const T* shorter, T* scores, T* out, int64_t columns, T ratio,
                     const T* ratios, int64_t next) {
  for_chunks(0, columns, [&](int64_t at, int64_t n) {
    ask_for(own + at, next, n);
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

// Adds to the score gradients of a prefix what those of the next longer one are to it: times
// `ratio` and `ratios` of row and columns (null: 1). With these, the row's `dot` and the columns'
// `dots` get what is added times the prefix's scores.
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
      part += carried * scores[j];  // `fused` is no sum to clang
      dots[j] = fused(carried, scores[j], dots[j]);
    }
    sum += part;
  });
  *dot += sum;
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
