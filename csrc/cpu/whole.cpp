// A loss of the scores of two sides, with its gradient, in one operator. A small batch's time is
// operator calls; here there is one.

#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "observing.h"
#include "operators.h"
#include "panel.h"
#include "side.h"
#include "block_losses.h"
#include "totals.h"

namespace fastsim {

namespace {

template <class T>
void leave_out_above(const Block<T>& b, const T* guide, int64_t stride, const T* thresholds) {
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().leave_out_above(b, guide, stride, thresholds, begin, end);
  });
}

// Pairs whose score is more than `margin` above that of the row's positive.
template <class T>
void leave_out_by_score(const Block<T>& b, double margin) {
  STD_TORCH_CHECK(b.positives, "fastsim: whole: wanted positives");
  std::vector<T> thresholds(b.rows);
  for (int64_t i = 0; i < b.rows; ++i) {
    thresholds[i] = b.scores[i * b.stride + b.positives[i]] + T(margin);
  }
  leave_out_above(b, b.scores, b.stride, thresholds.data());
}

// The same rows by a guide, whose cosines leave pairs out.
template <class T>
class GuidePanel {
 public:
  GuidePanel(const Tensor& rows, const Tensor& columns, double margin, bool relative, int64_t tall)
      : rows_(rows, true), columns_(columns, true),
        panel_(rows_, rows_.count, columns_, columns_.count, rows_.width, tall), margin_(margin),
        relative_(relative) {}

  // Leaves out pairs of a band but for a row's positive whose cosine by the guide is more than the
  // margin above the positive's, or, `relative`, than the margin times its size.
  void leave_out(const Block<T>& b, int64_t first) const {
    STD_TORCH_CHECK(b.positives, "fastsim: whole: wanted positives");
    const Block<T> guide = panel_.band(first, {});
    std::vector<T> kept(b.rows), thresholds(b.rows);
    const auto positive = [&](int64_t i) -> T& { return b.scores[i * b.stride + b.positives[i]]; };
    for (int64_t i = 0; i < b.rows; ++i) {
      kept[i] = positive(i);
      const T cosine = guide.scores[i * guide.stride + b.positives[i]];
      thresholds[i] = cosine - (relative_ ? std::abs(cosine) : T(1)) * T(margin_);
    }
    leave_out_above(b, guide.scores, guide.stride, thresholds.data());
    for (int64_t i = 0; i < b.rows; ++i) positive(i) = kept[i];
  }

 private:
  const Side<T> rows_, columns_;
  const Panel<T> panel_;
  const double margin_;
  const bool relative_;
};

// Targets that are products of factors of the rows and of the columns, or their cosines.
template <class T>
class TargetPanel {
 public:
  TargetPanel(const Tensor& rows, const Tensor& columns, bool cosine, int64_t tall)
      : rows_(rows, cosine), columns_(columns, cosine),
        panel_(rows_, rows_.count, columns_, columns_.count, rows_.width, tall) {}

  Matrix band(int64_t first) const {
    const Block<T> targets = panel_.band(first, {});
    return {targets.scores, kDtypeOf<T>, targets.stride, 1};
  }

 private:
  const Side<T> rows_, columns_;
  const Panel<T> panel_;
};

// Scores with what is added to the logits of a column and taken from the scores of a row.
template <class T>
void move_scores(const Block<T>& b, const T* column_bias, T scale, const T* row_shift) {
  if (!column_bias && !row_shift) return;
  std::vector<T> biases(b.columns);
  for (int64_t j = 0; column_bias && j < b.columns; ++j) biases[j] = column_bias[j] / scale;
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* s = b.scores + i * b.stride;
      const T shift = row_shift ? row_shift[i] : T(0);
      for (int64_t j = 0; j < b.columns; ++j) s[j] = (s[j] + biases[j]) - shift;
    }
  });
}

// The numbers and flags of a loss, by the names of fastsim/tile.py and fastsim/pairs. They come as one
// list in this order, which takes a fifth of the time that an argument for each does.
// exclude_above: infinity for none. factor_cosine: whether targets are the cosines of the factors.
struct Numbers {
  double negative_target, scale, bias, margin, positive_scale, base, exclude_above, guide_margin,
      weight;
  bool normalise, symmetric, cosine, guide_relative, factor_cosine;

  explicit Numbers(const std::vector<double>& from) {
    double* const numbers[] = {&negative_target, &scale, &bias,          &margin,
                               &positive_scale,  &base,  &exclude_above, &guide_margin,
                               &weight};
    bool* const flags[] = {&normalise, &symmetric, &cosine, &guide_relative, &factor_cosine};
    STD_TORCH_CHECK(from.size() == std::size(numbers) + std::size(flags),
                    "fastsim: whole: wanted ", std::size(numbers) + std::size(flags), " numbers");
    auto next = from.begin();
    for (double* number : numbers) *number = *next++;
    for (bool* flag : flags) *flag = *next++ != 0;
  }
};

