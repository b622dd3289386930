// Scores that are one block, and a loss of them with its gradient, in one operator. A small batch's
// time is operator calls; here there is one.

#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "observing.h"
#include "operators.h"
#include "panel.h"
#include "side.h"
#include "small_losses.h"
#include "totals.h"

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

// The names are those of fastsim/tile.py and fastsim/pairs. Without y, x is held against itself.
// exclude_above: infinity for none. guide_rows (N, E), guide_columns (M, E): the same rows by a guide.
// factor_rows (N, E), factor_columns (M, E): the targets are their products, or with factor_cosine
// their cosines. weights (N,) weigh the losses of the rows; without, `weight` all of them. grad_x (N, D)
// and grad_y (M, D) are written in the compute type where given; without y, grad_x holds both shares.
// `total`: the weighted sum of the losses, in that type too; `parameters` (2,): its derivatives by
// scale, right where a gradient is given, and by bias. seen: the numbers of the rows, added to;
// `totals`: what those of this batch come to, written.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, double negative_target,
           std::string skip, Optional seen, std::string kind, double scale, double bias,
           double margin, double positive_scale, double base, bool normalise, bool symmetric, bool cosine,
           double exclude_above, Optional guide_rows, Optional guide_columns, double guide_margin,
           bool guide_relative, Optional column_bias, Optional row_shift, Optional factor_rows,
           Optional factor_columns, bool factor_cosine, Optional prior, Optional positive_weights,
           Optional weights, double weight, Optional grad_x, Optional grad_y, Tensor total,
           Optional parameters, Optional totals) {
  const PairArguments pairs{positives,     row_ids, column_ids,      row_groups,
                            column_groups, dense,   negative_target, skip,       seen};
  with_type(total, [&](auto type) {
    using T = decltype(type);
    Totals of_batch{};
    const bool potentials = totals && cosine;
    const Side<T> rows(x, cosine);
    if (potentials) add_potentials(rows, of_batch.row_potential, of_batch.row_potentials);
    std::optional<Side<T>> others;
    if (y) others.emplace(*y, cosine);
    if (y && potentials) {
      add_potentials(*others, of_batch.column_potential, of_batch.column_potentials);
    }
    const Side<T>& columns = y ? *others : rows;
    Panel<T> panel(rows, rows.count, columns, columns.count, rows.width);
    Block<T>& b = panel.block;
    take_pairs(pairs, b);
    std::optional<Panel<T>> targets;
    if (factor_rows) {
      const Side<T> one(*factor_rows, factor_cosine), other(*factor_columns, factor_cosine);
      targets.emplace(one, b.rows, other, b.columns, one.width);
      b.dense = {targets->block.scores, kDtypeOf<T>, targets->block.stride, 1};
    }
    if (std::isfinite(exclude_above)) leave_out_by_score(b, exclude_above);
    if (guide_rows) {
      leave_out_by_guide(b, *guide_rows, *guide_columns, guide_margin, guide_relative);
    }
    const Scratch<double> of_rows_seen(totals ? b.rows * kObserved : 0);
    std::optional<Observing<T>> observing;
    if (totals) {
      clear_seen(of_rows_seen, b.rows);
      observing.emplace(b, of_rows_seen);
    } else if (seen) {
      observing.emplace(b, *seen);
    }
    if (b.seen && (column_bias || row_shift)) {  // which move the scores before the loss looks
      over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
        kernels().of<T>().observe(b, {}, begin, end);
      });
      b.seen = nullptr;
    }
    move_scores(b, input<T>(column_bias), T(scale), input<T>(row_shift));

    const Loss loss{kind_of(kind), scale,     bias,      margin,          positive_scale,
                    base,          normalise, symmetric, grad_x || grad_y};
    check_targets(b, loss);
    const std::vector<T> alike(weights ? 0 : b.rows, T(weight));
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
    if (totals) {
      add_rows(of_batch, of_rows_seen, b.rows, cosine);
      write(of_batch, *totals);
    }
    if (!parameters) return;
    double* score_grads = output<double>(*parameters);
    score_grads[0] = double(result.scale_score_grad) + along / scale;
    score_grads[1] = double(result.bias_score_grad);
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(whole,
               "(Tensor x, Tensor? y, " PAIRS_SCHEMA ", str kind, float scale, float bias, "
               "float margin, float positive_scale, float base, bool normalise, bool symmetric, "
               "bool cosine, float exclude_above, Tensor? guide_rows, Tensor? guide_columns, "
               "float guide_margin, bool guide_relative, Tensor? column_bias, Tensor? row_shift, "
               "Tensor? factor_rows, Tensor? factor_columns, bool factor_cosine, Tensor? prior, "
               "Tensor? positive_weights, Tensor? weights, float weight, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
               "Tensor(parameters!)? parameters, Tensor(totals!)? totals) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
