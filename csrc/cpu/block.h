// A block of the score matrix and what decides the role of each of its pairs. Plain data: shared
// by the registrations (ops.cpp) and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "epilogue.h"
#include "matrix.h"

namespace fastsim {

// Half-open: a thread's share of rows, columns or panels.
struct Range {
  int64_t begin, end;
};

// Rows of the register tile of a product; threads take whole tiles.
constexpr int64_t kTileRows = 6;

// Distinct targets that CoSENT over a matrix keeps sums of.
constexpr int64_t kMostLevels = 256;

// Rows [row0, row0 + rows) against columns [column0, column0 + columns) of the score matrix.
// `scores` is row-major, `stride` apart. Pointers index the block's own rows and columns;
// `positives` holds columns of the whole matrix. Null: not given.
template <class T>
struct Block {
  T* scores;
  int64_t stride, rows, columns, row0, column0;
  const int64_t *positives, *row_ids, *column_ids, *row_groups, *column_groups;
  Matrix dense;
  T negative_target;
  Skip skip;

  // The positive's column within this block, or -1 where it lies elsewhere.
  FASTSIM_INLINE int64_t positive(int64_t row) const {
    const int64_t column = positives[row] - column0;
    return column >= 0 && column < columns ? column : -1;
  }
};

// Running maximum (of scores) and sum of exponentials relative to it.
struct MaxSum {
  double *max, *sum;
};

template <class T>
struct SoftmaxState {
  MaxSum rows;
  double *target_logits, *target_sums;  // sum_j t z and sum_j t
};

template <class T>
struct SoftmaxScoreGrad {
  const T *row_top, *row_weight, *target_weight, *column_top, *column_weight;
};

// By row, of the terms of its positives: sum of the losses and of the score gradients.
struct PositiveSums {
  double *losses, *score_grads;
};

// By row, for negatives and positives: what the exponentials are relative to, and their weight.
template <class T>
struct ContrastScoreGrad {
  const T *negative_top, *negative_weight, *positive_top, *positive_weight;
};

// By row, where each positive has a term of its own: of the negatives what the exponentials are
// relative to, their weight and the logarithm of their sum; and the weight of a positive.
template <class T>
struct PositiveScoreGrad {
  const T *negative_top, *negative_weight, *log_sum, *positive_weight;
};

// An extreme score by row and its column; -1 where there is none.
template <class T>
struct Extreme {
  T* values;
  int64_t* indices;
};

template <class T>
struct LevelScoreGrad {
  const T *values, *high, *up, *low, *down;
  int64_t count;
};

// Rows (rows, width) and, by row, `count` columns chosen among `y`: column k of row i is
// columns[k * rows + i], negative for none. Either |x_i - y_j| of a pair counts or x_i . y_j.
template <class T>
struct Partners {
  const T *x, *y;
  int64_t rows, width, count;
  const int64_t* columns;
  bool distances;
};

// The entries of Partners::columns by the column they name, ascending: those that name column j
// are entries[first[j]] to entries[first[j + 1] - 1].
struct Naming {
  const int64_t *first, *entries;
};

// The document token that each query token chose, `places` (documents, tokens) from the start of
// its document, negative for none, int32 if `wide`, else int16; and what gradients along them need.
// Each query meets `documents` documents: all, or with `own` those numbered from query * documents.
// `grad` (queries, documents); inverse norms of the rows of cosines, null: plain products.
template <class T>
struct Winners {
  const void* places;
  bool wide, own;
  int64_t documents, tokens, width;
  const int64_t *query_of, *query_starts, *document_starts;
  const T* grad;
  Matrix x, y;
  const T *inverse_x, *inverse_y;
};

// One implementation of every kernel; row kernels take a range of the block's rows, column
// kernels a range of its columns, so that ranges can run on different threads.
template <class T>
struct Kernels {
  void (*unit_rows)(const Matrix& x, int64_t width, T* unit, T* inverse, int64_t, int64_t);
  void (*unit_rows_backward)(const T* grad_unit, const Matrix& x, int64_t width, const T* inverse,
                             T factor, void* grad, Dtype, T* dots, int64_t, int64_t);
  void (*paired_cosines)(const Matrix& x, const Matrix& y, int64_t width, T* cosines, T* inverse_x,
                         T* inverse_y, int64_t, int64_t);
  void (*paired_cosines_backward)(const T* score_grads, const Matrix& x, const Matrix& y, int64_t width,
                                  const T* cosines, const T* inverse_x, const T* inverse_y,
                                  void* grad_x, Dtype, void* grad_y, Dtype, int64_t, int64_t);
  void (*column_sums)(const T* x, int64_t rows, int64_t width, double* sums, int64_t, int64_t);
  void (*centred_rows)(const T* x, const T* centre, int64_t width, T* out, double* norms, int64_t,
                       int64_t);
  void (*chosen_rows)(const Partners<T>&, T* values, int64_t, int64_t);
  void (*chosen_rows_of_rows)(const Partners<T>&, const double* score_grads, T* grad_x, int64_t, int64_t);
  void (*chosen_rows_of_columns)(const Partners<T>&, const double* score_grads, const Naming&, T* grad_y,
                              int64_t, int64_t);
  int64_t panel_columns;
  void (*pack_panels)(const T* y, int64_t rows, int64_t width, T* packed, Range panels);
  void (*score_panels)(const T* x, int64_t width, const T* packed, int64_t columns, T* scores,
                       int64_t stride, Range rows, Range panels);
  void (*multiply_rows)(const T* panel, int64_t stride, int64_t depth, const T* y, int64_t width,
                        T* out, bool add, Range rows);
  void (*multiply_columns)(const T* panel, int64_t stride, int64_t depth, const T* x,
                           int64_t width, T* out, bool add, Range columns);
  void (*leave_out_above)(const Block<T>&, const T* guide, int64_t guide_stride,
                          const T* thresholds, int64_t, int64_t);
  void (*softmax_fused)(const Block<T>&, T scale, T margin, bool normalise, const T* weights,
                        const SoftmaxState<T>&, int64_t, int64_t);
  void (*softmax_forward_rows)(const Block<T>&, T scale, T margin, const SoftmaxState<T>&, int64_t,
                            int64_t);
  void (*softmax_forward_columns)(const Block<T>&, T scale, const MaxSum&, int64_t, int64_t);
  void (*softmax_score_grad)(const Block<T>&, T scale, T margin, const SoftmaxScoreGrad<T>&, int64_t,
                        int64_t);
  void (*sigmoid)(const Block<T>&, T scale, T bias, const T* weights, double* losses,
                  double* score_grad_sums, int64_t, int64_t);
  void (*squared_error)(const Block<T>&, const T* weights, double* losses, int64_t, int64_t);
  void (*multi_similarity_forward)(const Block<T>&, T scale, T positive_scale,
                                const MaxSum& negatives, const MaxSum& positives, int64_t, int64_t);
  void (*multi_similarity_score_grad)(const Block<T>&, T scale, T positive_scale,
                                 const ContrastScoreGrad<T>&, int64_t, int64_t);
  void (*multi_positive_forward)(const Block<T>&, T scale, bool known, const MaxSum& negatives,
                              const PositiveSums&, int64_t, int64_t);
  void (*multi_positive_score_grad)(const Block<T>&, T scale, const PositiveScoreGrad<T>&, int64_t,
                               int64_t);
  void (*circle_forward)(const Block<T>&, T scale, T margin, const MaxSum& negatives,
                         const MaxSum& positives, int64_t, int64_t);
  void (*circle_score_grad)(const Block<T>&, T scale, T margin, const ContrastScoreGrad<T>&,
                            int64_t, int64_t);
  void (*levels_forward)(const Block<T>&, T scale, const T* values, int64_t count, double* partial,
                      int64_t, int64_t);
  void (*levels_score_grad)(const Block<T>&, T scale, const LevelScoreGrad<T>&, int64_t, int64_t);
  void (*closest)(const Block<T>&, bool semi_hard, const T* ceilings, T* values, int64_t* indices,
                  int64_t, int64_t);
  void (*hardest)(const Block<T>&, const T* offsets, const Extreme<T>& lowest,
                  const Extreme<T>& highest, int64_t, int64_t);
  void (*triplet)(const Block<T>&, bool semi_hard, T margin, const T* weights, double* losses,
                  int64_t, int64_t);
  void (*top_k)(const Block<T>&, int64_t k, T* values, int64_t* indices, int64_t, int64_t);
  void (*exponentials)(const T* x, T* out, int64_t count);
  void (*token_rows)(const Matrix& x, const int64_t* rows, int64_t count, int64_t width,
                     bool cosine, T* out);
  void (*largest_of_columns)(const T* panel, int64_t stride, int64_t rows, int64_t columns,
                             const T* factors, int64_t first, T* values, int64_t* places);
  void (*max_sim_queries)(const Winners<T>&, void* grad, Dtype, T* memory, int64_t, int64_t);
  void (*max_sim_documents)(const Winners<T>&, void* grad, Dtype, T* memory, int64_t, int64_t);
};

struct KernelTable {
  const char* name;
  Kernels<float> of_float;
  Kernels<double> of_double;

  template <class T>
  const Kernels<T>& of() const {
    if constexpr (sizeof(T) == sizeof(float)) {
      return of_float;
    } else {
      return of_double;
    }
  }
};

}  // namespace fastsim
