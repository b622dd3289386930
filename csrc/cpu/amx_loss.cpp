// A loss of many rows and its gradients in one operator, by products of bfloat16 operands. Whatever
// the loss needs of a whole row is computed while the row's scores are in memory. The state of
// columns, and of rows that are too long for that, comes from a first pass; the gradients then come
// from a second one.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "amx_blocks.h"
#include "operators.h"
#include "row_losses.h"
#include "score_dots.h"

namespace fastsim {

namespace {

// For `each_block`, where no sums over columns are wanted.
void nothing_in_turn(const Block<float>&, int64_t) {}

// Scores of the same pairs by other embeddings, a guide's or a teacher's, one band at a time.
class OtherBands {
 public:
  // rows (N, E), columns (M, E): None if there are no such scores. parts: the bfloat16 parts of
  // their operands; 0: products of float32 numbers.
  OtherBands(const Optional& rows, const Optional& columns, int64_t parts, bool cosine) {
    if (!rows) return;
    if (parts != 0) split_.emplace(*rows, *columns, check_parts(parts), cosine);
    if (parts == 0) float32_.emplace(*rows, *columns, cosine);
  }

  // Calls f with the scores of a block's whole rows, which begin at row `first` of the matrix, or
  // with none if there are none.
  template <class F>
  void with_scores(const Block<float>& b, int64_t first, const F& f) const {
    if (!*this) return f(OtherScores<float>{});
    const Scratch<float> scores(b.rows * b.stride);
    if (split_) split_->score_rows(first, b.rows, scores, b.stride);
    if (float32_) float32_->score_rows(first, b.rows, scores, b.stride);
    f(OtherScores<float>{scores, b.stride});
  }

  explicit operator bool() const { return split_ || float32_; }

 private:
  struct Float32Sides {
    Float32Sides(const Tensor& x, const Tensor& y, bool cosine)
        : rows(x, cosine), columns(y, cosine),
          packed(packed_rows<float>(columns.count) * rows.width) {
      pack<float>(columns, columns.count, columns.width, packed);
    }

    void score_rows(int64_t first, int64_t count, float* scores, int64_t stride) const {
      const auto& k = kernels().of<float>();
      k.score_panels(rows + first * rows.width, rows.width, packed, columns.count, scores, stride,
                     false, {0, count}, {0, ceil_div(columns.count, k.panel_columns)}, {});
    }

    const Side<float> rows, columns;
    const Scratch<float> packed;
  };

  std::optional<SplitSides> split_;
  std::optional<Float32Sides> float32_;
};

// A loss that needs whole rows, in one pass.
Result loss_of_whole_rows(const BandScores& scores, const RowLosses<float>& losses,
                          const BatchMetrics<float>& metrics, const OtherBands& targets,
                          const OtherBands& guide, ScoreDots& dots, float* to_x, float* to_y) {
  std::vector<Result> band_results(scores.bands());
  const auto process = [&](const Block<float>& b, int64_t row) {
    targets.with_scores(b, row, [&](const OtherScores<float>& target_scores) {
      guide.with_scores(b, row, [&](const OtherScores<float>& guide_scores) {
        band_results[row / scores.band_height()] +=
            losses(b, row, metrics.row_metrics(row), target_scores, guide_scores);
      });
    });
  };
  scores.each_whole_band(
      [&](const Block<float>& b, int64_t row) { dots.of_block(b, row, process); }, to_x, to_y);
  Result result;
  for (const Result& band_result : band_results) result += band_result;
  return result;
}

// A softmax in two passes: one for the states of rows and columns, one for the gradients if they
// are wanted.
Result softmax_of_blocks(const BandScores& scores, const Block<float>& all, const Loss& loss,
                         bool cosine, const float* weights, ScoreDots& dots, float* to_x,
                         float* to_y) {
  const bool common = cosine && has_common_top(loss);
  SoftmaxSums<float> sums(all, loss, common ? scores.bands() : 0);
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t column) {
        if (common) return sums.add_both(b, row, column, row / scores.band_height());
        sums.add_rows(b, row, {0, b.rows});
      },
      [&](const Block<float>& b, int64_t column) {
        if (loss.symmetric && !common) sums.add_columns(b, column, {0, b.columns});
      });
  const Result result = sums.finish(weights);
  if (!loss.score_grad) return result;
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t column) {
        // The first pass has subtracted the margin from scores that are kept.
        const float margin = scores.is_kept(row) ? 0 : float(loss.margin);
        dots.of_block(b, row, [&](const Block<float>& part, int64_t first) {
          sums.score_grad(part, first, column, margin, {0, part.rows});
        });
      },
      nothing_in_turn, to_x, to_y);
  return result;
}

