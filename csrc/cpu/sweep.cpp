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
ByWidth<T> by_width(const Optional& given, const char* name, int64_t widths, int64_t count,
                    ScalarType type) {
  if (!given) return {};
  if (given->scalar_type() != type || given->dim() != 2 || given->size(0) != widths ||
      given->size(1) != count || given->stride(1) != 1) {
    refuse(name, *given, "(", widths, ", ", count, ") ", torch::headeronly::toString(type),
           ", its rows contiguous");
  }
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
    row_ratios = by_width<const T>(from.row_ratios, "row_ratios", widths - 1, rows, kTypeOf<T>);
    column_ratios =
        by_width<const T>(from.column_ratios, "column_ratios", widths - 1, columns, kTypeOf<T>);
    row_zeros = by_width<const bool>(from.row_zeros, "row_zeros", widths, rows, ScalarType::Bool);
    column_zeros =
        by_width<const bool>(from.column_zeros, "column_zeros", widths, columns, ScalarType::Bool);
    row_dots = by_width<double>(from.row_dots, "row_dots", widths - 1, rows, ScalarType::Double);
    column_dots =
        by_width<double>(from.column_dots, "column_dots", widths - 1, columns, ScalarType::Double);
    STD_TORCH_CHECK(bool(row_ratios) == bool(column_ratios) &&
                        bool(row_dots) == bool(column_dots) &&
                        bool(row_zeros) == bool(column_zeros),
                    "fastsim: ratios, dots, zeros: wanted those of rows and of columns");
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
  b = b.from_column(at);
  b.stride = 0;
  b.columns = count;
  return b;
}

// All that happens to a part of a block between the products.
template <class Kernel, class T, class Fields>
class PartOfSweep {
 public:
  // panels: where the scores of the part are; fields: of each width. fills: from the first products
  // on; in_cache: where the panels are then.
  PartOfSweep(const Sweep<T>& sweep, const Panels<T>& panels, const Block<T>& b,
              const std::vector<Fields>& fields, const Part& part, const SumsOfColumns& sums,
              const SweepProducts<T>& products, bool fills, bool in_cache)
      : sweep_(sweep), panels_(panels), b_(b), fields_(fields), part_(part), sums_(sums),
        products_(products), fills_(fills), in_cache_(in_cache),
        targeted_(b.dense.data || b.row_groups),
        most_(Kernel::shares == Each::parts ? std::min(kPart, part.columns) : part.columns) {}

  void run() const {
    const int64_t widths = sweep_.widths;
    over_groups<T>(part_.rows, part_.columns, widths * part_.columns, totals(), [&] {
      return [this, memory = Memory(widths, most_), fields = fields_](
                 int64_t begin, int64_t end, T* of_rows) mutable {
        if (fills_) fill({begin, end});
        for (int64_t at = 0; at < part_.columns; at += most_) {
          run_columns(at, {begin, end}, of_rows, memory, fields);
        }
      };
    });
  }

 private:
  static constexpr bool kSums = has_sums<Fields>;  // and the products stay where they are

  // Of a thread, for `most` columns.
  struct Memory {
    Memory(int64_t widths, int64_t most)
        : all((widths + 1 + kSums) * most), targets(all + widths * most),
          copy(kSums ? targets + most : nullptr) {}

    const Scratch<T> all;  // first the scores of each width
    T *targets, *copy;
  };

  ColumnTotals totals() const {
    if (kSums) return {sums_.data + part_.column, sweep_.widths, sums_.by_width};
    return sweep_.carries() ? sweep_.dots_of_columns(part_.column) : ColumnTotals{};
  }

  void fill(Range rows) const {
    const auto first = [&](int64_t k) { return panels_.at(k, part_.row, part_.column); };
    products_.fill(part_, rows, first, panels_.row_stride);
  }

  // The columns of the part from `at` on, as many as there is memory for, of some of its rows.
  void run_columns(int64_t at, Range rows, T* of_rows, const Memory& memory,
                   std::vector<Fields>& fields) const {
    const int64_t first = part_.column + at, n = std::min(most_, part_.columns - at);
    Block<T> of_part = part_of_columns(b_, first, n);
    if (targeted_) of_part.dense = {memory.targets, kDtypeOf<T>, 0, 1};
    for (int64_t k = 0; k < sweep_.widths; ++k) {
      fields[k] = with_sums(from_column(fields_[k], first), of_rows + k * part_.columns + at);
    }
    const auto kernel = Kernel::template of<T>();
    for (int64_t row = part_.row + rows.begin, end = part_.row + rows.end; row < end; ++row) {
      if (targeted_) kernels().of<T>().load_targets(b_, row, first, n, memory.targets);
      const auto run = [&](int64_t k, T* scores) {
        of_part.scores = scores;
        kernel(of_part, fields[k], row, row + 1);
      };
      const int64_t next = !in_cache_ && row + 1 < end ? panels_.row_stride : 0;
      sweep_.run(panels_, row, first, n, next, run, memory.all, memory.copy, of_rows + at,
                 part_.columns);
    }
  }

