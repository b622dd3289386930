// The kernels on rows: unit rows and their gradient, the rows of prefixes, and centred rows.
#pragma once

#include <limits>

#include "dtypes.h"
#include "isa.h"
#include "lanes.h"
#include "transpose.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The dot product of a and b, in double.
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
    const auto number = at(x);
    sums[0] += number * number;
  });
  return sum[0];
}

// The inverse norm of a row whose sum of squares is `square`. A row whose norm is less than the
// smallest normal number of T counts as zero, and has the inverse norm 0.
template <class T>
double inverse_norm(double square) {
  const double norm = __builtin_sqrt(square);
  return norm < double(std::numeric_limits<T>::min()) ? 0.0 : 1 / norm;
}

// How many rows ahead of the current one a loop prefetches. The processor itself does not prefetch
// beyond the page of memory that the current row lies in.
constexpr int64_t kRowsAhead = 4;

// Prefetches a row, if its numbers are contiguous.
FASTSIM_INLINE void prefetch_row(const Matrix& x, int64_t row, int64_t width) {
  if (x.column_stride != 1) return;
  const int64_t bytes = bytes_of(x.dtype);
  const char* from = static_cast<const char*>(x.data) + row * x.row_stride * bytes;
  for (int64_t at = 0; at < width * bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// Calls f(row, n) for each group of rows [row, row + n) of [begin, end) that are read at a time: up
// to kRowGroup rows if x lies by columns, otherwise single rows.
template <class T, class F>
void for_row_groups(const Matrix& x, int64_t begin, int64_t end, const F& f) {
  const int64_t most = lies_by_columns<T>(x) ? kRowGroup : 1;
  for (int64_t row = begin; row < end; row += most) f(row, min_of(most, end - row));
}

// Loads `count` numbers, from column `column` on, of each of the n rows of a group into `out`,
// where rows are `stride` apart.
template <class T>
void load_group(const Matrix& x, int64_t row, int64_t n, int64_t column, int64_t count, T* out,
                int64_t stride) {
  if (!lies_by_columns<T>(x)) return load(x, row, column, count, out);
  const T* from = static_cast<const T*>(x.data) + row + column * x.column_stride;
  transpose(from, x.column_stride, out, stride, count, false, int64_t(0), n);
}

// Returns a pointer to the rows of a group, (n, width): to those in x itself if it holds contiguous
// rows of T, otherwise to `out`, into which they are loaded.
template <class T>
const T* read_group(const Matrix& x, int64_t row, int64_t n, int64_t width, T* out) {
  if (!lies_by_columns<T>(x)) return read(x, row, 0, width, out);
  load_group(x, row, n, 0, width, out, width);
  return out;
}

// Writes the inverse norms of the rows of x, which have the type T, to `inverse` (rows,). memory:
// (kRowGroup, width).
template <class T>
void inverse_norms(const Matrix& x, int64_t width, T* memory, T* inverse, int64_t begin,
                   int64_t end) {
  for_row_groups<T>(x, begin, end, [&](int64_t row, int64_t n) {
    if (row + kRowsAhead < end) prefetch_row(x, row + kRowsAhead, width);
    const T* from = read_group(x, row, n, width, memory);
    for (int64_t r = 0; r < n; ++r) {
      inverse[row + r] = T(inverse_norm<T>(sum_of_squares(from + r * width, width)));
    }
  });
}

// Writes the unit rows x / |x| to `unit` (rows, width) and the inverse norms to `inverse` (rows,).
template <class T>
void unit_rows(const Matrix& x, int64_t width, T* unit, T* inverse, int64_t begin, int64_t end) {
  for_row_groups<T>(x, begin, end, [&](int64_t row, int64_t n) {
    if (row + kRowsAhead < end) prefetch_row(x, row + kRowsAhead, width);
    const T* group = read_group(x, row, n, width, unit + row * width);
    for (int64_t r = 0; r < n; ++r) {
      const T* from = group + r * width;
      T* out = unit + (row + r) * width;
      const T factor = T(inverse_norm<T>(sum_of_squares(from, width)));
      inverse[row + r] = factor;
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) out[k] = factor * from[k];
    }
  });
}

// x = outer * (g - along * x)
template <class T>
void subtract_along(T* x, const T* g, T along, T outer, int64_t count) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) x[k] = outer * (g[k] - along * x[k]);
}

// Writes the gradients dL/dx = r (g - (u . g) u) of the rows, times `factor`, for unit rows u = r x
// with inverse norms r, and g = dL/du in grad_unit. dots (rows,) gets u . g.
template <class T>
void unit_rows_backward(const T* grad_unit, const Matrix& x, int64_t width, const T* inverse,
                        T factor, void* grad, Dtype dtype, T* dots, int64_t begin, int64_t end) {
  for_row_groups<T>(x, begin, end, [&](int64_t first, int64_t rows) {
    if (first + kRowsAhead < end) prefetch_row(x, first + kRowsAhead, width);
    T chunks[kRowGroup][kChunk];  // of each row of the group
    double sums[kRowGroup] = {};
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      load_group(x, first, rows, at, n, chunks[0], kChunk);
      for (int64_t r = 0; r < rows; ++r) {
        sums[r] += dot(chunks[r], grad_unit + (first + r) * width + at, n);
      }
    });
    for (int64_t r = 0; r < rows; ++r) dots[first + r] = T(sums[r] * inverse[first + r]);
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      if (width > kChunk) load_group(x, first, rows, at, n, chunks[0], kChunk);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = first + r, place = row * width + at;
        const T unit_factor = inverse[row];
        subtract_along(chunks[r], grad_unit + place, dots[row] * unit_factor, factor * unit_factor,
                       n);
        store(chunks[r], n, grad, dtype, place);
      }
    });
  });
}

// Extends prefixes by the columns x (rows, width). `norms` (rows,) are those of the prefixes
// without x, and become those with x. out (rows, width) = x divided by the new norms. A prefix
// whose norm is less than the smallest normal number of T counts as zero.
template <class T>
void prefix_rows(const Matrix& x, int64_t width, double* norms, T* out, int64_t begin,
                 int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* to = out + row * width;
    const T* from = read(x, row, 0, width, to);
    const double norm = __builtin_hypot(norms[row], __builtin_sqrt(sum_of_squares(from, width)));
    norms[row] = norm;
    const T factor = norm < double(std::numeric_limits<T>::min()) ? T(0) : T(1 / norm);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] = from[k] * factor;
  }
}

// dots += inverse (x . g), row by row.
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

// out = inverse (g - along x), row by row. The rows of `out` are `stride` apart. It is computed in
// double: for a prefix of one number g and along x are equal, and their rounding errors would be
// multiplied by the inverse of that number, which may be large.
template <class T>
void prefix_rows_backward(const T* g, const Matrix& x, int64_t width, const double* along,
                          const double* inverse, T* out, int64_t stride, int64_t begin,
                          int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* to = out + row * stride;
    const T *x_row = read(x, row, 0, width, to), *g_row = g + row * width;
    const double factor = inverse[row], coefficient = along[row];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      to[k] = T(factor * (double(g_row[k]) - coefficient * double(x_row[k])));
    }
  }
}

// Sums up all rows of x, for the columns [begin, end).
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

// out = x - centre, row by row, and the norms of these rows.
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

// Multiplies x by `root` twice, in double. The factor root * root itself may be infinite, as the
// inverse of a subnormal norm is, while the inverse of its square root is finite.
template <class T>
void scale(T* x, int64_t count, double root) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) x[k] = T(x[k] * root * root);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