// A loss that is a sum over pairs, in one pass.
Result elementwise(const BandScores& scores, int64_t rows, const Loss& loss,
                   const RowInputs<float>& inputs, ScoreDots& dots, float* to_x, float* to_y) {
  const float *const weights = inputs.weights, *const positive_weights = inputs.positive_weights;
  std::vector<double> losses(rows), score_grads(rows);
  const auto& k = kernels().of<float>();
  const auto process = [&](const Block<float>& b, int64_t row) {
    const float* row_weights = loss.score_grad ? weights + row : nullptr;
    if (loss.kind == Kind::squared_error) {
      k.squared_error(b, {.weights = row_weights, .losses = losses.data() + row}, 0, b.rows);
      return;
    }
    k.sigmoid(b,
              {.scale = float(loss.scale),
               .bias = float(loss.bias),
               .weights = row_weights,
               .losses = losses.data() + row,
               .score_grad_sums = score_grads.data() + row,
               .positive_weights = positive_weights ? positive_weights + row : nullptr},
              0, b.rows);
  };
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t) { dots.of_block(b, row, process); },
      nothing_in_turn, to_x, to_y);
  Result result;
  for (int64_t i = 0; i < rows; ++i) {
    result.loss += weights[i] * losses[i];
    result.bias_score_grad += weights[i] * score_grads[i];
  }
  return result;
}

// Transposes, in place, the gradient (count, width) of the columns, which `BandScores` has left
// transposed in each block of columns.
void transpose_blocks(float* grad, int64_t count, int64_t width) {
  over(ceil_div(count, kBlockColumns), kBlockColumns * width, [&](int64_t begin, int64_t end) {
    const Scratch<float> transposed(kBlockColumns * width);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockColumns;
      const SquareLayout layout{width, std::min(kBlockColumns, count - first)};
      float* const to = grad + first * width;
      std::copy_n(to, layout.width * width, static_cast<float*>(transposed));
      for (int64_t k = 0; k < width; k += kTileGroup) {
        for (int64_t column = 0; column < layout.width; column += kTileGroup) {
          kernels().of<float>().transpose(transposed + layout.offset(k, column),
                                          layout.square_columns(column), to + column * width + k,
                                          width, layout.square_rows(k), false, 0,
                                          layout.square_columns(column));
        }
      }
    }
  });
}

// Replaces the sums of `BandScores` in `grad` (rows, D) by dL/dx, as SplitSide::finish does.
// residuals (rows,): those of the score gradients; null: none. Returns sum_i row_i . (dL/drow)_i.
double finish(const SplitSide& side, const SplitSide& other, const float* residuals, float* grad) {
  const Scratch<double> dots(side.count);
  const Scratch<float> mean(side.width);
  if (residuals) other.mean(mean);
  over(side.count, side.width, [&](int64_t begin, int64_t end) {
    side.finish(grad + begin * side.width, residuals ? residuals + begin : nullptr, mean, begin,
                end - begin, dots + begin);
  });
  Sum sum;
  for (int64_t i = 0; i < side.count; ++i) sum += dots[i];
  return sum;
}

// Whether a loss can take its scores block by block, without whole rows.
bool takes_blocks(Kind kind) {
  return kind == Kind::softmax || kind == Kind::sigmoid || kind == Kind::squared_error;
}