  const Sweep<T>& sweep_;
  const Panels<T>& panels_;
  const Block<T>& b_;
  const std::vector<Fields>& fields_;
  const Part& part_;
  const SumsOfColumns& sums_;
  const SweepProducts<T>& products_;
  const bool fills_, in_cache_, targeted_;
  const int64_t most_;  // columns at a time
};

// The kernel over the columns of each width, which has no part in the products.
template <class Kernel, class T, class Fields>
void run_over_columns(const Panels<T>& panels, const Block<T>& b,
                      const std::vector<Fields>& fields) {
  over(b.columns, b.rows * panels.widths, [&](int64_t begin, int64_t end) {
    for (int64_t k = 0; k < panels.widths; ++k) {
      Block<T> of_width = b;
      of_width.scores = panels.at(k, 0, 0);
      Kernel::template of<T>()(of_width, fields[k], begin, end);
    }
  });
}

// The kernel over the rows of each width, and the products before and after it, part by part.
// panels: of the block's first `kept` rows.
template <class Kernel, class T, class Fields>
void run_over_parts(const SweepArguments& given, const Panels<T>& panels, int64_t kept,
                    const Block<T>& b, const std::vector<Fields>& fields,
                    const SumsOfColumns& sums) {
  const int64_t widths = panels.widths;
  const bool whole_rows = given.whole_rows || Kernel::needs.positives;
  const bool has_products = !given.x.empty(), parts = has_products && !whole_rows;
  const Sweep<T> sweep(given, widths, b.rows, b.columns);
  STD_TORCH_CHECK(!has_sums<Fields> || !sweep.carries(),
                  "fastsim: ", Kernel::name, ": wanted column_sums or column_dots, got both");
  const int64_t wide = parts ? std::min(b.columns, kPartColumns) : b.columns;
  const int64_t tall = parts ? even_part(b.rows, kPartRows, kSumRows) : b.rows;
  const int64_t odd = wide + kAligned / int64_t(sizeof(T));
  const Scratch<T> memory(kept < b.rows ? widths * tall * odd : 0);
  const SweepProducts<T> products({given.x, "x", widths, b.rows}, {given.y, "y", widths, b.columns},
                                  {given.grad_x, "grad_x", widths, b.rows},
                                  {given.grad_y, "grad_y", widths, b.columns}, given.first_rows,
                                  given.first_columns, parts ? wide : 0);
  if (b.rows == 0 || b.columns == 0) return products.clear(b.rows, b.columns);
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
      PartOfSweep<Kernel, T, Fields>(sweep, here, b, fields, part, sums, products, fills && parts,
                                     parts && row >= kept)
          .run();
      if (products.multiplies()) products.multiply(part, scores, here.row_stride);
    }
  }
}

template <class Kernel>
void run_sweep(StableIValue* stack, uint64_t, uint64_t) {
  Stack from(stack);
  const Tensor given_panels = from.take<Tensor>();
  const SweepArguments given = take_sweep(from);
  const int64_t row0 = from.take<int64_t>(), column0 = from.take<int64_t>();
  const PairArguments pairs = take_pairs(from);
  STD_TORCH_CHECK(!pairs.seen, "fastsim: seen: wanted none in a sweep, which counts nothing");
  const typename Kernel::Given given_fields{from};
  with_type(given_panels, "panels", [&](auto type) {
    using T = decltype(type);
    if (given_panels.dim() != 3 || given_panels.stride(2) != 1 || given_panels.size(0) == 0) {
      refuse("panels", given_panels, "row-major panels (widths, rows, columns)");
    }
    const int64_t widths = given_panels.size(0), kept = given_panels.size(1);
    const bool has_products = !given.x.empty();
    STD_TORCH_CHECK(has_products == !given.y.empty(), "fastsim: x, y: wanted both or neither");
    Block<T> b{};
    b.row0 = row0;
    b.column0 = column0;
    b.rows = has_products ? given.x[0].size(0) : kept;
    b.columns = has_products ? given.y[0].size(0) : given_panels.size(2);
    STD_TORCH_CHECK(kept == 0 || (kept <= b.rows && given_panels.size(2) == b.columns),
                    "fastsim: panels: wanted rows of the block, which is (", b.rows, ", ",
                    b.columns, "), got ", shown(given_panels));
    take_pairs(pairs, b);
    check_needs(b, Kernel::needs, Kernel::name);
    const Panels<T> panels{static_cast<T*>(given_panels.mutable_data_ptr()), widths,
                           given_panels.stride(0), given_panels.stride(1)};
    b.stride = panels.row_stride;
    Extent extent{b.rows, b.columns, widths};
    std::vector<decltype(fields_of<T>(given_fields, extent))> fields;
    for (; extent.k < widths; ++extent.k) fields.push_back(fields_of<T>(given_fields, extent));
    if constexpr (Kernel::shares == Each::columns) {
      STD_TORCH_CHECK(kept == b.rows, "fastsim: panels: wanted those of all rows, got ",
                      shown(given_panels));
      run_over_columns<Kernel>(panels, b, fields);
    } else {
      const SumsOfColumns sums = sums_of(given_fields, {b.rows, b.columns, widths});
      run_over_parts<Kernel>(given, panels, kept, b, fields, sums);
    }
  });
}

std::vector<Operator> operators() {
  return {
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, each, needs, ...)                               \
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
