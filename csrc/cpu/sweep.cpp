// The operators of a sweep over prefixes (fastsim/engine/sweep.py). sweep_<kernel> is a kernel over
// the pairs of a block, of all widths: all that happens to a row of scores happens while the row of
// each width is in cache.

#include <algorithm>
#include <vector>

#include "column_sums.h"
#include "operators.h"
#include "pair_operators.h"
#include "passes.h"
#include "sweep_products.h"

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
//
// x and y: the operands of the products; grad_x and grad_y: what becomes of the score gradients
// (SweepProducts). Without x the caller makes all products. filled: the panels have those of own
// columns already. whole_rows: the kernel needs whole rows, and a part is the block. Panels may be of
// the block's first rows alone, or of none: memory of a part serves the others.
#define SWEEP_SCHEMA                                                                   \
  "Tensor? row_ratios, Tensor? column_ratios, "                                        \
  "Tensor? row_zeros, Tensor? column_zeros, Tensor(row_dots!)? row_dots, "             \
  "Tensor(column_dots!)? column_dots, Tensor[] x, Tensor[] y, Tensor(grad_x!)[] grad_x, " \
  "Tensor(grad_y!)[] grad_y, bool first_rows, bool first_columns, bool filled, bool whole_rows, "
struct SweepArguments {
  Optional row_ratios, column_ratios, row_zeros, column_zeros, row_dots, column_dots;
  std::vector<Tensor> x, y, grad_x, grad_y;
  bool first_rows, first_columns, filled, whole_rows;
};

SweepArguments take_sweep(Arguments& from) {
  return {.row_ratios = from.take<Optional>(),
          .column_ratios = from.take<Optional>(),
          .row_zeros = from.take<Optional>(),
          .column_zeros = from.take<Optional>(),
          .row_dots = from.take<Optional>(),
          .column_dots = from.take<Optional>(),
          .x = from.take<std::vector<Tensor>>(),
          .y = from.take<std::vector<Tensor>>(),
          .grad_x = from.take<std::vector<Tensor>>(),
          .grad_y = from.take<std::vector<Tensor>>(),
          .first_rows = from.take<bool>(),
          .first_columns = from.take<bool>(),
          .filled = from.take<bool>(),
          .whole_rows = from.take<bool>()};
}

// Panels of one size, that of a block, or of a part of it at a time.
template <class T>
struct Panels {
  T* data = nullptr;
  int64_t widths = 0, stride = 0, row_stride = 0, row0 = 0, column0 = 0;

  T* at(int64_t k, int64_t row, int64_t column) const {
    return data + k * stride + (row - row0) * row_stride + (column - column0);
  }
};

template <class T>
struct Sweep {
  int64_t widths, rows, columns;
  ByWidth<const T> row_ratios, column_ratios;
  ByWidth<const bool> row_zeros, column_zeros;
  ByWidth<double> row_dots, column_dots;