// How a loss goes over its scores.
struct Passes {
  bool needs_whole_rows;  // whether the loss cannot take its scores block by block
  bool whole_rows;        // whether the scores of whole rows are in memory at once
  bool two;               // whether a second pass over all blocks follows the first
};

// stripe: the columns that are packed at a time. from_others: whether the loss depends on other
// scores too, a guide's or a teacher's.
Passes passes_of(const RowLosses<float>& losses, bool from_others, int64_t columns,
                 int64_t stripe) {
  const Loss& loss = losses.loss;
  const bool needed = !takes_blocks(loss.kind) || from_others || losses.changes_scores();
  STD_TORCH_CHECK(!needed || (columns <= stripe && !loss.symmetric),
                  "fastsim: kind: wanted a loss of whole rows, of no more columns than a stripe");
  const bool softmax = loss.kind == Kind::softmax;
  const bool whole_rows = needed || (softmax && !loss.symmetric && columns <= stripe);
  return {needed, whole_rows, !whole_rows && softmax && loss.score_grad};
}

// The largest score gradient of bfloat16 rows for which one part is enough: a share (amx.h) of the
// largest that a score gradient can be. A row with several targets, or with a teacher's, may have
// no score gradient that is nearly as large as that.
float small_score_grad(const Block<float>& all, const RowLosses<float>& losses,
                       const Passes& passes) {
  const Loss& loss = losses.loss;
  const float* const weights = losses.row_inputs.weights;
  float largest = 0;
  for (int64_t i = 0; i < all.rows; ++i) largest = std::max(largest, std::abs(weights[i]));
  const bool of_logits = loss.kind != Kind::squared_error && loss.kind != Kind::margins;
  const float slope = of_logits ? std::abs(float(loss.scale)) : 1;
  const bool one_target =
      loss.kind == Kind::softmax ? one_positive(all) : takes_blocks(loss.kind);
  const float share = one_target && !passes.needs_whole_rows ? kSmallInOneCall : kSmallShare;
  return share * largest * slope;
}

// The sums of the residuals (amx.h) of each row and of each column.
class ResidualSums {
 public:
  // any: whether there are residuals.
  ResidualSums(bool any, int64_t rows, int64_t columns)
      : sums_(any ? rows + columns : 0), rows_(any ? sums_.data() : nullptr),
        columns_(any ? rows_ + rows : nullptr) {}

  // Null if there are no residuals.
  float* rows() const { return rows_; }
  float* columns() const { return columns_; }

 private:
  std::vector<float> sums_;
  float *const rows_, *const columns_;
};

// What the operator writes; null: not wanted. grad_x (N, D), grad_y (M, D), total (), parameters
// (2,): the derivatives by scale and bias.
struct Outputs {
  Outputs(const Tensor& x, const Tensor& y, const Optional& x_grad, const Optional& y_grad,
          const Tensor& loss, const Optional& parameter_grads)
      : grad_x(output<float>(x_grad, "grad_x", x.size(0) * x.size(1))),
        grad_y(output<float>(y_grad, "grad_y", y.size(0) * y.size(1))),
        total(output<float>(loss, "total", 1)),
        parameters(output<double>(parameter_grads, "parameters", 2)) {}

  // Writes the results of a loss without pairs, in which every sum is 0.
  void write_zeros(const SplitSide& rows, const SplitSide& columns) const {
    if (grad_x) std::fill_n(grad_x, rows.count * rows.width, 0.0f);
    if (grad_y) std::fill_n(grad_y, columns.count * columns.width, 0.0f);
    *total = 0;
    if (parameters) std::fill_n(parameters, 2, 0.0);
  }

  // Writes all results. The gradients hold the sums of `BandScores`.
  void write(const Result& result, const SplitSide& rows, const SplitSide& columns,
             const ResidualSums& residuals, const ScoreDots& dots, double scale,
             bool scale_grad) const {
    double dot_sum = 0;
    if (grad_x) dot_sum = finish(rows, columns, residuals.rows(), grad_x);
    if (grad_y) {
      transpose_blocks(grad_y, columns.count, columns.width);
      dot_sum = finish(columns, rows, residuals.columns(), grad_y);
    }
    if (dots) dot_sum = dots.total();
    *total = float(result.loss);
    if (!parameters) return;
    parameters[0] = scale_grad ? double(result.scale_score_grad) + dot_sum / scale : 0;
    parameters[1] = double(result.bias_score_grad);
  }

