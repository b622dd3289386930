// The kernels of MaxSim: the largest product of each query token with the tokens of a document, and
// the gradients of these products. max_sim.cpp and max_sim_backward.cpp divide them among threads.
#pragma once

#include <limits>

#include "dtypes.h"
#include "products.h"
#include "rows.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Copies the `count` rows of x whose numbers `rows` lists to `out` (count, width), in the compute
// type. With `cosine` they become unit rows.
template <class T>
void token_rows(const Matrix& x, const int64_t* rows, int64_t count, int64_t width, bool cosine,
                T* out) {
  for (int64_t i = 0; i < count; ++i, out += width) {
    load(x, rows[i], 0, width, out);
    if (!cosine) continue;
    const T factor = T(inverse_norm<T>(sum_of_squares(out, width)));
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] *= factor;
  }
}

// The integer type of the size of T.
template <class T>
struct IntegerOf {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};

// Finds the largest entry of each column of a panel (rows, columns), and the first row that has it.
// Each entry is first multiplied by the factor of its row. Row 0 of the panel has number `first`.
// `values` and `places` hold the largest entries of the rows before it and the numbers of these
// rows, and are updated. A NaN counts as larger than all numbers; its place is not recorded.
// Columns are processed kTileColumns at a time, so the panel, `values` and `places` extend to a
// multiple of it.
template <class T>
void largest_of_columns(const T* panel, int64_t stride, int64_t rows, int64_t columns,
                        const T* factors, int64_t first, T* values, int64_t* places) {
  using V = Vector<T>;
  using I = Vector<typename IntegerOf<T>::type>;
  for (int64_t at = 0; at < columns; at += kTileColumns<T>) {
    V top[kVectors], nan[kVectors];
    I place[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      top[v] = vector_at(values + at + v * kLanes<T>);
      nan[v] = V{};
      place[v] = I{} - 1;
    }
    const T* row = panel + at;
    for (int64_t r = 0; r < rows; ++r, row += stride) {
      const T factor = factors[r];
      const I row_number = I{} + typename IntegerOf<T>::type(r);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const V score = factor * vector_at(row + v * kLanes<T>);
        const auto above = score > top[v];
        top[v] = above ? score : top[v];
        place[v] = above ? row_number : place[v];
        nan[v] += score - score;  // NaN for an infinity too
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
        const int64_t column = at + v * kLanes<T> + lane;
        if (place[v][lane] >= 0) places[column] = first + place[v][lane];
        values[column] = top[v][lane];
        if (nan[v][lane] == nan[v][lane]) continue;
        // The column has a score that is not finite. Only a NaN replaces the value.
        for (int64_t r = 0; r < rows; ++r) {
          const T score = factors[r] * panel[r * stride + column];
          if (score != score) values[column] = score;
        }
      }
    }
  }
}

// Writes the gradient of row `row` of x to `out`, in its dtype. `g` is the gradient of the row that
// took part in the products: the row itself, or with `inverse` the unit row. For a row that the
// mask leaves out, `g` is zero, and the row is not read, as it may hold anything. chunk (width,):
// memory.
template <class T>
void token_gradient(const Matrix& x, int64_t row, int64_t width, const T* inverse, const bool* mask,
                    T* g, T* chunk, void* out, Dtype dtype) {
  if (inverse && (!mask || mask[row])) {
    const T r = inverse[row];
    load(x, row, 0, width, chunk);
    const T coefficient = T(dot(chunk, g, width) * double(r) * double(r));
    subtract_along(chunk, g, coefficient, r, width);
    g = chunk;
  }
  store(g, width, out, dtype, row * width);
}

// The token of the document that a query token chose, negative for none.
template <class T>
int64_t winner(const Winners<T>& w, int64_t document, int64_t token) {
  const int64_t at = document * w.tokens + token;
  return w.wide ? static_cast<const int32_t*>(w.places)[at]
                : static_cast<const int16_t*>(w.places)[at];
}

// out += factor * row
template <class T>
void add_row(T* out, const T* row, T factor, int64_t width) {
#pragma omp simd
  for (int64_t k = 0; k < width; ++k) out[k] += factor * row[k];
}

// Writes the gradients of the query tokens [begin, end). Each is a sum over the documents, in their
// order. memory: 2 * width numbers.
template <class T>
void max_sim_queries(const Winners<T>& w, void* grad, Dtype dtype, T* memory, int64_t begin,
                     int64_t end) {
  T *sum = memory, *chunk = memory + w.width;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t query = w.query_of[token];
    for (int64_t k = 0; k < w.width; ++k) sum[k] = 0;
    for (int64_t document = 0; document < w.documents; ++document) {
      const int64_t place = winner(w, document, token);
      if (place < 0) continue;
      const int64_t row =
          w.document_starts[w.own ? query * w.documents + document : document] + place;
      const T factor = w.grad[query * w.documents + document];
      add_row(sum, read(w.y, row, 0, w.width, chunk),
              w.inverse_y ? factor * w.inverse_y[row] : factor, w.width);
    }
    token_gradient(w.x, token, w.width, w.inverse_x, w.mask_x, sum, chunk, grad, dtype);
  }
}

// Writes the gradients of the tokens of the documents [begin, end). Each is a sum over the query
// tokens, in their order. memory: (tokens of the longest document + 1) * width numbers.
template <class T>
void max_sim_documents(const Winners<T>& w, void* grad, Dtype dtype, T* memory, int64_t begin,
                       int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    const int64_t document = w.own ? at % w.documents : at;
    const int64_t first = w.own ? w.query_starts[at / w.documents] : 0;
    const int64_t last = w.own ? w.query_starts[at / w.documents + 1] : w.tokens;
    const int64_t start = w.document_starts[at], count = w.document_starts[at + 1] - start;
    T* chunk = memory + count * w.width;
    for (int64_t k = 0; k < count * w.width; ++k) memory[k] = 0;
    for (int64_t token = first; token < last; ++token) {
      const int64_t place = winner(w, document, token);
      if (place < 0) continue;
      const T factor = w.grad[w.query_of[token] * w.documents + document];
      add_row(memory + place * w.width, read(w.x, token, 0, w.width, chunk),
              w.inverse_x ? factor * w.inverse_x[token] : factor, w.width);
    }
    for (int64_t place = 0; place < count; ++place) {
      token_gradient(w.y, start + place, w.width, w.inverse_y, w.mask_y, memory + place * w.width,
                     chunk, grad, dtype);
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
