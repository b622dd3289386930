// One operator that computes a loss of the scores of two sides, and its gradient. Calls of
// operators take most of a small batch's time, and this is a single call.

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "columns_by_row.h"
#include "mirrored.h"
#include "operators.h"
#include "other_panel.h"
#include "panel.h"
#include "row_losses.h"
#include "side.h"

namespace fastsim {

namespace {

// The rows and columns of the scores, and their gradients. Without y the rows are the columns too,
// and all of them are one band.
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

  // Whether the rows are the columns too.
  bool same() const { return !y_; }

  const Side<T>& columns() const { return y_ ? *others_ : rows; }

  // Adds the products with the score gradients of the band of rows that starts at row `first`.
  void add_gradients(const Block<T>& b, int64_t first) const {
    const Side<T>& others = columns();
    const int64_t width = rows.width;
    if (same() && to_x_) add_mirrored(b);  // one product then gives the gradients of both sides
    // The gradient of the band may be written over its unit rows, so that products with these come
    // first.
    if (to_y_) multiply_panel<T>(b, rows + first * width, width, to_y_, true, first > 0);
    if (!to_x_) return;
    T* const to_band = to_x_ + first * width;
    multiply_panel<T>(b, others.operand(), others.inverse(), width, to_band, false);
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

// The rows of a band, and the rows whose scores a symmetric loss keeps from its first pass to its
// second (0 for other losses).
struct BandSizes {
  int64_t rows, kept;
};

// The loss of the prefixes of `width` numbers, times `factor`, and its derivatives by scale and
// bias. The derivative by scale is right only if there is a gradient. to_x and to_y are set to the
// gradients, see Sides.
template <class T>
class LossOfWidth {
 public:
  LossOfWidth(const LossArguments& arguments, const BandSizes& sizes, int64_t width, double factor,
              T* to_x, T* to_y)
      : options_(arguments.options), band_rows_(sizes.rows),
        sides_(arguments.x, arguments.y, width, options_.cosine,
               is_lazy(arguments, sizes, width, to_x || to_y), to_x, to_y),
        all_(all_pairs_of(arguments)),
        losses_(arguments, all_, factor, to_x || to_y),
        metrics_(arguments.row_metrics, arguments.totals, all_.rows, options_.cosine),
        panel_(sides_.rows, all_.rows, sides_.columns().operand(), sides_.columns().inverse(),
               all_.columns, width, sizes.rows, sizes.kept) {
    metrics_.add_row_potentials(sides_.rows);
    if (arguments.y) metrics_.add_column_potentials(sides_.columns());
    if (arguments.factor_rows) {
      targets_.emplace(*arguments.factor_rows, *arguments.factor_columns, options_.factor_cosine,
                       band_rows_);
    }
    if (arguments.guide_rows) {
      guide_.emplace(*arguments.guide_rows, *arguments.guide_columns, true, band_rows_);
    }
  }

  Result operator()() {
    Result result = options_.symmetric ? in_two_passes() : in_one_pass();
    metrics_.write();
    result.scale_score_grad += sides_.finish(options_.scale_grad) / options_.scale;
    return result;
  }

 private:
  // See PanelColumns. The metrics read unit rows.
  static bool is_lazy(const LossArguments& arguments, const BandSizes& sizes, int64_t width,
                      bool with_gradient) {
    const Optional& y = arguments.y;
    if (!y || arguments.totals) return false;
    const bool several_bands = sizes.rows < arguments.x.size(0);
    return PanelColumns<T>::is_lazy(y->size(0), width, several_bands, with_gradient);
  }

  // Positives are listed if there are so many pairs that this saves time, and if at most one of
  // kPairsPerPositive pairs is a positive.
  static constexpr int64_t kManyPairs = 1 << 18, kPairsPerPositive = 256;

  // All pairs. For a sigmoid loss with targets by group, positives that are few are listed.
  Block<T> all_pairs_of(const LossArguments& arguments) {
    Block<T> all = all_pairs<T>(arguments.pairs, sides_.rows.count, sides_.columns().count);
    const int64_t pairs = all.rows * all.columns;
    const bool by_group = all.row_groups && !all.dense.data && all.skip == Skip::nothing;
    if (arguments.kind != Kind::sigmoid || !by_group || all.negative_target != T(-1)) return all;
    // The logit of a score of kLeftOut has to be so low that the loss of a negative is 0.
    const T lowest = T(options_.scale) * kLeftOut<T>;
    if (pairs < kManyPairs || !(lowest < T(-1e9)) || !std::isfinite(lowest)) return all;
    if (positives_.find(all.row_groups, all.rows, all.column_groups, all.columns,
                        pairs / kPairsPerPositive)) {
      all.few_positives = positives_.lists();
    }
    return all;
  }

  Result in_one_pass() const {
    Result result;
    for (int64_t first = 0; first < all_.rows; first += band_rows_) {
      const Block<T> b = band(first);
      prepare(b, first, metrics_.row_metrics(first),
              [&](const Block<T>& prepared) { result += losses_(prepared, first); });
      sides_.add_gradients(b, first);
    }
    return result;
  }

  // A softmax of rows and columns: one pass for their states, one for the gradients if these are
  // wanted.
  Result in_two_passes() const {
    const Loss& loss = losses_.loss;
    const bool common = options_.cosine && !losses_.moves_scores() && has_common_top(loss);
    SoftmaxSums<T> sums(all_, loss, common ? 1 : 0);
    // From the last band to the first, whose memory bands that are not kept share.
    const int64_t last = (ceil_div(all_.rows, band_rows_) - 1) * band_rows_;
    for (int64_t first = last; first >= 0; first -= band_rows_) {
      prepare(band(first), first, metrics_.row_metrics(first),
              [&](const Block<T>& b) { sums.add(b, first); });
    }
    const Result result = sums.finish(losses_.row_inputs.weights);
    if (!loss.score_grad) return result;
    for (int64_t first = 0; first < all_.rows; first += band_rows_) {
      const bool kept = panel_.is_kept(first);
      const Block<T> b = kept ? panel_.memory_of(first, all_) : band(first);
      if (kept) {
        sums.score_grad(b, first, T(0));  // the first pass has subtracted the margin
      } else {
        prepare(b, first, nullptr,
                [&](const Block<T>& part) { sums.score_grad(part, first, T(loss.margin)); });
      }
      sides_.add_gradients(b, first);
    }
    return result;
  }

  // The scores of the band whose first row is `first`.
  Block<T> band(int64_t first) const {
    if (!sides_.same()) return panel_.band(first, all_);
    const Block<T> whole = panel_.memory_of(first, all_);
    mirrored_scores<T>(sides_.rows, sides_.rows.width, whole);
    return whole;
  }

  // Calls run(block) with the scores of a band after the steps before the loss (RowLosses).
  template <class Run>
  void prepare(const Block<T>& b, int64_t first, double* row_metrics, const Run& run) const {
    const auto band = [&](const std::optional<OtherPanel<T>>& panel) {
      return panel ? panel->band(first) : OtherScores<T>{};
    };
    losses_.prepare(b, first, row_metrics, band(targets_), band(guide_), run);
  }

  const LossOptions& options_;
  const int64_t band_rows_;
  const Sides<T> sides_;
  ColumnsByRow positives_;  // see all_pairs_of
  const Block<T> all_;
  const RowLosses<T> losses_;
  BatchMetrics<T> metrics_;
  const Panel<T> panel_;
  std::optional<OtherPanel<T>> targets_, guide_;
};

// Adds the matrix `from` (count, width) to the first columns of `to` (count, to_width).
template <class T>
void add_columns(const T* from, int64_t count, int64_t width, T* to, int64_t to_width) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < width; ++k) to[i * to_width + k] += from[i * width + k];
  }
}

