// Scores that are one block, and a loss of them with its gradient, in one operator. A small batch's
// time is operator calls; here there is one.

#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "panel.h"
#include "side.h"
#include "small_losses.h"

namespace fastsim {

namespace {

Kind kind_of(const std::string& name) {
  static const std::unordered_map<std::string, Kind> kinds{
      {"softmax", Kind::softmax},
      {"sigmoid", Kind::sigmoid},
      {"squared_error", Kind::squared_error},
      {"decoupled", Kind::decoupled},
      {"multi_similarity", Kind::multi_similarity},
      {"multi_positive", Kind::multi_positive},
      {"circle", Kind::circle},
      {"debiased", Kind::debiased},
      {"distillation", Kind::distillation},
      {"hard_triplet", Kind::hard_triplet},
      {"semi-hard_triplet", Kind::semi_hard_triplet},
      {"margins", Kind::margins},
  };
  const auto found = kinds.find(name);
  STD_TORCH_CHECK(found != kinds.end(), "fastsim: whole does not serve kind ", name);
  return found->second;
}

template <class T>
void leave_out(const Block<T>& b, const T* guide, int64_t stride, const T* thresholds) {
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
  leave_out(b, b.scores, b.stride, thresholds.data());
}

// Pairs but for a row's positive whose cosine by a guide is more than the margin above the positive's,
// or, `relative`, than the margin times its size.
template <class T>
void leave_out_by_guide(const Block<T>& b, const Tensor& of_rows, const Tensor& of_columns,
                        double margin, bool relative) {
  STD_TORCH_CHECK(b.positives, "fastsim: whole: wanted positives");
  const Side<T> rows(of_rows, true), columns(of_columns, true);
  const Panel<T> panel(rows, b.rows, columns, b.columns, rows.width);
  const Block<T>& guide = panel.block;
  std::vector<T> kept(b.rows), thresholds(b.rows);
  const auto positive = [&](int64_t i) -> T& { return b.scores[i * b.stride + b.positives[i]]; };
  for (int64_t i = 0; i < b.rows; ++i) {
    kept[i] = positive(i);
    const T cosine = guide.scores[i * guide.stride + b.positives[i]];
    thresholds[i] = cosine - (relative ? std::abs(cosine) : T(1)) * T(margin);
  }
  leave_out(b, guide.scores, guide.stride, thresholds.data());
  for (int64_t i = 0; i < b.rows; ++i) positive(i) = kept[i];
}

// Scores with what is added to the logits of a column and taken from the scores of a row.
template <class T>
void move_scores(const Block<T>& b, const T* column_bias, T scale, const T* row_shift) {
  if (!column_bias && !row_shift) return;
  std::vector<T> biases(b.columns);
  for (int64_t j = 0; column_bias && j < b.columns; ++j) biases[j] = column_bias[j] / scale;
  for (int64_t i = 0; i < b.rows; ++i) {
    T* s = b.scores + i * b.stride;
    const T shift = row_shift ? row_shift[i] : T(0);
    for (int64_t j = 0; j < b.columns; ++j) s[j] = (s[j] + biases[j]) - shift;
  }
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
// the losses of the rows; without, the number `weight` all of them. grad_x (N, D) and grad_y (M, D) are
// written in the compute type where given; without y, grad_x holds both shares. `total`: the weighted
// sum of the losses, in that type too; `parameters` (2,): its derivatives by scale, right where a
// gradient is given, and by bias.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, std::string skip,
           std::string kind, std::vector<double> numbers, Optional guide_rows,
           Optional guide_columns, Optional column_bias, Optional row_shift, Optional factor_rows,
           Optional factor_columns, Optional prior, Optional positive_weights, Optional weights,
           Optional grad_x, Optional grad_y, Tensor total, Optional parameters, Optional seen) {
  const Numbers of(numbers);
  const PairArguments pairs{positives,     row_ids, column_ids,         row_groups,
                            column_groups, dense,   of.negative_target, skip};
  with_type(total, [&](auto type) {
    using T = decltype(type);
    const Side<T> rows(x, of.cosine);
    std::optional<Side<T>> others;
    if (y) others.emplace(*y, of.cosine);
    const Side<T>& columns = y ? *others : rows;
    Panel<T> panel(rows, rows.count, columns, columns.count, rows.width);
    Block<T>& b = panel.block;
    take_pairs(pairs, b);
    std::optional<Panel<T>> targets;
    if (factor_rows) {
      const Side<T> one(*factor_rows, of.factor_cosine), other(*factor_columns, of.factor_cosine);
      targets.emplace(one, b.rows, other, b.columns, one.width);
      b.dense = {targets->block.scores, kDtypeOf<T>, targets->block.stride, 1};
    }
    if (std::isfinite(of.exclude_above)) leave_out_by_score(b, of.exclude_above);
    if (guide_rows) {
      leave_out_by_guide(b, *guide_rows, *guide_columns, of.guide_margin, of.guide_relative);
    }
    if (seen) {
      double* numbers = output<double>(*seen);
      over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
        kernels().of<T>().observe(b, {.seen = numbers}, begin, end);
      });
    }
    move_scores(b, input<T>(column_bias), T(of.scale), input<T>(row_shift));

    const Loss loss{kind_of(kind), of.scale,     of.bias,      of.margin,       of.positive_scale,
                    of.base,       of.normalise, of.symmetric, grad_x || grad_y};
    check_targets(b, loss);
    const std::vector<T> alike(weights ? 0 : b.rows, T(of.weight));
    const T* of_rows = weights ? input<T>(*weights) : alike.data();
    const Result result =
        fused_pass<T>(b, loss, {of_rows, input<T>(prior), input<T>(positive_weights)});

    double along = 0;
    if (grad_x) {
      T* out = output<T>(*grad_x);
      multiply_panel<T>(b, columns, rows.width, out, false, false);
      if (!y) multiply_panel<T>(b, rows, rows.width, out, true, true);
      along = rows.finish(out) / (y ? 1 : 2);
    }
    if (grad_y) {
      T* out = output<T>(*grad_y);
      multiply_panel<T>(b, rows, rows.width, out, true, false);
      along = columns.finish(out);
    }
    *output<T>(total) = T(result.loss);
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
               "Tensor? row_groups, Tensor? column_groups, Tensor? dense, str skip, str kind, "
               "float[] numbers, Tensor? guide_rows, Tensor? guide_columns, Tensor? column_bias, "
               "Tensor? row_shift, Tensor? factor_rows, Tensor? factor_columns, Tensor? prior, "
               "Tensor? positive_weights, Tensor? weights, Tensor(grad_x!)? grad_x, "
               "Tensor(grad_y!)? grad_y, Tensor(total!) total, Tensor(parameters!)? parameters, "
               "Tensor(seen!)? seen) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
