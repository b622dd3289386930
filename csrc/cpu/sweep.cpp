// The operators of a sweep over prefixes (fastsim/engine/sweep.py). sweep_<kernel> is a kernel over
// the pairs of a block, of all widths: all that happens to a row of scores happens while the row of
// each width is in cache.

#include <algorithm>
#include <vector>

#include "column_sums.h"
#include "operators.h"
#include "pair_operators.h"
#include "passes.h"

namespace fastsim {

namespace {

// What each width has for the rows or columns of a block; null: nothing.
template <class T>
struct ByWidth {
  T* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data; }
  T* operator[](int64_t k) const { return data ? data + k * stride : nullptr; }
};

template <class T>
ByWidth<T> by_width(const Optional& given, int64_t widths, int64_t count, ScalarType type) {
  if (!given) return {};
  STD_TORCH_CHECK(given->dim() == 2 && given->size(0) == widths && given->size(1) == count &&
                      given->stride(1) == 1 && given->scalar_type() == type,
                  "fastsim: of every width a row of the operator's dtype");
  return {static_cast<T*>(given->mutable_data_ptr()), given->stride(0)};
}

// What a sweep has beside the panels (widths, rows, columns) of a kernel: the ratios of rows and
// columns from a width to the next; which rows and columns are zeros in a width, whose scores have
// no gradient; and of the widths but the last, where what a longer one's score gradients are to
// those of a row or column is added up, each times the score. With these, the panels' score
// gradients are carried to shorter widths.
#define SWEEP_SCHEMA                                                                   \
  "Tensor? row_ratios, Tensor? column_ratios, "                                        \
  "Tensor? row_zeros, Tensor? column_zeros, Tensor(row_dots!)? row_dots, "             \
  "Tensor(column_dots!)? column_dots, "
struct SweepArguments {
  Optional row_ratios, column_ratios, row_zeros, column_zeros, row_dots, column_dots;
};

SweepArguments take_sweep(Arguments& from) {
  return {.row_ratios = from.take<Optional>(),
          .column_ratios = from.take<Optional>(),
          .row_zeros = from.take<Optional>(),
          .column_zeros = from.take<Optional>(),
          .row_dots = from.take<Optional>(),
          .column_dots = from.take<Optional>()};
}

// Panels of one size.
template <class T>
struct Panels {
  T* data = nullptr;
  int64_t widths = 0, stride = 0, row_stride = 0, rows = 0, columns = 0;

  static Panels of(const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 3 && t.stride(2) == 1 && t.scalar_type() == kTypeOf<T>,
                    "fastsim: row-major panels of one dtype");
    return {static_cast<T*>(t.mutable_data_ptr()), t.size(0), t.stride(0), t.stride(1), t.size(1),
            t.size(2)};
  }
  T* row(int64_t k, int64_t row) const { return data + k * stride + row * row_stride; }
};

template <class T>
struct Sweep {
  Panels<T> panels;
  ByWidth<const T> row_ratios, column_ratios;
  ByWidth<const bool> row_zeros, column_zeros;
  ByWidth<double> row_dots, column_dots;

  Sweep(const Tensor& given, const SweepArguments& from)
      : panels(Panels<T>::of(given)) {
    const int64_t widths = panels.widths, rows = panels.rows, columns = panels.columns;
    row_ratios = by_width<const T>(from.row_ratios, widths - 1, rows, kTypeOf<T>);
    column_ratios = by_width<const T>(from.column_ratios, widths - 1, columns, kTypeOf<T>);
    row_zeros = by_width<const bool>(from.row_zeros, widths, rows, ScalarType::Bool);
    column_zeros = by_width<const bool>(from.column_zeros, widths, columns, ScalarType::Bool);
    row_dots = by_width<double>(from.row_dots, widths - 1, rows, ScalarType::Double);
    column_dots = by_width<double>(from.column_dots, widths - 1, columns, ScalarType::Double);
    STD_TORCH_CHECK(bool(row_ratios) == bool(column_ratios) &&
                        bool(row_dots) == bool(column_dots) &&
                        bool(row_zeros) == bool(column_zeros),
                    "fastsim: of rows and of columns");
  }