// Sets `total` to the loss. With prefixes, it is the sum of the losses of the ascending prefixes;
// the last prefix is the whole width. Sets grad_x (N, D) and grad_y (M, D), if they are given, in
// the compute type, and `parameters` (2,) to the derivatives by scale and bias. tall, kept: see
// BandSizes. The other arguments are those of LossArguments.
void in_one_call(Tensor x, Optional y, LOSS_PARAMETERS, int64_t tall, int64_t kept,
                 RESULTS_PARAMETERS) {
  const LossOptions options(numbers);
  const LossArguments arguments LOSS_ARGUMENTS(x, y, options);
  STD_TORCH_CHECK(tall > 0, "fastsim: tall: wanted rows of a band, got ", tall);
  const int64_t full_width = x.size(1), prefixes = options.prefixes.size();
  STD_TORCH_CHECK(
      !prefixes || (options.prefixes.back().width == full_width && !row_metrics && !totals),
      "fastsim: in_one_call: wanted the last prefix to have the full width, and no metrics");
  STD_TORCH_CHECK(y || !grad_y, "fastsim: grad_y: wanted y too");
  STD_TORCH_CHECK(y || tall >= x.size(0), "fastsim: tall: wanted all ", x.size(0),
                  " rows of x compared with itself, got ", tall);
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
    const BandSizes sizes{tall, kept};
    Result result = LossOfWidth<T>(arguments, sizes, full_width, factor, to_x, to_y)();
    for (int64_t k = prefixes - 2; k >= 0; --k) {
      const auto [width, factor] = options.prefixes[k];
      const Scratch<T> memory((rows + columns) * width);
      T* const prefix_to_x = to_x ? static_cast<T*>(memory) : nullptr;
      T* const prefix_to_y = to_y ? memory + rows * width : nullptr;
      result += LossOfWidth<T>(arguments, sizes, width, factor, prefix_to_x, prefix_to_y)();
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
  return {OPERATOR(in_one_call, "(Tensor x, Tensor? y, " LOSS_SCHEMA
                                ", int tall, int kept, " RESULTS_SCHEMA ") -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