  Sweep(const SweepArguments& from, int64_t widths, int64_t rows, int64_t columns)
      : widths(widths), rows(rows), columns(columns) {
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

  ColumnTotals dots_of_columns(int64_t at) const {
    return {column_dots.data + at, widths - 1, column_dots.stride};
  }

  void without_gradient(T* score_grads, int64_t k, int64_t row, int64_t at, int64_t n) const {
    const bool *zeros = column_zeros[k] + at, zero = row_zeros[k][row];
    for (int64_t j = 0; j < n; ++j) score_grads[j] = zero || zeros[j] ? T(0) : score_grads[j];
  }

  // The columns [at, at + n) of one row through all widths; kernel(k, scores) does to those of one
  // what the loss does: where the products were, or in `copy`, memory for n, if they are to stay.
  // `scores` is memory for n of every width, `dots` that of the dots of these columns, those of a
  // width `dots_stride` from those of the next. next: as of `ask_for`.
  template <class F>
  void run(const Panels<T>& panels, int64_t row, int64_t at, int64_t n, int64_t next,
           const F& kernel, T* scores, T* copy, T* dots, int64_t dots_stride) const {
    const auto& k_ = kernels().of<T>();
    for (int64_t k = 0; k < widths; ++k) {
      T *own = panels.at(k, row, at), *of_width = scores + k * n, *out = copy ? copy : own;
      k_.scores_of_width(own, k ? of_width - n : nullptr, of_width, out, n,
                         k ? ratio(k - 1, row) : T(1), k ? ratios(k - 1, at) : nullptr, next);
      kernel(k, out);
      if (carries() && row_zeros) without_gradient(out, k, row, at, n);
    }
    if (!carries()) return;
    for (int64_t k = widths - 2; k >= 0; --k) {
      k_.carry_row(panels.at(k, row, at), panels.at(k + 1, row, at), scores + k * n, n,
                   ratio(k, row), ratios(k, at), row_dots[k] + row, dots + k * dots_stride);
    }
  }
};

// Columns of a row that go through all widths at once where a kernel takes parts: what a group of
// rows has of them all stays in the first cache.
constexpr int64_t kPart = 512;

// Rows and columns of a part of a block: few enough to stay in a near cache, enough for long sums
// in the products.
constexpr int64_t kPartRows = 360, kPartColumns = 512;

// `count` columns of a block from `at` on, of one row, where its scores are.
template <class T>
Block<T> part_of_columns(Block<T> b, int64_t at, int64_t count) {
  b.stride = 0;
  b.column0 += at;
  b.columns = count;
  if (b.column_ids) b.column_ids += at;
  if (b.column_groups) b.column_groups += at;
  if (b.dense.data) b.dense = b.dense.from_column(at);
  return b;
}

// All that happens to a part of a block between the products; fills: from the first ones on.
template <class Kernel, class T, class Fields>
void run_part(const Sweep<T>& sweep, const Panels<T>& panels, const Block<T>& b,
              const std::vector<Fields>& arguments, const Part& part, const Arguments& from,
              const SweepProducts<T>& products, bool fills, bool in_cache) {
  constexpr bool sums = has_sums<Fields>;  // where the products stay
  constexpr bool in_parts = Kernel::shares == Each::parts;
  const auto kernel = Kernel::template of<T>();
  const int64_t widths = sweep.widths, columns = part.columns;
  ColumnTotals totals{from.sums + part.column, widths, from.sums_stride};
  if (!sums) totals = sweep.carries() ? sweep.dots_of_columns(part.column) : ColumnTotals{};
  const bool targeted = b.dense.data || b.row_groups;
  const int64_t most = in_parts ? std::min(kPart, columns) : columns;
  over_groups<T>(part.rows, columns, widths * columns, totals, [&] {
    return [&, memory = Scratch<T>((widths + 1 + sums) * most)](int64_t begin, int64_t end,
                                                                    T* of_rows) {
      T *targets = memory + widths * most, *copy = sums ? targets + most : nullptr;
      if (fills) {
        const auto first = [&](int64_t k) { return panels.at(k, part.row, part.column); };
        products.fill(part, {begin, end}, first, panels.row_stride);
      }
      std::vector<Fields> of_width = arguments;
      for (int64_t at = 0; at < columns; at += most) {
        const int64_t first = part.column + at, n = std::min(most, columns - at);
        Block<T> of_part = part_of_columns(b, first, n);
        if (targeted) of_part.dense = {targets, kDtypeOf<T>, 0, 1};
        for (int64_t k = 0; k < widths; ++k) {
          of_width[k] = with_sums(from_column(arguments[k], first), of_rows + k * columns + at);
        }
        for (int64_t row = part.row + begin; row < part.row + end; ++row) {
          if (targeted) kernels().of<T>().load_targets(b, row, first, n, targets);
          const auto run = [&](int64_t k, T* scores) {
            of_part.scores = scores;
            kernel(of_part, of_width[k], row, row + 1);
          };
          const int64_t next = !in_cache && row + 1 < part.row + end ? panels.row_stride : 0;
          sweep.run(panels, row, first, n, next, run, memory, copy, of_rows + at, columns);
        }
      }
    };
  });
}

template <class Kernel>
void run_sweep(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  const Tensor given_panels = from.take<Tensor>();
  const SweepArguments given = take_sweep(from);
  with_type(given_panels, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    b.row0 = from.take<int64_t>();
    b.column0 = from.take<int64_t>();
    const PairArguments pairs = take_pairs(from);
    const int64_t widths = from.widths = given_panels.size(0);
    auto fields = Kernel::template take<T>(from);
    from.check(Kernel::name);
    take_pairs(pairs, b);
    STD_TORCH_CHECK(given_panels.dim() == 3 && given_panels.stride(2) == 1,
                    "fastsim: row-major panels");
    const bool has_products = !given.x.empty();
    const int64_t kept = given_panels.size(1);
    b.rows = has_products ? given.x[0].size(0) : kept;
    b.columns = has_products ? given.y[0].size(0) : given_panels.size(2);
    STD_TORCH_CHECK(kept == 0 || (kept <= b.rows && given_panels.size(2) == b.columns),
                    "fastsim: panels of rows of the block");
    const Sweep<T> sweep(given, widths, b.rows, b.columns);
    const bool parts = has_products && !given.whole_rows;
    const int64_t wide = parts ? std::min(b.columns, kPartColumns) : b.columns;
    const int64_t tall = parts ? even_part(b.rows, kPartRows, kSumRows) : b.rows;
    const int64_t odd = wide + kAligned / int64_t(sizeof(T));
    const Scratch<T> memory(kept < b.rows ? widths * tall * odd : 0);
    const Panels<T> panels{static_cast<T*>(given_panels.mutable_data_ptr()), widths,
                           given_panels.stride(0), given_panels.stride(1)};
    b.stride = panels.row_stride;
    std::vector<decltype(of_width(fields, 0, from.strides))> arguments;
    for (int64_t k = 0; k < widths; ++k) arguments.push_back(of_width(fields, k, from.strides));
    if constexpr (Kernel::shares != Each::columns) {
      constexpr bool sums = has_sums<decltype(fields)>;
      STD_TORCH_CHECK(!sums || !sweep.carries(), "fastsim: sums or score gradients");
      const SweepProducts<T> products({given.x, widths, b.rows}, {given.y, widths, b.columns},
                                      {given.grad_x, widths, b.rows},
                                      {given.grad_y, widths, b.columns}, given.first_rows,
                                      given.first_columns, parts ? wide : 0);
      const int64_t filled = given.filled || !has_products ? kept : 0;
      for (int64_t column = 0; column < b.columns; column += wide) {
        const int64_t columns = std::min(wide, b.columns - column);
        if (parts && filled < b.rows) products.pack(column, columns);
        for (int64_t row = 0, end; row < b.rows; row = end) {
          end = std::min(row + tall, row < kept ? kept : b.rows);
          const Part part{row, end - row, column, columns};
          const Panels<T> of_part{memory, widths, tall * odd, odd, row, column};
          const Panels<T> here = row < kept ? panels : of_part;
          const auto scores = [&](int64_t k) { return here.at(k, row, column); };
          const bool fills = row >= filled;
          if (fills && !parts) products.fill(part, scores, here.row_stride);
          run_part<Kernel>(sweep, here, b, arguments, part, from, products, fills && parts,
                           parts && row >= kept);
          if (products.multiplies()) products.multiply(part, scores, here.row_stride);
        }
      }
    } else {
      over(b.columns, b.rows * widths, [&](int64_t begin, int64_t end) {
        for (int64_t k = 0; k < widths; ++k) {
          Block<T> of_width = b;
          of_width.scores = panels.at(k, 0, 0);
          Kernel::template of<T>()(of_width, arguments[k], begin, end);
        }
      });
    }
  });
}

std::vector<Operator> operators() {
  return {
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
