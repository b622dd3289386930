// A block of the score matrix, what decides the roles of its pairs, and the table of kernels. Plain
// data, shared by the registrations (ops.cpp) and the kernels, which are compiled once per
// instruction set.
#pragma once

#include <cstdint>

#include "epilogue.h"
#include "matrix.h"

namespace fastsim {

// A half-open range: a thread's share of rows, columns or micro-panels.
struct Range {
  int64_t begin, end;
};

// The rows of a register tile of a product. Threads take whole tiles.
constexpr int64_t kTileRows = 6;

// The number of rows whose column sums are kept in the panel's type before they are added up in
// float64.
constexpr int64_t kSumRows = 24;

// The most distinct targets that CoSENT over a matrix keeps sums of.
constexpr int64_t kMostLevels = 256;

// The numbers per row that metrics are made of (ROW_METRICS in fastsim/batch_metrics.py).
constexpr int64_t kRowMetrics = 8;

// The number of rows that are read at a time from a matrix that lies by columns: their numbers in a
// column fill a cache line.
constexpr int64_t kRowGroup = 16;

// Rows that a product prefetches into L2 for the product after it: `count` of them, as wide as a
// register tile, `step` apart.
template <class T>
struct L2Rows {
  const T* data = nullptr;
  int64_t step = 0, count = 0;
};

// A list of columns for each row, ascending: those of row i are columns[first[i]] to
// columns[first[i + 1] - 1]. Null pointers: the lists are unknown.
struct ColumnsOfRows {
  const int64_t *first, *columns;
};

// How a kernel over pairs is divided among threads. rows, columns: by rows or by columns.
// first_look: by rows, and the kernel is the first to read the scores; row metrics are recorded
// just before it, if they are wanted. parts: by rows, and the kernel may be called for a part of
// the columns.
enum class PassKind { first_look, rows, columns, parts };

// What a kernel over pairs requires: groups; targets, which are groups or a matrix of targets; or
// that the positive of each row is among the block's columns.
struct Needs {
  bool groups = false, targets = false, positives = false;
};
inline constexpr struct {
  Needs nothing{}, groups{.groups = true}, targets{.targets = true}, positives{.positives = true},
      margins{.targets = true, .positives = true};
} kNeeds;

// The block of rows [row0, row0 + rows) and columns [column0, column0 + columns) of the score
// matrix. `scores` is row-major with rows `stride` apart. All pointers are indexed by the block's
// own rows and columns, but `positives` holds column numbers of the whole matrix. Null pointers:
// not given.
template <class T>
struct Block {
  T* scores;
  int64_t stride, rows, columns, row0, column0;
  const int64_t *positives, *row_ids, *column_ids, *row_groups, *column_groups;
  Matrix dense;
  T negative_target;
  Skip skip;
  // row_metrics: (rows, kRowMetrics), to which the first kernel that reads the scores adds what
  // metrics of the batch need; null if there are no metrics. akin: for each row the columns with
  // its group or its id, if there are few of them (metrics_recorder.h).
  double* row_metrics;
  ColumnsOfRows akin;
  // For each row the columns with its group, if there are so few of them that the sigmoid loss
  // takes them one by one. All other targets are -1.
  ColumnsOfRows few_positives;

  // The column of the row's positive within this block, or -1 if it is in another block.
  FASTSIM_INLINE int64_t positive(int64_t row) const {
    const int64_t column = positives[row] - column0;
    return column >= 0 && column < columns ? column : -1;
  }

  // This block with what decides the roles of the pairs moved to the rows from `first` on. The
  // scores, the sizes and the row metrics stay as they are.
  Block from_row(int64_t first) const {
    const auto shifted = [first](const int64_t* p) { return p ? p + first : nullptr; };
    Block rest = *this;
    rest.row0 += first;
    rest.positives = shifted(positives);
    rest.row_ids = shifted(row_ids);
    rest.row_groups = shifted(row_groups);
    if (dense.data) rest.dense = dense.from_row(first);
    rest.few_positives.first = shifted(few_positives.first);
    return rest;
  }

