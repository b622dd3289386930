// The operators of a sweep over prefixes (the terms: fastsim/engine/sweep.py). The operator
// sweep_<kernel> runs a kernel over the pairs of a block for all widths of the sweep. All steps on
// a row of scores, for all widths, happen while the row is in cache.

#include <algorithm>
#include <vector>

#include "column_sums.h"
#include "operators.h"
#include "pair_operators.h"
#include "passes.h"
#include "sweep_products.h"

namespace fastsim {

namespace {

// An array for each width, with a number for each row or column of a block. Null data: not given.
template <class T>
struct PerWidth {
  T* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data; }
  T* operator[](int64_t k) const { return data ? data + k * stride : nullptr; }
};

// The PerWidth of a tensor (widths, count), which is checked, or of None.
template <class T>
PerWidth<T> per_width(const Optional& given, const char* name, int64_t widths, int64_t count,
                      ScalarType type) {
  if (!given) return {};
  if (given->scalar_type() != type || given->dim() != 2 || given->size(0) != widths ||
      given->size(1) != count || given->stride(1) != 1) {
    refuse(name, *given, "(", widths, ", ", count, ") ", torch::headeronly::toString(type),
           ", its rows contiguous");
  }
  return {static_cast<T*>(given->mutable_data_ptr()), given->stride(0)};
}

// The arguments of a sweep beside the panels (widths, rows, columns), and their schema.
//
// row_ratios, column_ratios: (widths - 1, rows or columns), the factors of a width's scores in
// those of the next width. row_zeros, column_zeros: (widths, rows or columns), whether the prefix
// of the row or column is zero; its scores have no gradient then. row_dots, column_dots: (widths -
// 1, rows or columns), to which the products of a width's scores with what the next longer width
// adds to their gradients are added. If these are given, the score gradients are carried to the
// shorter widths.
//
// x, y: the operands of the products for each width; without x the caller computes all products.
// grad_x, grad_y, first_rows, first_columns: the gradients, computed from the score gradients, as
// in SweepProducts.
//
// filled: the panels hold the products of the widths' own columns already. whole_rows: the kernel
// needs whole rows, so the whole block is one part.
//
// The panels may cover only the first rows of the block, or none. All other parts share one memory.
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

SweepArguments take_sweep(Stack& from) {
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

// The panels of all widths, of a block or a part of it. row0, column0: the row and column of the
// block that the panels begin at.
template <class T>
struct Panels {
  T* data = nullptr;
  int64_t widths = 0, stride = 0, row_stride = 0, row0 = 0, column0 = 0;

  T* at(int64_t k, int64_t row, int64_t column) const {
    return data + k * stride + (row - row0) * row_stride + (column - column0);
  }
};

// The sizes of a sweep over a block, and the factors, zeros and sums that its rows and columns
// have.
template <class T>
struct Sweep {
  int64_t widths, rows, columns;
  PerWidth<const T> row_ratios, column_ratios;
  PerWidth<const bool> row_zeros, column_zeros;
  PerWidth<double> row_dots, column_dots;

  Sweep(const SweepArguments& from, int64_t widths, int64_t rows, int64_t columns)
      : widths(widths), rows(rows), columns(columns) {
    row_ratios = per_width<const T>(from.row_ratios, "row_ratios", widths - 1, rows, kTypeOf<T>);
    column_ratios =
        per_width<const T>(from.column_ratios, "column_ratios", widths - 1, columns, kTypeOf<T>);
    row_zeros = per_width<const bool>(from.row_zeros, "row_zeros", widths, rows, ScalarType::Bool);
    column_zeros =
        per_width<const bool>(from.column_zeros, "column_zeros", widths, columns, ScalarType::Bool);
    row_dots = per_width<double>(from.row_dots, "row_dots", widths - 1, rows, ScalarType::Double);
    column_dots =
        per_width<double>(from.column_dots, "column_dots", widths - 1, columns, ScalarType::Double);
    STD_TORCH_CHECK(bool(row_ratios) == bool(column_ratios) &&
                        bool(row_dots) == bool(column_dots) &&
                        bool(row_zeros) == bool(column_zeros),
                    "fastsim: ratios, dots, zeros: wanted those of rows and of columns");
  }

  T ratio(int64_t k, int64_t row) const { return row_ratios ? row_ratios[k][row] : T(1); }
  const T* ratios(int64_t k, int64_t at) const {
    return column_ratios ? column_ratios[k] + at : nullptr;
  }
  // Whether score gradients are carried to shorter widths.
  bool carries() const { return bool(row_dots); }

  // Where the dots of the columns from `at` on are added.
  ColumnTotals dots_of_columns(int64_t at) const {
    return {column_dots.data + at, widths - 1, column_dots.stride};
  }

  // Sets the score gradients of row `row` and the columns [at, at + n) to 0 where the prefix of the
  // row or of the column is zero.
  void clear_gradients_of_zeros(T* score_grads, int64_t k, int64_t row, int64_t at,
                                int64_t n) const {
    const bool *zeros = column_zeros[k] + at, zero = row_zeros[k][row];
    for (int64_t j = 0; j < n; ++j) score_grads[j] = zero || zeros[j] ? T(0) : score_grads[j];
  }

  // Takes the columns [at, at + n) of one row through all widths. kernel(k, scores) applies the
  // loss to the scores of width k. These are in place of the products or, if the products are to
  // stay, in `copy`, memory for n numbers. scores: memory for n numbers per width. dots: where the
  // dots of these columns are added, those of one width `dots_stride` from those of the next. next:
  // as in `prefetch_ahead`.
  template <class F>
  void run(const Panels<T>& panels, int64_t row, int64_t at, int64_t n, int64_t next,
           const F& kernel, T* scores, T* copy, T* dots, int64_t dots_stride) const {
    const auto& table = kernels().of<T>();
    for (int64_t k = 0; k < widths; ++k) {
      T *own = panels.at(k, row, at), *width_scores = scores + k * n, *out = copy ? copy : own;
      table.scores_of_width(own, k ? width_scores - n : nullptr, width_scores, out, n,
                            k ? ratio(k - 1, row) : T(1), k ? ratios(k - 1, at) : nullptr, next);
      kernel(k, out);
      if (carries() && row_zeros) clear_gradients_of_zeros(out, k, row, at, n);
    }
    if (!carries()) return;
    for (int64_t k = widths - 2; k >= 0; --k) {
      table.carry_row(panels.at(k, row, at), panels.at(k + 1, row, at), scores + k * n, n,
                      ratio(k, row), ratios(k, at), row_dots[k] + row, dots + k * dots_stride);
    }
  }
};

// The number of columns of a row that go through all widths together, for a kernel that takes parts
// of rows. Few enough that L1 holds what a group of rows needs of them, for all widths.
constexpr int64_t kPart = 512;

// The rows and columns of a part of a block: few enough that the part stays in a near cache, and
// enough that the sums of the products are long.
constexpr int64_t kPartRows = 360, kPartColumns = 512;

// The columns [at, at + count) of a block. The stride is 0: `scores` then holds a single row,
// whatever the row's number.
template <class T>
Block<T> part_of_columns(Block<T> b, int64_t at, int64_t count) {
  b = b.from_column(at);
  b.stride = 0;
  b.columns = count;
  return b;
}

// The steps on a part of a block between the products of its scores and those of its score
// gradients.
template <class Kernel, class T, class Fields>
class PartOfSweep {
 public:
  // panels: the memory of the part's scores. fields: the kernel's arguments for each width. fills:
  // whether `run` first computes the products, a group of rows at a time. in_cache: whether the
  // panels are in a near cache, so that no row need be prefetched.
  PartOfSweep(const Sweep<T>& sweep, const Panels<T>& panels, const Block<T>& b,
              const std::vector<Fields>& fields, const Part& part, const ColumnSums& sums,
              const SweepProducts<T>& products, bool fills, bool in_cache)
      : sweep_(sweep), panels_(panels), b_(b), fields_(fields), part_(part), sums_(sums),
        products_(products), fills_(fills), in_cache_(in_cache),
        targeted_(b.dense.data || b.row_groups),
        columns_at_once_(Kernel::pass_kind == PassKind::parts ? std::min(kPart, part.columns)
                                                              : part.columns) {}

  void run() const {
    const int64_t widths = sweep_.widths;
    over_row_groups<T>(part_.rows, part_.columns, widths * part_.columns, totals(), [&] {
      return [this, memory = Memory(widths, columns_at_once_), fields = fields_](
                 int64_t begin, int64_t end, T* group_sums) mutable {
        if (fills_) fill({begin, end});
        for (int64_t at = 0; at < part_.columns; at += columns_at_once_) {
          run_columns(at, {begin, end}, group_sums, memory, fields);
        }
      };
    });
  }

 private:
  // If so, the products stay in the panels, and the kernel works on copies of the scores.
  static constexpr bool kHasColumnSums = has_column_sums<Fields>;

  // The memory of a thread for `columns` columns.
  struct Memory {
    Memory(int64_t widths, int64_t columns)
        : all((widths + 1 + kHasColumnSums) * columns), targets(all + widths * columns),
          copy(kHasColumnSums ? targets + columns : nullptr) {}

    const Scratch<T> all;  // begins with the scores of all widths
    T *targets, *copy;
  };

  // Where the sums of columns are added: the kernel's, or the dots.
  ColumnTotals totals() const {
    if (kHasColumnSums) return {sums_.data + part_.column, sweep_.widths, sums_.width_stride};
    return sweep_.carries() ? sweep_.dots_of_columns(part_.column) : ColumnTotals{};
  }

  // Computes the products of some rows of the part.
  void fill(Range rows) const {
    const auto first = [&](int64_t k) { return panels_.at(k, part_.row, part_.column); };
    products_.fill(part_, rows, first, panels_.row_stride);
  }

  // Takes columns of the part from `at` on, as many as there is memory for, through all widths, for
  // some of the part's rows.
  void run_columns(int64_t at, Range rows, T* group_sums, const Memory& memory,
                   std::vector<Fields>& fields) const {
    const int64_t first = part_.column + at, n = std::min(columns_at_once_, part_.columns - at);
    Block<T> part_block = part_of_columns(b_, first, n);
    if (targeted_) part_block.dense = {memory.targets, kDtypeOf<T>, 0, 1};
    for (int64_t k = 0; k < sweep_.widths; ++k) {
      fields[k] = with_column_sums(from_column(fields_[k], first),
                                   group_sums + k * part_.columns + at);
    }
    const auto kernel = Kernel::template function<T>();
    for (int64_t row = part_.row + rows.begin, end = part_.row + rows.end; row < end; ++row) {
      if (targeted_) kernels().of<T>().load_targets(b_, row, first, n, memory.targets);
      const auto run = [&](int64_t k, T* scores) {
        part_block.scores = scores;
        kernel(part_block, fields[k], row, row + 1);
      };
      const int64_t next = !in_cache_ && row + 1 < end ? panels_.row_stride : 0;
      sweep_.run(panels_, row, first, n, next, run, memory.all, memory.copy, group_sums + at,
                 part_.columns);
    }
  }

  const Sweep<T>& sweep_;
  const Panels<T>& panels_;
  const Block<T>& b_;
  const std::vector<Fields>& fields_;
  const Part& part_;
  const ColumnSums& sums_;
  const SweepProducts<T>& products_;
  const bool fills_, in_cache_, targeted_;
  const int64_t columns_at_once_;  // columns of a row that go through all widths together
};

// Runs a kernel over the columns of each width. Such a kernel has no products before or after it.
template <class Kernel, class T, class Fields>
void run_over_columns(const Panels<T>& panels, const Block<T>& b,
                      const std::vector<Fields>& fields) {
  over(b.columns, b.rows * panels.widths, [&](int64_t begin, int64_t end) {
    for (int64_t k = 0; k < panels.widths; ++k) {
      Block<T> width_block = b;
      width_block.scores = panels.at(k, 0, 0);
      Kernel::template function<T>()(width_block, fields[k], begin, end);
    }
  });
}

// Runs a kernel over the rows of each width, with the products before and after it, part by part.
// panels: those of the block's first `panel_rows` rows.
template <class Kernel, class T, class Fields>
void run_over_parts(const SweepArguments& given, const Panels<T>& panels, int64_t panel_rows,
                    const Block<T>& b, const std::vector<Fields>& fields,
                    const ColumnSums& sums) {
  const int64_t widths = panels.widths;
  const bool whole_rows = given.whole_rows || Kernel::needs.positives;
  const bool has_products = !given.x.empty(), in_parts = has_products && !whole_rows;
  const Sweep<T> sweep(given, widths, b.rows, b.columns);
  STD_TORCH_CHECK(!has_column_sums<Fields> || !sweep.carries(),
                  "fastsim: ", Kernel::name, ": wanted column_sums or column_dots, got both");
  const int64_t wide = in_parts ? std::min(b.columns, kPartColumns) : b.columns;
  const int64_t tall = in_parts ? even_part(b.rows, kPartRows, kSumRows) : b.rows;
  const int64_t row_stride = panel_stride<T>(wide);
  const Scratch<T> memory(panel_rows < b.rows ? widths * tall * row_stride : 0);
  const SweepProducts<T> products({given.x, "x", widths, b.rows}, {given.y, "y", widths, b.columns},
                                  {given.grad_x, "grad_x", widths, b.rows},
                                  {given.grad_y, "grad_y", widths, b.columns}, given.first_rows,
                                  given.first_columns, in_parts ? wide : 0);
  if (b.rows == 0 || b.columns == 0) return products.clear(b.rows, b.columns);
  const int64_t filled = given.filled || !has_products ? panel_rows : 0;
  for (int64_t column = 0; column < b.columns; column += wide) {
    const int64_t columns = std::min(wide, b.columns - column);
    if (in_parts && filled < b.rows) products.pack(column, columns);
    for (int64_t row = 0, end; row < b.rows; row = end) {
      end = std::min(row + tall, row < panel_rows ? panel_rows : b.rows);
      const Part part{row, end - row, column, columns};
      const Panels<T> memory_panels{memory, widths, tall * row_stride, row_stride, row, column};
      const Panels<T> part_panels = row < panel_rows ? panels : memory_panels;
      const auto scores = [&](int64_t k) { return part_panels.at(k, row, column); };
      const bool fills = row >= filled;
      if (fills && !in_parts) products.fill(part, scores, part_panels.row_stride);
      PartOfSweep<Kernel, T, Fields>(sweep, part_panels, b, fields, part, sums, products,
                                     fills && in_parts, in_parts && row >= panel_rows)
          .run();
      if (products.multiplies()) products.multiply(part, scores, part_panels.row_stride);
    }
  }
}

// The operator sweep_<kernel>.
template <class Kernel>
void run_sweep(StableIValue* stack, uint64_t, uint64_t) {
  Stack from(stack);
  const Tensor given_panels = from.take<Tensor>();
  const SweepArguments given = take_sweep(from);
  const PairCall<Kernel> call(from);
  STD_TORCH_CHECK(!call.pairs.row_metrics,
                  "fastsim: row_metrics: wanted none in a sweep, which counts nothing");
  with_type(given_panels, "panels", [&](auto type) {
    using T = decltype(type);
    if (given_panels.dim() != 3 || given_panels.stride(2) != 1 || given_panels.size(0) == 0) {
      refuse("panels", given_panels, "row-major panels (widths, rows, columns)");
    }
    const int64_t widths = given_panels.size(0), panel_rows = given_panels.size(1);
    const bool has_products = !given.x.empty();
    STD_TORCH_CHECK(has_products == !given.y.empty(), "fastsim: x, y: wanted both or neither");
    Block<T> b{};
    b.row0 = call.row0;
    b.column0 = call.column0;
    b.rows = has_products ? given.x[0].size(0) : panel_rows;
    b.columns = has_products ? given.y[0].size(0) : given_panels.size(2);
    STD_TORCH_CHECK(panel_rows == 0 || (panel_rows <= b.rows && given_panels.size(2) == b.columns),
                    "fastsim: panels: wanted rows of the block, which is (", b.rows, ", ",
                    b.columns, "), got ", describe(given_panels));
    take_pairs(call.pairs, b);
    check_needs(b, Kernel::needs, Kernel::name);
    const Panels<T> panels{static_cast<T*>(given_panels.mutable_data_ptr()), widths,
                           given_panels.stride(0), given_panels.stride(1)};
    b.stride = panels.row_stride;
    Extent extent{b.rows, b.columns, widths};
    std::vector<decltype(fields_of<T>(call.fields, extent))> fields;
    for (; extent.k < widths; ++extent.k) fields.push_back(fields_of<T>(call.fields, extent));
    if constexpr (Kernel::pass_kind == PassKind::columns) {
      STD_TORCH_CHECK(panel_rows == b.rows, "fastsim: panels: wanted those of all rows, got ",
                      describe(given_panels));
      run_over_columns<Kernel>(panels, b, fields);
    } else {
      const ColumnSums sums = column_sums_of(call.fields, {b.rows, b.columns, widths});
      run_over_parts<Kernel>(given, panels, panel_rows, b, fields, sums);
    }
  });
}

std::vector<Operator> operators() {
  return {
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, pass, needs, ...)                               \
  {"sweep_" #name "(Tensor(panels!) panels, " SWEEP_SCHEMA "int row0, int column0, " \
   PAIRS_SCHEMA __VA_ARGS__ ") -> ()",                                             \
   run_sweep<Fields##Operator>},
#include "schemas.inc"
#include "kernels.inc"
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
