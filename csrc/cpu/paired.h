// The kernels on paired rows: their cosines and distances, and the gradients of these. Unit rows
// are not written to memory.
#pragma once

#include "lanes.h"
#include "rows.h"
#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Computes the cosines x_i . y_i / (|x_i| |y_i|) of the pairs (rows,), and the inverse norms of
// both rows.
template <class T>
void paired_cosines(const Matrix& x, const Matrix& y, int64_t width, T* cosines, T* inverse_x,
                    T* inverse_y, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T x_memory[kChunk], y_memory[kChunk];
    double sums[3] = {};  // x . x, y . y and x . y
    for_chunks(0, width, [&](int64_t first, int64_t n) {
      const T *a = read(x, row, first, n, x_memory), *b = read(y, row, first, n, y_memory);
      add_terms(n, sums, [&](auto at, auto& to) {
        const auto u = at(a), v = at(b);
        to[0] += u * u;
        to[1] += v * v;
        to[2] += u * v;
      });
    });
    const double r = inverse_norm<T>(sums[0]), s = inverse_norm<T>(sums[1]);
    cosines[row] = T(sums[2] * r * s);
    inverse_x[row] = T(r);
    inverse_y[row] = T(s);
  }
}

// Computes exp(sharpness (x_i . y_i - 1)) of pairs of unit rows.
template <class T>
void potentials(const T* x, const T* y, int64_t width, T sharpness, T* out, int64_t begin,
                int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *a = x + row * width, *b = y + row * width;
    // Several sums, as a single sum would wait for its own additions.
    constexpr int64_t kWays = 4, kWide = kLanes<T>;
    Vector<T> sum[kWays] = {};
    int64_t k = 0;
    for (; k + kWays * kWide <= width; k += kWays * kWide) {
#pragma GCC unroll 4
      for (int64_t way = 0; way < kWays; ++way) {
        sum[way] += vector_at(a + k + way * kWide) * vector_at(b + k + way * kWide);
      }
    }
    const Vector<T> sums = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    T dot = 0;
    for (int64_t lane = 0; lane < kWide; ++lane) dot += sums[lane];
    for (; k < width; ++k) dot += a[k] * b[k];
    out[row] = dot - 1;
  }
#pragma omp simd
  for (int64_t row = begin; row < end; ++row) out[row] = exponential(out[row], sharpness);
}

// Writes the gradient of one row x: dx = score_grad r (s y - c r x), with the inverse norms r of x
// and s of y, and their cosine c. Both terms of the difference are as large as unit rows, so no
// norm that T can hold makes them overflow or vanish.
template <class T>
void paired_row_backward(const T* x, const T* y, int64_t count, T score_grad, T cosine, T r, T s,
                         void* grad, Dtype dtype, int64_t at) {
  T out[kChunk];
  const T coefficient = cosine * r, outer = score_grad * r;
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) out[k] = outer * (s * y[k] - coefficient * x[k]);
  store(out, count, grad, dtype, at);
}

// Writes the gradients of both rows of each pair in one pass over the rows; null: not wanted.
template <class T>
void paired_cosines_backward(const T* score_grads, const Matrix& x, const Matrix& y, int64_t width,
                             const T* cosines, const T* inverse_x, const T* inverse_y,
                             void* grad_x, Dtype dtype_x, void* grad_y, Dtype dtype_y,
                             int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T g = score_grads[row], c = cosines[row], r = inverse_x[row], s = inverse_y[row];
    T x_memory[kChunk], y_memory[kChunk];
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      const T *a = read(x, row, at, n, x_memory), *b = read(y, row, at, n, y_memory);
      if (grad_x) paired_row_backward(a, b, n, g, c, r, s, grad_x, dtype_x, row * width + at);
      if (grad_y) paired_row_backward(b, a, n, g, c, s, r, grad_y, dtype_y, row * width + at);
    });
  }
}

// Computes the distances near_i = |a_i - p_i| and far_i = |a_i - n_i|.
template <class T>
void triplet_distances(const Matrix& anchors, const Matrix& positives, const Matrix& negatives,
                       int64_t width, T* near, T* far, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T a_memory[kChunk], p_memory[kChunk], n_memory[kChunk];
    double squares[2] = {};  // the squared distances to the positive and to the negative
    for_chunks(0, width, [&](int64_t first, int64_t count) {
      const T* a = read(anchors, row, first, count, a_memory);
      const T* p = read(positives, row, first, count, p_memory);
      const T* n = read(negatives, row, first, count, n_memory);
      add_terms(count, squares, [&](auto at, auto& to) {
        const auto anchor = at(a), u = at(p) - anchor, v = at(n) - anchor;
        to[0] += u * u;
        to[1] += v * v;
      });
    });
    near[row] = T(__builtin_sqrt(squares[0]));
    far[row] = T(__builtin_sqrt(squares[1]));
  }
}

// Writes the gradients of sum_i grad_i (near_i - far_i); null: not wanted. The gradient of a
// distance 0 is taken to be 0.
template <class T>
void triplet_distances_backward(const T* grad, const Matrix& anchors, const Matrix& positives,
                                const Matrix& negatives, int64_t width, const T* near,
                                const T* far, void* grad_anchors, Dtype dtype_anchors,
                                void* grad_positives, Dtype dtype_positives, void* grad_negatives,
                                Dtype dtype_negatives, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    // In double, as the inverse of a subnormal float32 distance may exceed float32.
    const double pull = near[row] == 0 ? 0 : double(grad[row]) / double(near[row]);
    const double push = far[row] == 0 ? 0 : -double(grad[row]) / double(far[row]);
    T a[kChunk], p[kChunk], n[kChunk];
    for_chunks(0, width, [&](int64_t at, int64_t count) {
      load(anchors, row, at, count, a);
      load(positives, row, at, count, p);
      load(negatives, row, at, count, n);
#pragma omp simd
      for (int64_t k = 0; k < count; ++k) {
        const double u = pull * (double(p[k]) - double(a[k]));
        const double v = push * (double(n[k]) - double(a[k]));
        p[k] = T(u);
        n[k] = T(v);
        a[k] = T(-(u + v));
      }
      const int64_t to = row * width + at;
      if (grad_anchors) store(a, count, grad_anchors, dtype_anchors, to);
      if (grad_positives) store(p, count, grad_positives, dtype_positives, to);
      if (grad_negatives) store(n, count, grad_negatives, dtype_negatives, to);
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