  // The same for the columns from `first` on.
  Block from_column(int64_t first) const {
    const auto shifted = [first](const int64_t* p) { return p ? p + first : nullptr; };
    Block rest = *this;
    rest.column0 += first;
    rest.column_ids = shifted(column_ids);
    rest.column_groups = shifted(column_groups);
    if (dense.data) rest.dense = dense.from_column(first);
    rest.few_positives = {};  // they are columns of all pairs
    return rest;
  }
};

// The running maximum of scores, and the sum of exponentials relative to it.
struct MaxSum {
  double *max, *sum;
};

// A short list of numbers.
template <class T>
struct Values {
  const T* data;
  int64_t count;
};

// Rows x (rows, width) with `count` columns chosen for each among the rows of y: column k of row i
// is columns[k * rows + i], negative for none. The value of a pair is |x_i - y_j| with `distances`,
// otherwise x_i . y_j.
template <class T>
struct Partners {
  const T *x, *y;
  int64_t rows, width, count;
  const int64_t* columns;
  bool distances;
};

// The indices into Partners::columns, sorted by the column they hold: the ascending indices of
// column j are entries[first[j]] to entries[first[j + 1] - 1].
struct Naming {
  const int64_t *first, *entries;
};

// A term of a gradient: `factor` times the unit row number `row` of the other side.
struct Share {
  int64_t row;
  double factor;
};

// The gradient of one side of a matrix of cosines where all score gradients of a row are equal but
// for a few. The gradient of unit row i is common_factors[i] (null: 1) times `common_row`, plus the
// terms shares[first[i]] to shares[first[i + 1] - 1] of `others`. Unit rows are not in memory: each
// side comes with its inverse norms.
template <class T>
struct SharedGradient {
  Matrix rows;
  const T* inverse;
  Matrix others;
  const T* inverse_others;
  int64_t width;
  const T *common_row, *common_factors;
  const int64_t* first;
  const Share* shares;
};

// The winners of MaxSim, and what gradients along them need. `places` (documents, tokens): the
// document token that each query token chose, counted from the start of its document, negative for
// none; int32 if `wide`, otherwise int16. Each query is scored against `documents` documents: all
// of them, or with `own` the documents from number query * documents on. `grad` (queries,
// documents). The inverse norms are those of the rows, for cosines; null for dot products.
template <class T>
struct Winners {
  const void* places;
  bool wide, own;
  int64_t documents, tokens, width;
  const int64_t *query_of, *query_starts, *document_starts;
  const T* grad;
  Matrix x, y;
  const bool *mask_x, *mask_y;  // which rows are tokens; null: all are
  const T *inverse_x, *inverse_y;
};

// The arguments that each kernel over pairs takes beside the block, as a struct.
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Arguments, pass, needs, ...) \
  template <class T>                                    \
  struct Arguments {                                    \
    __VA_ARGS__                                         \
  };
#define NUMBER(name) T name;
#define FLAG(name) bool name;
#define COUNT(name) int64_t name;
#define INPUT(name) const T* name;
#define MAYBE_INPUT(name) const T* name;
#define OUTPUT(name) T* name;
#define STATE(name) double* name;
#define SUMS(name) T* name;
#define COLUMN_INPUT(name) INPUT(name)
#define MAYBE_COLUMN_INPUT(name) MAYBE_INPUT(name)
#define COLUMN_STATE(name) STATE(name)
#define LEVEL_INPUT(name) INPUT(name)
#define LEVEL_STATE(name) STATE(name)
#define INDICES(name) int64_t* name;
#define OUTPUT_OF_K(name) OUTPUT(name)
#define INDICES_OF_K(name) INDICES(name)
#define VALUES(name) Values<T> name;
#include "kernels.inc"

// The kernels for one instruction set and the type T.
template <class T>
struct Kernels {
  int64_t panel_columns;  // columns of a micro-panel
  bool reads_unpacked;    // whether `multiply_rows` reads contiguous rows of y where they are
#define FUNCTION(name, parameters) void(*name) parameters;
#define PAIRS_KERNEL(name, Arguments, ...) \
  void (*name)(const Block<T>&, Arguments<T>, int64_t, int64_t);
#include "kernels.inc"
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

// The kernels for this processor (choose.cpp).
const KernelTable& kernels();

}  // namespace fastsim
