// The operators of a sweep over prefixes (fastsim/engine/sweep.py). sweep_<kernel> is a kernel over
// the pairs of a block, of all widths: all that happens to a row of scores happens while the row of
// each width is in cache.

#include <algorithm>
#include <vector>

#include "operators.h"
#include "pair_operators.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {

namespace {

// Rows whose dots of columns are added up in the panel's type, before they are in double precision.
constexpr int64_t kSumRows = 24;

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
// no gradient; where the dots of rows and columns are added up.
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
    row_dots = by_width<double>(from.row_dots, widths, rows, ScalarType::Double);
    column_dots = by_width<double>(from.column_dots, widths, columns, ScalarType::Double);
    STD_TORCH_CHECK(bool(row_ratios) == bool(column_ratios) &&
                        bool(row_dots) == bool(column_dots) &&
                        bool(row_zeros) == bool(column_zeros),
                    "fastsim: of rows and of columns");
  }

  T ratio(int64_t k, int64_t row) const { return row_ratios ? row_ratios[k][row] : T(1); }

  void without_gradient(int64_t k, int64_t row) const {
    T* score_grads = panels.row(k, row);
    const bool *zeros = column_zeros[k], zero = row_zeros[k][row];
    for (int64_t j = 0; j < panels.columns; ++j) {
      score_grads[j] = zero || zeros[j] ? T(0) : score_grads[j];
    }
  }

  // One row through all widths; kernel(k, row) does to that of one what the loss does. `scores` is
  // memory for a row, `sums` that of the dots of columns (widths, columns).
  template <class F>
  void run(int64_t row, const F& kernel, T* scores, T* sums) const {
    const auto& k_ = kernels().of<T>();
    const int64_t widths = panels.widths, columns = panels.columns;
    for (int64_t k = 0; k < widths; ++k) {
      T* panel = panels.row(k, row);
      const T of_row = k ? ratio(k - 1, row) : T(1);
      k_.scores_of_width(panel, scores, k == 0, columns, of_row, k ? column_ratios[k - 1] : nullptr);
      kernel(k, row);
      if (!sums) continue;
      if (row_zeros) without_gradient(k, row);
      k_.score_dots(panel, scores, columns, row_dots[k] + row, sums + k * columns);
    }
    for (int64_t k = widths - 2; k >= 0 && sums; --k) {
      k_.carry_row(panels.row(k, row), panels.row(k + 1, row), columns, ratio(k, row),
                   column_ratios[k]);
    }
  }
};

// The rows of a block, in groups that add up their dots of columns in one order.
template <class T, class F>
void run_over_rows(const Sweep<T>& sweep, const F& kernel) {
  const int64_t widths = sweep.panels.widths, rows = sweep.panels.rows;
  const int64_t columns = sweep.panels.columns, groups = tiles(rows, kSumRows);
  const bool with_dots = bool(sweep.column_dots);
  const int64_t of_group = with_dots ? widths * columns : 0;
  const Scratch<T> sums(groups * of_group);
  over(groups, kSumRows * widths * columns, [&](int64_t begin, int64_t end) {
    const Scratch<T> scores(columns);
    for (int64_t group = begin; group < end; ++group) {
      T* sum = sums + group * of_group;
      std::fill_n(sum, of_group, T(0));
      const int64_t last = std::min(rows, (group + 1) * kSumRows);
      for (int64_t row = group * kSumRows; row < last; ++row) {
        sweep.run(row, kernel, scores, with_dots ? sum : nullptr);
      }
    }
  });
  if (!with_dots) return;
  over(columns, groups * widths, [&](int64_t begin, int64_t end) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t k = 0; k < widths; ++k) {
        const T* sum = sums + group * of_group + k * columns;
        double* dots = sweep.column_dots[k];
        for (int64_t j = begin; j < end; ++j) dots[j] += double(sum[j]);
      }
    }
  });
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
    const auto fields = Kernel::template take<T>(from);
    from.check(Kernel::name);
    take_pairs(pairs, b);
    const Sweep<T> sweep(panels, given);
    b.rows = sweep.panels.rows;
    b.columns = sweep.panels.columns;
    b.stride = sweep.panels.row_stride;
    std::vector<Block<T>> blocks(widths, b);
    std::vector<decltype(of_width(fields, 0, from.strides))> arguments;
    for (int64_t k = 0; k < widths; ++k) {
      blocks[k].scores = sweep.panels.row(k, 0);
      arguments.push_back(of_width(fields, k, from.strides));
    }
    const auto kernel = Kernel::template of<T>();
    if constexpr (Kernel::shares != Each::columns) {
      run_over_rows(sweep, [&](int64_t k, int64_t row) {
        kernel(blocks[k], arguments[k], row, row + 1);
      });
    } else {
      over(b.columns, b.rows * widths, [&](int64_t begin, int64_t end) {
        for (int64_t k = 0; k < widths; ++k) kernel(blocks[k], arguments[k], begin, end);
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
