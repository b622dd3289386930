// A loss of the scores of two sides, with its gradient, in one operator. A small batch's time is
// operator calls; here there is one.

#include <algorithm>
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
  for (int64_t j = 0; column_bias && j < b.columns; ++j) {
    STD_TORCH_CHECK(std::isfinite(column_bias[j]), "fastsim: whole: wanted a finite column_bias");
    biases[j] = column_bias[j] / scale;
  }
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
// scale_grad: whether the derivative by scale is wanted; without, it is 0.
// prefixes: what follows, of each a width and a factor; none for the rows as they are.
struct Numbers {
  struct Prefix {
    int64_t width;
    double factor;
  };
  std::vector<Prefix> prefixes;
  double negative_target, scale, bias, margin, positive_scale, base, exclude_above, guide_margin,
      weight;
  bool normalise, symmetric, cosine, guide_relative, factor_cosine, scale_grad;

  explicit Numbers(const std::vector<double>& from) {
    double* const numbers[] = {&negative_target, &scale, &bias,          &margin,
                               &positive_scale,  &base,  &exclude_above, &guide_margin,
                               &weight};
    bool* const flags[] = {&normalise,      &symmetric,     &cosine,
                           &guide_relative, &factor_cosine, &scale_grad};
    const size_t fixed = std::size(numbers) + std::size(flags);
    STD_TORCH_CHECK(from.size() >= fixed && (from.size() - fixed) % 2 == 0,
                    "fastsim: whole: wanted ", fixed, " numbers and two for each prefix");
    auto next = from.begin();
    for (double* number : numbers) *number = *next++;
    for (bool* flag : flags) *flag = *next++ != 0;
    for (; next != from.end(); next += 2) prefixes.push_back({int64_t(next[0]), next[1]});
  }
};

// What `whole` is given. Without y, x is held against itself. guide_rows (N, E), guide_columns (M, E):
// the same rows by a guide. factor_rows (N, E), factor_columns (M, E): the targets are their products.
// weights (N,) weigh the losses of the rows; without, the number `weight` all of them. tall: of how
// many rows scores are in memory at a time; symmetric losses need those of all. seen: the numbers of
// the rows, added to; `totals`: what those of this batch come to, written.
struct Given {
  const Tensor& x;
  const Optional& y;
  const PairArguments pairs;
  const Kind kind;
  const Numbers& of;
  const Optional &guide_rows, &guide_columns, &column_bias, &row_shift, &factor_rows, &factor_columns,
      &prior, &positive_weights, &weights;
  const int64_t tall;
  const Optional &seen, &totals;
};

// The loss of the first `width` numbers of all rows, times `factor`, and its derivatives by scale,
// right where a gradient is given, and by bias. The gradients to_x (N, width) and to_y (M, width) are
// written where they are not null; without y, to_x holds both shares.
template <class T>
Result loss_of_width(const Given& given, int64_t width, double factor, T* to_x, T* to_y) {
  const auto& [x, y, pairs, kind, of, guide_rows, guide_columns, column_bias, row_shift, factor_rows,
               factor_columns, prior, positive_weights, weights, tall, seen, totals] = given;
  // The gradient of a band takes the place of its unit rows, when nothing reads them any more.
  const Side<T> rows(x, width, of.cosine, of.cosine && y ? to_x : nullptr);
  Watching<T> watching(seen, totals, rows.count, of.cosine);
  watching.look_at_rows(rows);
  std::optional<Side<T>> others;
  if (y) others.emplace(*y, width, of.cosine, nullptr);
  if (y) watching.look_at_columns(*others);
  const Side<T>& columns = y ? *others : rows;
  const Panel<T> panel(rows, rows.count, columns, columns.count, width, tall);
  const int64_t count = rows.count, wide = columns.count;
  std::optional<TargetPanel<T>> targets;
  if (factor_rows) targets.emplace(*factor_rows, *factor_columns, of.factor_cosine, tall);
  std::optional<GuidePanel<T>> guide;
  if (guide_rows) guide.emplace(*guide_rows, *guide_columns, of.guide_margin, of.guide_relative, tall);

  Block<T> all{};
  all.rows = count;
  all.columns = wide;
  take_pairs(pairs, all);
  check_positives(all);
  const Loss loss{kind,    of.scale,     of.bias,      of.margin,   of.positive_scale,
                  of.base, of.normalise, of.symmetric, to_x || to_y};
  STD_TORCH_CHECK(!of.symmetric || tall >= count, "fastsim: whole: wanted all rows in a band");
  const T* const own = input<T>(weights, "weights", count);
  std::vector<T> weight(count, T(factor * of.weight));
  for (int64_t i = 0; own && i < count; ++i) weight[i] = T(factor * own[i]);
  const OfRows<T> of_all{weight.data(), input<T>(prior, "prior", 2 * count),
                         input<T>(positive_weights, "positive_weights", count)};
  const T* bias_of_columns = input<T>(column_bias, "column_bias", wide);
  const T* shift_of_rows = input<T>(row_shift, "row_shift", count);
  Result result;
  if (to_y && count == 0) std::fill_n(to_y, wide * width, T(0));  // which the first band writes
  for (int64_t first = 0; first < count; first += tall) {
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
  double along = 0;  // of one side; without y, to_x is of both
  if (to_x) along = rows.finish(to_x, of.scale_grad && !to_y) / (y ? 1 : 2);
  if (to_y) along = columns.finish(to_y, of.scale_grad);
  watching.write();
  result.scale_score_grad += along / of.scale;
  return result;
}

// Refuses what is of other sizes than the two sides of so many rows and columns.
void check_sides(const Given& given, int64_t rows, int64_t columns) {
  const auto check_pair = [&](const Optional& of_rows, const Optional& of_columns,
                              const char* names, const char* name_of_rows,
                              const char* name_of_columns) {
    STD_TORCH_CHECK(bool(of_rows) == bool(of_columns), "fastsim: ", names,
                    ": wanted both or neither");
    if (!of_rows) return;
    const int64_t width = of_rows->size(1);
    check_matrix(*of_rows, name_of_rows, rows, width);
    check_matrix(*of_columns, name_of_columns, columns, width);
  };
  check_pair(given.guide_rows, given.guide_columns, "guide_rows, guide_columns", "guide_rows",
             "guide_columns");
  check_pair(given.factor_rows, given.factor_columns, "factor_rows, factor_columns",
             "factor_rows", "factor_columns");
  STD_TORCH_CHECK(given.tall > 0, "fastsim: tall: wanted rows of a band, got ", given.tall);
  int64_t before = 0;
  for (const auto& prefix : given.of.prefixes) {
    STD_TORCH_CHECK(prefix.width > before, "fastsim: numbers: wanted ascending prefixes, got ",
                    prefix.width, " after ", before);
    before = prefix.width;
  }
}

// Adds (count, width) to the first columns of `to` (count, wide).
template <class T>
void add_columns(const T* from, int64_t count, int64_t width, T* to, int64_t wide) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < width; ++k) to[i * wide + k] += from[i * width + k];
  }
}