  T ratio(int64_t k, int64_t row) const { return row_ratios ? row_ratios[k][row] : T(1); }
  const T* ratios(int64_t k, int64_t at) const {
    return column_ratios ? column_ratios[k] + at : nullptr;
  }
  bool carries() const { return bool(row_dots); }

  ColumnTotals dots_of_columns() const {
    return {column_dots.data, panels.widths - 1, column_dots.stride};
  }

  void without_gradient(int64_t k, int64_t row, int64_t at, int64_t n) const {
    T* score_grads = panels.row(k, row) + at;
    const bool *zeros = column_zeros[k] + at, zero = row_zeros[k][row];
    for (int64_t j = 0; j < n; ++j) score_grads[j] = zero || zeros[j] ? T(0) : score_grads[j];
  }

  // The columns [at, at + n) of one row through all widths; kernel(k, scores) does to those of one
  // what the loss does: where the products were, or in `copy`, memory for n, if they are to stay.
  // `scores` is memory for n of every width, `dots` that of the dots of all columns (widths - 1,
  // columns).
  template <class F>
  void run(int64_t row, int64_t at, int64_t n, const F& kernel, T* scores, T* copy,
           T* dots) const {
    const auto& k_ = kernels().of<T>();
    const int64_t widths = panels.widths, columns = panels.columns;
    const int64_t next = row + 1 < panels.rows ? panels.row_stride : 0;
    for (int64_t k = 0; k < widths; ++k) {
      T *own = panels.row(k, row) + at, *of_width = scores + k * n, *out = copy ? copy : own;
      k_.scores_of_width(own, k ? of_width - n : nullptr, of_width, out, n,
                         k ? ratio(k - 1, row) : T(1), k ? ratios(k - 1, at) : nullptr, next);
      kernel(k, out);
      if (carries() && row_zeros) without_gradient(k, row, at, n);
    }
    if (!carries()) return;
    for (int64_t k = widths - 2; k >= 0; --k) {
      k_.carry_row(panels.row(k, row) + at, panels.row(k + 1, row) + at, scores + k * n, n,
                   ratio(k, row), ratios(k, at), row_dots[k] + row, dots + k * columns + at);
    }
  }
};

// Columns of a row that go through all widths at once where a kernel takes parts: what a group of
// rows has of them all stays in the first cache.
constexpr int64_t kPart = 512;

// `count` columns of a block from `at` on, of one row, where its scores are.
template <class T>
Block<T> part_of_columns(Block<T> b, int64_t at, int64_t count) {
  b.stride = 0;
  b.column0 += at;
  b.columns = count;
  if (b.column_ids) b.column_ids += at;
  if (b.column_groups) b.column_groups += at;
  return b;
}

