// Cosines of paired rows and their gradient, without unit rows in memory.
#pragma once

#include "isa.h"
#include "rows.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// x_i . y_i / (|x_i| |y_i|); `inverse_x` and `inverse_y` keep 1 / |x_i| and 1 / |y_i|, or 0.
template <class T>
void paired_cosines(const Matrix& x, const Matrix& y, int64_t width, T* cosines, T* inverse_x,
                    T* inverse_y, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T a[kChunk], b[kChunk];
    double xx = 0, yy = 0, xy = 0;
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      load(x, row, at, n, a);
      load(y, row, at, n, b);
      // Three sums at once: one alone would wait for its own additions.
#pragma omp simd reduction(+ : xx, yy, xy)
      for (int64_t k = 0; k < n; ++k) {
        const double u = a[k], v = b[k];
        xx += u * u;
        yy += v * v;
        xy += u * v;
      }
    });
    const double r = inverse_norm<T>(xx), s = inverse_norm<T>(yy);
    cosines[row] = T(xy * r * s);
    inverse_x[row] = T(r);
    inverse_y[row] = T(s);
  }
}

// dx = score gradient r (s y - c r x) of one row, with r = 1 / |x|, s = 1 / |y| and c its cosine. The two
// terms are of the size of unit rows: lengths at the ends of the range neither overflow nor vanish.
template <class T>
void paired_row_backward(const T* x, const T* y, int64_t count, T score_grad, T cosine, T r, T s,
                         void* grad, Dtype dtype, int64_t at) {
  T out[kChunk];
  const T along = cosine * r, outer = score_grad * r;
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) out[k] = outer * (s * y[k] - along * x[k]);
  store(out, count, grad, dtype, at);
}

// Both gradients in one fused pass of the rows; a null one is not wanted.
template <class T>
void paired_cosines_backward(const T* score_grads, const Matrix& x, const Matrix& y, int64_t width,
                             const T* cosines, const T* inverse_x, const T* inverse_y,
                             void* grad_x, Dtype dtype_x, void* grad_y, Dtype dtype_y,
                             int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T g = score_grads[row], c = cosines[row], r = inverse_x[row], s = inverse_y[row];
    T a[kChunk], b[kChunk];
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      load(x, row, at, n, a);
      load(y, row, at, n, b);
      if (grad_x) paired_row_backward(a, b, n, g, c, r, s, grad_x, dtype_x, row * width + at);
      if (grad_y) paired_row_backward(b, a, n, g, c, s, r, grad_y, dtype_y, row * width + at);
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