// `total` gets the loss, or the sum of those of ascending prefixes, the last of which is all of the
// rows; with it grad_x (N, D) and grad_y (M, D), where they are given, in the compute type, and
// `parameters` (2,), the derivatives by scale and bias.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, std::string skip,
           Optional seen, std::string kind, std::vector<double> numbers, Optional guide_rows,
           Optional guide_columns, Optional column_bias, Optional row_shift, Optional factor_rows,
           Optional factor_columns, Optional prior, Optional positive_weights, Optional weights,
           int64_t tall, Optional grad_x, Optional grad_y, Tensor total, Optional parameters,
           Optional totals) {
  const Numbers of(numbers);
  const Given given{x, y,
                    {positives, row_ids, column_ids, row_groups, column_groups, dense,
                     of.negative_target, skip, seen},
                    kind_of(kind), of, guide_rows, guide_columns, column_bias, row_shift,
                    factor_rows, factor_columns, prior, positive_weights, weights, tall, seen,
                    totals};
  const int64_t full = x.size(1), prefixes = of.prefixes.size();
  STD_TORCH_CHECK(!prefixes || (of.prefixes.back().width == full && !seen && !totals),
                  "fastsim: whole: wanted prefixes up to all of the rows, whose scores nobody sees");
  STD_TORCH_CHECK(y || !grad_y, "fastsim: grad_y: wanted y too");
  const int64_t rows = x.size(0), columns = y ? y->size(0) : 0;
  if (y) check_matrix(*y, "y", columns, full);
  check_sides(given, rows, y ? columns : rows);
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    T* const to_x = output<T>(grad_x, "grad_x", rows * full);
    T* const to_y = output<T>(grad_y, "grad_y", columns * full);
    T* const loss = output<T>(total, "total", 1);
    double* const score_grads = output<double>(parameters, "parameters", 2);
    // The widest first: its gradients are written where those of the others are added.
    const double factor = prefixes ? of.prefixes.back().factor : 1;
    Result result = loss_of_width<T>(given, full, factor, to_x, to_y);
    for (int64_t k = prefixes - 2; k >= 0; --k) {
      const auto [width, factor] = of.prefixes[k];
      const Scratch<T> memory((rows + columns) * width);
      T* const of_x = to_x ? static_cast<T*>(memory) : nullptr;
      T* const of_y = to_y ? memory + rows * width : nullptr;
      result += loss_of_width<T>(given, width, factor, of_x, of_y);
      if (to_x) add_columns<T>(of_x, rows, width, to_x, full);
      if (to_y) add_columns<T>(of_y, columns, width, to_y, full);
    }
    *loss = T(result.loss);
    if (!score_grads) return;
    score_grads[0] = of.scale_grad ? double(result.scale_score_grad) : 0;
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
