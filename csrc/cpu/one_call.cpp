// One operator that computes a loss of the scores of two sides, and its gradient. Calls of
// operators take most of a small batch's time, and this is a single call.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "operators.h"
#include "panel.h"
#include "row_losses.h"
#include "side.h"

namespace fastsim {

namespace {

// Scores of the same pairs by other embeddings, a guide's or the factors of the targets, one band
// of rows at a time.
template <class T>
class OtherPanel {
 public:
  OtherPanel(const Tensor& rows, const Tensor& columns, bool cosine, int64_t band_rows)
      : rows_(rows, cosine), columns_(columns, cosine),
        panel_(rows_, rows_.count, columns_.operand(), columns_.inverse(), columns_.count,
               rows_.width, band_rows) {}

  OtherScores<T> band(int64_t first) const {
    const Block<T> b = panel_.band(first, {});
    return {b.scores, b.stride};
  }

 private:
  const Side<T> rows_, columns_;
  const Panel<T> panel_;
};

// The rows and columns of the scores, and their gradients. Without y the rows are the columns too.
template <class T>
class Sides {
 public:
  // to_x (N, width), to_y (M, width): where the gradients go; null: not wanted. Without y, to_x
  // gets the sum of both sides' gradients. lazy: see Side, of the columns.
  Sides(const Tensor& x, const Optional& y, int64_t width, bool cosine, bool lazy, T* to_x, T* to_y)
      // The unit rows may lie in to_x: the gradient of a band is written over its unit rows when
      // nothing reads these any more. Without y every band reads them.
      : rows(x, width, cosine, cosine && y ? to_x : nullptr), y_(y), to_x_(to_x), to_y_(to_y) {
    if (y) others_.emplace(*y, width, cosine, nullptr, lazy);
    // Without rows there is no band, and to_y is written by the first band.
    if (to_y && rows.count == 0) std::fill_n(to_y, columns().count * width, T(0));
  }

  const Side<T>& columns() const { return y_ ? *others_ : rows; }

  // Adds the products with the score gradients of the band of rows that starts at row `first`.
  void add_gradients(const Block<T>& b, int64_t first) const {
    const Side<T>& others = columns();
    const int64_t width = rows.width;
    const T* const band = rows + first * width;
    // The gradient of the band may be written over its unit rows, so that products with these come
    // first.
    if (to_y_) multiply_panel<T>(b, band, width, to_y_, true, first > 0);
    if (!to_x_) return;
    if (!y_) multiply_panel<T>(b, band, width, to_x_, true, first > 0);
    T* const to_band = to_x_ + first * width;
    multiply_panel<T>(b, others.operand(), others.inverse(), width, to_band, !y_);
  }

  // Replaces the gradients of the operands by those of x and y. Returns the sum over all pairs of
  // score times score gradient if `wants_sum`, otherwise 0. The sum follows from either side's
  // gradient; without y, to_x holds both gradients and yields it twice.
  double finish(bool wants_sum) const {
    double sum = 0;
    if (to_x_) sum = rows.finish(to_x_, wants_sum && !to_y_) / (y_ ? 1 : 2);
    if (to_y_) sum = columns().finish(to_y_, wants_sum);
    return sum;
  }

  const Side<T> rows;