// Without y, x is held against itself. guide_rows (N, E), guide_columns (M, E): the same rows by a
// guide. factor_rows (N, E), factor_columns (M, E): the targets are their products. weights (N,) weigh
// the losses of the rows; without, the number `weight` all of them. tall: of how many rows scores are in
// memory at a time; symmetric losses need those of all. grad_x (N, D) and grad_y (M, D) are written in
// the compute type where given; without y, grad_x holds both shares. `total`: the weighted sum of the
// losses, in that type too; `parameters` (2,): its derivatives by scale, right where a gradient is
// given, and by bias. seen: the numbers of the rows, added to; `totals`: what those of this batch come
// to, written.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, std::string skip,
           Optional seen, std::string kind, std::vector<double> numbers, Optional guide_rows,
           Optional guide_columns, Optional column_bias, Optional row_shift, Optional factor_rows,
           Optional factor_columns, Optional prior, Optional positive_weights, Optional weights,
           int64_t tall, Optional grad_x, Optional grad_y, Tensor total, Optional parameters,
           Optional totals) {
  const Numbers of(numbers);
  const PairArguments pairs{positives,     row_ids, column_ids,         row_groups,
                            column_groups, dense,   of.negative_target, skip,       seen};
  with_type(total, [&](auto type) {
    using T = decltype(type);
    T* const to_x = grad_x ? output<T>(*grad_x) : nullptr;
    T* const to_y = grad_y ? output<T>(*grad_y) : nullptr;
    // The gradient of a band takes the place of its unit rows, when nothing reads them any more.
    const Side<T> rows(x, of.cosine, of.cosine && y ? to_x : nullptr);
    Watching<T> watching(seen, totals, rows.count, of.cosine);
    watching.look_at_rows(rows);
    std::optional<Side<T>> others;
    if (y) others.emplace(*y, of.cosine);
    if (y) watching.look_at_columns(*others);
    const Side<T>& columns = y ? *others : rows;
    const int64_t width = rows.width;
    const Panel<T> panel(rows, rows.count, columns, columns.count, width, tall);
    std::optional<TargetPanel<T>> targets;
    if (factor_rows) targets.emplace(*factor_rows, *factor_columns, of.factor_cosine, tall);
    std::optional<GuidePanel<T>> guide;
    if (guide_rows) guide.emplace(*guide_rows, *guide_columns, of.guide_margin, of.guide_relative, tall);

    Block<T> all{};
    take_pairs(pairs, all);
    const Loss loss{kind_of(kind), of.scale,     of.bias,      of.margin,       of.positive_scale,
                    of.base,       of.normalise, of.symmetric, grad_x || grad_y};
    STD_TORCH_CHECK(!of.symmetric || tall >= rows.count, "fastsim: whole: wanted all rows in a band");
    const std::vector<T> alike(weights ? 0 : rows.count, T(of.weight));
    const OfRows<T> of_all{weights ? input<T>(*weights) : alike.data(), input<T>(prior),
                           input<T>(positive_weights)};
    const T *bias_of_columns = input<T>(column_bias), *shift_of_rows = input<T>(row_shift);
    Result result;
    for (int64_t first = 0; first < rows.count; first += tall) {
      Block<T> b = panel.band(first, all);
      if (targets) b.dense = targets->band(first);
      if (std::isfinite(of.exclude_above)) leave_out_by_score(b, of.exclude_above);
      if (guide) guide->leave_out(b, first);
      std::optional<Observing<T>> observing;
      if (double* const numbers = watching.numbers(first)) observing.emplace(b, numbers);
      if (b.seen && (column_bias || row_shift)) {  // which move the scores before the loss looks
        over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
          kernels().of<T>().observe(b, {}, begin, end);
        });
        b.seen = nullptr;
      }
      move_scores(b, bias_of_columns, T(of.scale), shift_of_rows ? shift_of_rows + first : nullptr);
      check_targets(b, loss);
      result += fused_pass<T>(b, loss, of_all.from_row(first));
      // The products with the unit rows of the band come before its gradient.
      const T* band = rows + first * width;
      if (to_y) multiply_panel<T>(b, band, width, to_y, true, first > 0);
      if (to_x && !y) multiply_panel<T>(b, band, width, to_x, true, first > 0);
      if (to_x) multiply_panel<T>(b, columns, width, to_x + first * width, false, !y);
    }
    double along = 0;
    if (to_x) along = rows.finish(to_x) / (y ? 1 : 2);
    if (to_y) along = columns.finish(to_y);
    *output<T>(total) = T(result.loss);
    watching.write();
    if (!parameters) return;
    double* score_grads = output<double>(*parameters);
    score_grads[0] = double(result.scale_score_grad) + along / of.scale;
    score_grads[1] = double(result.bias_score_grad);
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(whole,
               "(Tensor x, Tensor? y, Tensor? positives, Tensor? row_ids, Tensor? column_ids, "
               "Tensor? row_groups, Tensor? column_groups, Tensor? dense, str skip, "
               "Tensor(seen!)? seen, str kind, "
               "float[] numbers, Tensor? guide_rows, Tensor? guide_columns, Tensor? column_bias, "
               "Tensor? row_shift, Tensor? factor_rows, Tensor? factor_columns, Tensor? prior, "
               "Tensor? positive_weights, Tensor? weights, int tall, Tensor(grad_x!)? grad_x, "
               "Tensor(grad_y!)? grad_y, Tensor(total!) total, Tensor(parameters!)? parameters, "
               "Tensor(totals!)? totals) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