  float *const grad_x, *const grad_y, *const total;
  double* const parameters;
};

// The arguments are those of `in_one_call` (one_call.cpp) and of `BandScores`. parts,
// score_grad_parts, guide_parts, factor_parts: the bfloat16 parts of x and y, of score gradients,
// of the guide's rows and of the factors. The last two are 0 for products of float32 numbers.
void amx_loss(Tensor x, Tensor y, LOSS_PARAMETERS, int64_t parts, int64_t score_grad_parts,
              int64_t guide_parts, int64_t factor_parts, int64_t stripe, int64_t kept,
              RESULTS_PARAMETERS) {
  check_matrix(y, "y", y.size(0), x.size(1));
  const Outputs outputs(x, y, grad_x, grad_y, total, parameters);
  const LossOptions options(numbers);
  STD_TORCH_CHECK(options.prefixes.empty(), "fastsim: numbers: wanted no prefixes");
  const Optional others(y);
  const LossArguments arguments LOSS_ARGUMENTS(x, others, options);
  check_sides(arguments, x.size(0), y.size(0));
  const SplitSide rows(x, check_parts(parts), options.cosine), columns(y, parts, options.cosine);
  const OtherBands targets(factor_rows, factor_columns, factor_parts, options.factor_cosine);
  const OtherBands guide(guide_rows, guide_columns, guide_parts, true);
  BatchMetrics<float> metrics(row_metrics, totals, rows.count, options.cosine);
  if (totals && options.cosine) {
    metrics.add_row_potentials(Side<float>(x, true));
    metrics.add_column_potentials(Side<float>(y, true));
  }
  Block<float> all = all_pairs<float>(arguments.pairs, rows.count, columns.count);
  all.row_metrics = metrics.row_metrics(0);
  const RowLosses<float> losses(arguments, all, 1, grad_x || grad_y);
  if (rows.count == 0 || columns.count == 0) {
    outputs.write_zeros(rows, columns);
    return metrics.write();
  }
  const Loss& loss = losses.loss;
  if (!targets) check_targets(all, loss);
  const Passes passes = passes_of(losses, targets || guide, columns.count, stripe);
  const bool drops_second = parts == 1 && score_grad_parts == 2;  // for bfloat16 rows
  const float small = drops_second ? small_score_grad(all, losses, passes) : 0;
  const ResidualSums residuals(small > 0, rows.count, columns.count);
  ScoreDots dots(options.scale_grad && score_grad_parts < kAllParts, rows.count);
  // Kept scores lack the margin, but `dots` needs them as they were.
  const bool keeps = passes.two && !(dots && loss.margin != 0);
  const BandScores scores(
      rows, columns, all,
      {check_parts(score_grad_parts), small, residuals.rows(), residuals.columns()},
      loss.score_grad, passes.whole_rows, stripe, keeps ? kept : 0);
  float *const to_x = outputs.grad_x, *const to_y = outputs.grad_y;
  const Result result =
      passes.whole_rows
          ? loss_of_whole_rows(scores, losses, metrics, targets, guide, dots, to_x, to_y)
      : loss.kind == Kind::softmax
          ? softmax_of_blocks(scores, all, loss, options.cosine, losses.row_inputs.weights, dots,
                              to_x, to_y)
          : elementwise(scores, rows.count, loss, losses.row_inputs, dots, to_x, to_y);
  outputs.write(result, rows, columns, residuals, dots, loss.scale, options.scale_grad);
  metrics.write();
}

std::vector<Operator> operators() {
  return {OPERATOR(amx_loss,
                   "(Tensor x, Tensor y, " LOSS_SCHEMA
                   ", int parts, int score_grad_parts, int guide_parts, int factor_parts, "
                   "int stripe, int kept, " RESULTS_SCHEMA ") -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
