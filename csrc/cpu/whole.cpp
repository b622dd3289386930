// Scores that are one block, and a loss of them with its gradient, in one operator. A small batch's
// time is operator calls; here there is one.

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "panel.h"
#include "small_losses.h"

namespace fastsim {

namespace {

// One side of the scores: the unit rows of x, or without `cosine` its rows as they are.
template <class T>
class Side {
 public:
  Side(const Tensor& x, bool cosine)
      : count(x.size(0)), width(x.size(1)), from_(matrix(x)), rows_(count * width),
        inverse_(cosine ? count : 0), cosine_(cosine) {
    if (cosine) {
      make_unit_rows<T>(from_, count, width, rows_, inverse_);
      return;
    }
    std::vector<int64_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    kernels().of<T>().token_rows(from_, all.data(), count, width, false, rows_);
  }

  operator const T*() const { return rows_; }

  // dL/dx in the place of dL/drows; returns sum_i row_i . drow_i.
  double finish(T* grad) const {
    Sum sum;
    if (cosine_) {
      Scratch<T> dots(count);
      const Dtype dtype = sizeof(T) == sizeof(float) ? Dtype::float32 : Dtype::float64;
      through_unit_rows<T>(grad, from_, count, width, inverse_, T(1), grad, dtype, dots);
      for (int64_t i = 0; i < count; ++i) sum += dots[i];
      return sum;
    }
    const T* row = rows_;
    for (int64_t i = 0; i < count; ++i, row += width, grad += width) {
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(grad[k]);
      sum += dot;
    }
    return sum;
  }

  const int64_t count, width;

 private:
  const Matrix from_;
  Scratch<T> rows_, inverse_;
  const bool cosine_;
};

template <class T>
void check_panel(const Tensor& panel, const Block<T>& b) {
  STD_TORCH_CHECK(panel.scalar_type() == kTypeOf<T> && panel.size(0) == b.rows &&
                      panel.size(1) == b.columns,
                  "fastsim: whole: wanted panels of one dtype and size");
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

// Pairs but for a row's positive whose score by a guide is above the row's threshold.
template <class T>
void leave_out_by_guide(const Block<T>& b, const Tensor& scores, const Tensor& thresholds) {
  Block<T> guide{};
  take_panel(scores, guide);
  check_panel<T>(scores, b);
  std::vector<T> kept(b.positives ? b.rows : 0);
  const auto positive = [&](int64_t i) -> T& { return b.scores[i * b.stride + b.positives[i]]; };
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = positive(i);
  leave_out(b, guide.scores, guide.stride, input<T>(thresholds));
  for (size_t i = 0; i < kept.size(); ++i) positive(i) = kept[i];
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

// The names are those of fastsim/tile.py and fastsim/pairs.py. Without y, x is held against itself.
// exclude_above: infinity for none. guide (N, M): scores by the guide. factor_rows (N, E),
// factor_columns (M, E): the targets are their products. weights (N,) weigh the losses of the rows;
// without, `weight` all of them. grad_x (N, D) and grad_y (M, D) are written in the compute type
// where given; without y, grad_x holds both shares. `total`: the weighted sum of the losses, in that
// type too; `parameters` (2,): its derivatives by scale, right where a gradient is given, and by bias.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, double negative_target,
           std::string skip, std::string kind, double scale, double bias, double margin,
           double positive_scale, double base, bool normalise, bool symmetric, bool cosine,
           double exclude_above, Optional guide, Optional guide_thresholds, Optional column_bias,
           Optional row_shift, Optional factor_rows, Optional factor_columns, Optional prior,
           Optional positive_weights, Optional weights, double weight, Optional grad_x,
           Optional grad_y, Tensor total, Optional parameters, Optional seen) {
  const PairArguments pairs{positives,     row_ids, column_ids,      row_groups,
                            column_groups, dense,   negative_target, skip};
  with_type(total, [&](auto type) {
    using T = decltype(type);
    const Side<T> rows(x, cosine);
    std::optional<Side<T>> others;
    if (y) others.emplace(*y, cosine);
    const Side<T>& columns = y ? *others : rows;
    Panel<T> panel(rows, rows.count, columns, columns.count, rows.width);
    Block<T>& b = panel.block;
    take_pairs(pairs, b);
    std::optional<Panel<T>> targets;
    if (factor_rows) {
      const Side<T> one(*factor_rows, false), other(*factor_columns, false);
      targets.emplace(one, b.rows, other, b.columns, one.width);
      const Dtype dtype = sizeof(T) == sizeof(float) ? Dtype::float32 : Dtype::float64;
      b.dense = {targets->block.scores, dtype, targets->block.stride, 1};
    }
    if (std::isfinite(exclude_above)) leave_out_by_score(b, exclude_above);
    if (guide) leave_out_by_guide(b, *guide, *guide_thresholds);
    if (seen) {
      double* numbers = output<double>(*seen);
      over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
        kernels().of<T>().observe(b, {.seen = numbers}, begin, end);
      });
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
    if (!parameters) return;
    double* score_grads = output<double>(*parameters);
    score_grads[0] = double(result.scale_score_grad) + along / scale;
    score_grads[1] = double(result.bias_score_grad);
  });
}

// The cosines (N, M) of x (N, D) with y (M, D).
void cosines(Tensor x, Tensor y, Tensor scores) {
  with_type(scores, [&](auto type) {
    using T = decltype(type);
    const Side<T> rows(x, true), columns(y, true);
    Block<T> b{};
    take_panel(scores, b);
    Scratch<T> packed(packed_rows<T>(b.columns) * rows.width);
    pack<T>(columns, b.columns, rows.width, packed);
    fill_scores<T>(rows, rows.width, packed, b);
  });
}

// dL/dx and dL/dy, where they are wanted, in the compute type, from dL/dscores.
void cosines_backward(Tensor grad, Tensor x, Tensor y, Optional grad_x, Optional grad_y) {
  with_type(grad, [&](auto type) {
    using T = decltype(type);
    const Side<T> rows(x, true), columns(y, true);
    Block<T> b{};
    take_panel(grad, b);
    if (grad_x) {
      T* out = output<T>(*grad_x);
      multiply_panel<T>(b, columns, rows.width, out, false, false);
      rows.finish(out);
    }
    if (grad_y) {
      T* out = output<T>(*grad_y);
      multiply_panel<T>(b, rows, rows.width, out, true, false);
      columns.finish(out);
    }
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(cosines, "(Tensor x, Tensor y, Tensor(scores!) scores) -> ()"),
      OPERATOR(cosines_backward, "(Tensor grad, Tensor x, Tensor y, Tensor(grad_x!)? grad_x, "
                                 "Tensor(grad_y!)? grad_y) -> ()"),
      OPERATOR(whole,
               "(Tensor x, Tensor? y, " PAIRS_SCHEMA ", str kind, float scale, float bias, "
               "float margin, float positive_scale, float base, bool normalise, bool symmetric, "
               "bool cosine, float exclude_above, Tensor? guide, Tensor? guide_thresholds, "
               "Tensor? column_bias, Tensor? row_shift, Tensor? factor_rows, Tensor? factor_columns, "
               "Tensor? prior, "
               "Tensor? positive_weights, Tensor? weights, float weight, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
               "Tensor(parameters!)? parameters, Tensor(seen!)? seen) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
