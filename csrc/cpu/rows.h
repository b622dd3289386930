// Unit rows and the gradient through them; centred rows.
#pragma once

#include <limits>

#include "dtypes.h"
#include "isa.h"
#include "lanes.h"

namespace fastsim::FASTSIM_ISA {
namespace {

template <class T>
double dot(const T* a, const T* b, int64_t count) {
  double sum[1] = {};
  add_terms(count, sum, [&](auto at, auto& sums) { sums[0] += at(a) * at(b); });
  return sum[0];
}

template <class T>
double sum_of_squares(const T* x, int64_t count) {
  double sum[1] = {};
  add_terms(count, sum, [&](auto at, auto& sums) {
    const auto here = at(x);
    sums[0] += here * here;
  });
  return sum[0];
}

// 1 / sqrt(square); a row shorter than the smallest normal number counts as zero, and has 0.
template <class T>
double inverse_norm(double square) {
  const double norm = __builtin_sqrt(square);
  return norm < double(std::numeric_limits<T>::min()) ? 0.0 : 1 / norm;
}

// Rows of a walk between the one that is asked for and the one at hand: the processor itself does
// not look past the page of memory that a row lies in.
constexpr int64_t kRowsAhead = 4;

FASTSIM_INLINE void ask_for_row(const Matrix& x, int64_t row, int64_t width) {
  if (x.column_stride != 1) return;
  const int64_t each = bytes_of(x.dtype);
  const char* from = static_cast<const char*>(x.data) + row * x.row_stride * each;
  for (int64_t at = 0; at < width * each; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// x / |x|; `inverse` keeps 1 / |x|, or 0.
template <class T>
void unit_rows(const Matrix& x, int64_t width, T* unit, T* inverse, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* out = unit + row * width;
    if (row + kRowsAhead < end) ask_for_row(x, row + kRowsAhead, width);
    const T* from = read(x, row, 0, width, out);
    const T factor = T(inverse_norm<T>(sum_of_squares(from, width)));
    inverse[row] = factor;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] = factor * from[k];
  }
}

// x = outer * (g - along * x)
template <class T>
void subtract_along(T* x, const T* g, T along, T outer, int64_t count) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) x[k] = outer * (g[k] - along * x[k]);
}

// dx = factor r (g - (u . g) u) for g = dL/du, u = r x; `dots` keeps u . g.
template <class T>
void unit_rows_backward(const T* grad_unit, const Matrix& x, int64_t width, const T* inverse,
                        T factor, void* grad, Dtype dtype, T* dots, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* g = grad_unit + row * width;
    const T r = inverse[row];
    if (row + kRowsAhead < end) ask_for_row(x, row + kRowsAhead, width);
    T chunk[kChunk];
    double sum = 0;
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      load(x, row, at, n, chunk);
      sum += dot(chunk, g + at, n);
    });
    dots[row] = T(sum * r);
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      if (width > kChunk) load(x, row, at, n, chunk);
      subtract_along(chunk, g + at, dots[row] * r, factor * r, n);
      store(chunk, n, grad, dtype, row * width + at);
    });
  }
}

// Makes norms of rows those of the rows with the columns x after them, and writes x over these; a
// row shorter than the smallest normal number counts as zero.
template <class T>
void prefix_rows(const Matrix& x, int64_t width, double* norms, T* out, int64_t begin,
                 int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* rows = out + row * width;
    const T* from = read(x, row, 0, width, rows);
    const double norm = __builtin_hypot(norms[row], __builtin_sqrt(sum_of_squares(from, width)));
    norms[row] = norm;
    const T factor = norm < double(std::numeric_limits<T>::min()) ? T(0) : T(1 / norm);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) rows[k] = from[k] * factor;
  }
}

// dots += inverse (x . g)
template <class T>
void prefix_rows_dots(const T* g, const Matrix& x, int64_t width, const double* inverse,
                      double* dots, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T chunk[kChunk];
    double sum = 0;
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      sum += dot(read(x, row, at, n, chunk), g + row * width + at, n);
    });
    dots[row] += inverse[row] * sum;
  }
}

// out = inverse (g - along x), its rows `stride` apart. In double: of a prefix of one number the
// two are equal, and 1 over that number may be large.
template <class T>
void prefix_rows_backward(const T* g, const Matrix& x, int64_t width, const double* along,
                          const double* inverse, T* out, int64_t stride, int64_t begin,
                          int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* to = out + row * stride;
    const T *own = read(x, row, 0, width, to), *from = g + row * width;
    const double factor = inverse[row], share = along[row];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      to[k] = T(factor * (double(from[k]) - share * double(own[k])));
    }
  }
}

// The sums over all rows of the columns [begin, end).
template <class T>
void column_sums(const T* x, int64_t rows, int64_t width, double* sums, int64_t begin,
                 int64_t end) {
  for (int64_t k = begin; k < end; ++k) sums[k] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
#pragma omp simd
    for (int64_t k = begin; k < end; ++k) sums[k] += double(from[k]);
  }
}

// out = x - centre, and the norms of these rows.
template <class T>
void centred_rows(const T* x, const T* centre, int64_t width, T* out, double* norms,
                  int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] = from[k] - centre[k];
    norms[row] = __builtin_sqrt(sum_of_squares(to, width));
  }
}

// Twice times a factor, in double: one over a subnormal norm is no number of its type, one over its
// root is.
template <class T>
void scale(T* x, int64_t count, double root) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) x[k] = T(x[k] * root * root);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