 private:
  const Optional& y_;
  T *const to_x_, *const to_y_;
  std::optional<Side<T>> others_;
};

// Computes the loss of the prefixes of `width` numbers, times `factor`, and its derivatives by
// scale and bias. The derivative by scale is right only if there is a gradient. to_x and to_y are
// set to the gradients, see Sides. band_rows: the number of rows whose scores are in memory at a
// time; a symmetric loss needs the scores of all rows.
template <class T>
Result loss_of_width(const LossArguments& arguments, int64_t band_rows, int64_t width,
                     double factor, T* to_x, T* to_y) {
  const LossOptions& options = arguments.options;
  const Optional& y = arguments.y;
  // Many columns are packed for each band, and multiplied by their inverse norms meanwhile. The
  // metrics read unit rows.
  const bool lazy = y && band_rows < arguments.x.size(0) && !arguments.totals &&
                    !Panel<T>::pack_once_pays(y->size(0), width);
  const Sides<T> sides(arguments.x, y, width, options.cosine, lazy, to_x, to_y);
  const Side<T>&rows = sides.rows, &columns = sides.columns();
  BatchMetrics<T> metrics(arguments.row_metrics, arguments.totals, rows.count, options.cosine);
  metrics.add_row_potentials(rows);
  if (y) metrics.add_column_potentials(columns);
  const Panel<T> panel(rows, rows.count, columns.operand(), columns.inverse(), columns.count, width,
                       band_rows);
  std::optional<OtherPanel<T>> targets, guide;
  if (arguments.factor_rows) {
    targets.emplace(*arguments.factor_rows, *arguments.factor_columns, options.factor_cosine,
                    band_rows);
  }
  if (arguments.guide_rows) {
    guide.emplace(*arguments.guide_rows, *arguments.guide_columns, true, band_rows);
  }

  const Block<T> all = all_pairs<T>(arguments.pairs, rows.count, columns.count);
  STD_TORCH_CHECK(!options.symmetric || band_rows >= rows.count,
                  "fastsim: in_one_call: wanted all rows in a band");
  const RowLosses<T> losses(arguments, all, factor, to_x || to_y);
  Result result;
  for (int64_t first = 0; first < rows.count; first += band_rows) {
    const Block<T> b = panel.band(first, all);
    result += losses(b, first, metrics.row_metrics(first),
                     targets ? targets->band(first) : OtherScores<T>{},
                     guide ? guide->band(first) : OtherScores<T>{});
    sides.add_gradients(b, first);
  }
  metrics.write();
  result.scale_score_grad += sides.finish(options.scale_grad) / options.scale;
  return result;
}

// Adds the matrix `from` (count, width) to the first columns of `to` (count, to_width).
template <class T>
void add_columns(const T* from, int64_t count, int64_t width, T* to, int64_t to_width) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < width; ++k) to[i * to_width + k] += from[i * width + k];
  }
}

// Sets `total` to the loss. With prefixes, it is the sum of the losses of the ascending prefixes;
// the last prefix is the whole width. Sets grad_x (N, D) and grad_y (M, D), if they are given, in
// the compute type, and `parameters` (2,) to the derivatives by scale and bias. tall: the rows of a
// band. The other arguments are those of LossArguments.
void in_one_call(Tensor x, Optional y, LOSS_PARAMETERS, int64_t tall, RESULTS_PARAMETERS) {
  const LossOptions options(numbers);
  const LossArguments arguments LOSS_ARGUMENTS(x, y, options);
  STD_TORCH_CHECK(tall > 0, "fastsim: tall: wanted rows of a band, got ", tall);
  const int64_t full_width = x.size(1), prefixes = options.prefixes.size();
  STD_TORCH_CHECK(
      !prefixes || (options.prefixes.back().width == full_width && !row_metrics && !totals),
      "fastsim: in_one_call: wanted the last prefix to have the full width, and no metrics");
  STD_TORCH_CHECK(y || !grad_y, "fastsim: grad_y: wanted y too");
  const int64_t rows = x.size(0), columns = y ? y->size(0) : 0;
  if (y) check_matrix(*y, "y", columns, full_width);
  check_sides(arguments, rows, y ? columns : rows);
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    T* const to_x = output<T>(grad_x, "grad_x", rows * full_width);
    T* const to_y = output<T>(grad_y, "grad_y", columns * full_width);
    T* const loss = output<T>(total, "total", 1);
    double* const parameter_grads = output<double>(parameters, "parameters", 2);
    // The widest prefix comes first: it sets the gradients, to which the others are added.
    const double factor = prefixes ? options.prefixes.back().factor : 1;
    Result result = loss_of_width<T>(arguments, tall, full_width, factor, to_x, to_y);
    for (int64_t k = prefixes - 2; k >= 0; --k) {
      const auto [width, factor] = options.prefixes[k];
      const Scratch<T> memory((rows + columns) * width);
      T* const prefix_to_x = to_x ? static_cast<T*>(memory) : nullptr;
      T* const prefix_to_y = to_y ? memory + rows * width : nullptr;
      result += loss_of_width<T>(arguments, tall, width, factor, prefix_to_x, prefix_to_y);
      if (to_x) add_columns<T>(prefix_to_x, rows, width, to_x, full_width);
      if (to_y) add_columns<T>(prefix_to_y, columns, width, to_y, full_width);
    }
    *loss = T(result.loss);
    if (!parameter_grads) return;
    parameter_grads[0] = options.scale_grad ? double(result.scale_score_grad) : 0;
    parameter_grads[1] = double(result.bias_score_grad);
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(in_one_call, "(Tensor x, Tensor? y, " LOSS_SCHEMA ", int tall, " RESULTS_SCHEMA
                                ") -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
