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

// Rows whose sums of columns are in the panel's type, before they are added up in double precision.
constexpr int64_t kSumRows = 24;

// Distinct targets that CoSENT over a matrix keeps sums of.
constexpr int64_t kMostLevels = 256;

// Numbers of each row that metrics are made of (SEEN in fastsim/batch_metrics.py).
constexpr int64_t kObserved = 8;

// Columns by the row that they belong to, ascending: those of row i are columns[first[i]] to
// columns[first[i + 1] - 1]. Null: not known.
struct ColumnsOfRows {
  const int64_t *first, *columns;
};

// How a kernel over pairs is shared out; `first_look`: over rows, and it is the first that looks at
// the scores, before which they are observed where that is asked for; `parts`: over rows, of which
// it may be given a part of the columns.
enum class Each { first_look, rows, columns, parts };

// What a kernel over pairs cannot do without: groups; groups or a matrix of targets; the positive
// of each row among its columns.
struct Needs {
  bool groups = false, targets = false, positives = false;
};
inline constexpr struct {
  Needs nothing{}, groups{.groups = true}, targets{.targets = true}, positives{.positives = true},
      margins{.targets = true, .positives = true};
} kNeeds;

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
  // (rows, kObserved), to which the first look adds what the scores say of a batch; null: nobody
  // asks. akin: the columns with a row's group or its id, where they are few (observing.h).
  double* seen;
  ColumnsOfRows akin;

  // The positive's column within this block, or -1 where it lies elsewhere.
  FASTSIM_INLINE int64_t positive(int64_t row) const {
    const int64_t column = positives[row] - column0;
    return column >= 0 && column < columns ? column : -1;
  }

  // What decides the roles of the pairs without its first rows; the scores are another matter.
  Block from_row(int64_t first) const {
    const auto past = [first](const int64_t* of_rows) { return of_rows ? of_rows + first : nullptr; };
    Block rest = *this;
    rest.row0 += first;
    rest.positives = past(positives);
    rest.row_ids = past(row_ids);
    rest.row_groups = past(row_groups);
    if (dense.data) rest.dense = dense.from_row(first);
    return rest;
  }

  // The same without its first columns.
  Block from_column(int64_t first) const {
    const auto past = [first](const int64_t* of) { return of ? of + first : nullptr; };
    Block rest = *this;
    rest.column0 += first;
    rest.column_ids = past(column_ids);
    rest.column_groups = past(column_groups);
    if (dense.data) rest.dense = dense.from_column(first);
    return rest;
  }
};

// Running maximum (of scores) and sum of exponentials relative to it.
struct MaxSum {
  double *max, *sum;
};

// A short list of numbers.
template <class T>
struct Values {
  const T* data;
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

// What a row of the other side adds to a gradient: its unit row times `factor`.
struct Share {
  int64_t row;
  double factor;
};

// The gradient of the rows `own` of cosines, of which few score gradients differ from those of
// their row. Row i gets of_every[i] (null: 1) times `every`, and its shares of `others`, which are
// those from first[i] to first[i + 1]. With each side its inverse norms: unit rows exist nowhere.
template <class T>
struct SharedGradient {
  Matrix own;
  const T* inverse;
  Matrix others;
  const T* inverse_of_others;
  int64_t width;
  const T *every, *of_every;
  const int64_t* first;
  const Share* shares;
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
  const bool *mask_x, *mask_y;  // which rows are tokens; null: all
  const T *inverse_x, *inverse_y;
};

// What each kernel over pairs takes beside them.
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Arguments, each, needs, ...) \
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

// One implementation of every kernel.
template <class T>
struct Kernels {
  int64_t panel_columns;  // columns of a packed panel
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

// That of this processor (choose.cpp).
const KernelTable& kernels();

}  // namespace fastsim