template <class Kernel>
void run_sweep(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  const Tensor panels = from.take<Tensor>();
  const SweepArguments given = take_sweep(from);
  with_type(panels, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    b.row0 = from.take<int64_t>();
    b.column0 = from.take<int64_t>();
    const PairArguments pairs = take_pairs(from);
    const int64_t widths = from.widths = panels.size(0);
    auto fields = Kernel::template take<T>(from);
    from.check(Kernel::name);
    take_pairs(pairs, b);
    const Sweep<T> sweep(panels, given);
    b.rows = sweep.panels.rows;
    b.columns = sweep.panels.columns;
    b.stride = sweep.panels.row_stride;
    std::vector<decltype(of_width(fields, 0, from.strides))> arguments;
    for (int64_t k = 0; k < widths; ++k) arguments.push_back(of_width(fields, k, from.strides));
    const auto kernel = Kernel::template of<T>();
    if constexpr (Kernel::shares != Each::columns) {
      constexpr bool sums = has_sums<decltype(fields)>;
      STD_TORCH_CHECK(!sums || !sweep.carries(), "fastsim: sums or score gradients");
      ColumnTotals totals{from.sums, widths, from.sums_stride};
      if (!sums) totals = sweep.carries() ? sweep.dots_of_columns() : ColumnTotals{};
      constexpr bool in_parts = Kernel::shares == Each::parts;
      const int64_t part = in_parts ? std::min(kPart, b.columns) : b.columns;
      over_groups<T>(b.rows, b.columns, widths * b.columns, totals, [&] {
        return [&, memory = Scratch<T>((widths + sums) * part)](int64_t begin, int64_t end,
                                                                T* of_rows) {
          T* copy = sums ? memory + widths * part : nullptr;
          for (int64_t at = 0; at < b.columns; at += part) {
            Block<T> of_part = part_of_columns(b, at, std::min(part, b.columns - at));
            for (int64_t row = begin; row < end; ++row) {
              const auto of_width = [&](int64_t k, T* scores) {
                of_part.scores = scores;
                const auto given = from_column(arguments[k], at);
                kernel(of_part, with_sums(given, of_rows + k * b.columns + at), row, row + 1);
              };
              sweep.run(row, at, of_part.columns, of_width, memory, copy, of_rows);
            }
          }
        };
      });
    } else {
      over(b.columns, b.rows * widths, [&](int64_t begin, int64_t end) {
        for (int64_t k = 0; k < widths; ++k) {
          Block<T> of_width = b;
          of_width.scores = sweep.panels.row(k, 0);
          kernel(of_width, arguments[k], begin, end);
        }
      });
    }
  });
}

// x (N, d), columns of rows whose norms (N,) were those without them -> out, x over their norms.
void prefix_rows(Tensor x, Tensor norms, Tensor out) {
  with_type(out, [&](auto type) {
    using T = decltype(type);
    const Matrix from = matrix(x);
    double* norm = output<double>(norms);
    T* to = output<T>(out);
    over(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows(from, x.size(1), norm, to, begin, end);
    });
  });
}

// dots (N,) += inverse (x . grad_rows) of rows of x (N, d), columns of a matrix.
void prefix_rows_dots(Tensor grad_rows, Tensor x, Tensor inverse, Tensor dots) {
  with_type(grad_rows, [&](auto type) {
    using T = decltype(type);
    const Matrix from = matrix(x);
    const T* g = input<T>(grad_rows);
    const double* factor = input<double>(inverse);
    double* out = output<double>(dots);
    over(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_dots(g, from, x.size(1), factor, out, begin, end);
    });
  });
}

// grad (N, d), columns of a matrix = inverse (grad_rows - along x).
void prefix_rows_backward(Tensor grad_rows, Tensor x, Tensor along, Tensor inverse, Tensor grad) {
  with_type(grad_rows, [&](auto type) {
    using T = decltype(type);
    Block<T> to{};
    take_panel(grad, to);
    STD_TORCH_CHECK(grad.scalar_type() == kTypeOf<T> && to.columns == x.size(1),
                    "fastsim: gradients of x, of one dtype");
    const Matrix from = matrix(x);
    const T* g = input<T>(grad_rows);
    const double *of_norm = input<double>(along), *factor = input<double>(inverse);
    over(to.rows, to.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_backward(g, from, to.columns, of_norm, factor, to.scores,
                                             to.stride, begin, end);
    });
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(prefix_rows, "(Tensor x, Tensor(norms!) norms, Tensor(out!) out) -> ()"),
      OPERATOR(prefix_rows_dots, "(Tensor grad_rows, Tensor x, Tensor inverse, "
                                 "Tensor(dots!) dots) -> ()"),
      OPERATOR(prefix_rows_backward, "(Tensor grad_rows, Tensor x, Tensor along, Tensor inverse, "
                                     "Tensor(grad!) grad) -> ()"),
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, each, ...)                                      \
  {"sweep_" #name "(Tensor(panels!) panels, " SWEEP_SCHEMA "int row0, int column0, " \
   PAIRS_SCHEMA __VA_ARGS__ ") -> ()",                                             \
   run_sweep<Of##Fields>},
#include "schemas.inc"
#include "kernels.inc"
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
