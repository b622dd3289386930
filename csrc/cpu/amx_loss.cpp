// A loss of many rows with its gradient, in one operator, on a processor's matrix unit. What a
// softmax needs of whole rows and columns comes from a pass before that of the gradients.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "amx_blocks.h"
#include "arguments.h"
#include "block_losses.h"
#include "operators.h"
#include "totals.h"

namespace fastsim {

namespace {

void nothing_in_turn(const Block<float>&, int64_t) {}

// In one pass, of whole rows.
Result softmax_of_bands(const BandScores& scores, const Loss& loss, const float* weights,
                        float* to_x, float* to_y) {
  std::vector<Result> of_bands(scores.bands());
  scores.each_whole(
      [&](const Block<float>& b, int64_t row) {
        of_bands[row / scores.tall()] = softmax_of_rows(b, loss, weights + row);
      },
      to_x, to_y);
  Result result;
  for (const Result& of_band : of_bands) result += of_band;
  return result;
}

Result softmax_of_blocks(const BandScores& scores, const Block<float>& all, const Loss& loss,
                         bool cosine, const float* weights, float* to_x, float* to_y) {
  const bool common = cosine && has_common_top(loss);
  SoftmaxSums<float> sums(all, loss, common ? scores.bands() : 0);
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t column) {
        if (common) return sums.add_both(b, row, column, row / scores.tall());
        sums.add_rows(b, row, {0, b.rows});
      },
      [&](const Block<float>& b, int64_t column) {
        if (loss.symmetric && !common) sums.add_columns(b, column, {0, b.columns});
      });
  const Result result = sums.finish(weights);
  if (!loss.score_grad) return result;
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t column) {
        const float margin = scores.kept(row) ? 0 : float(loss.margin);  // it was taken before
        sums.score_grad(b, row, column, margin, {0, b.rows});
      },
      nothing_in_turn, to_x, to_y);
  return result;
}

// Losses of single scores.
Result elementwise(const BandScores& scores, int64_t rows, const Loss& loss, const float* weights,
                   const float* positive_weights, float* to_x, float* to_y) {
  std::vector<double> losses(rows), score_grads(rows);
  const auto& k = kernels().of<float>();
  scores.each_block(
      [&](const Block<float>& b, int64_t row, int64_t) {
        const float* of_rows = loss.score_grad ? weights + row : nullptr;
        if (loss.kind == Kind::squared_error) {
          k.squared_error(b, {.weights = of_rows, .losses = losses.data() + row}, 0, b.rows);
          return;
        }
        k.sigmoid(b,
                  {.scale = float(loss.scale),
                   .bias = float(loss.bias),
                   .weights = of_rows,
                   .losses = losses.data() + row,
                   .score_grad_sums = score_grads.data() + row,
                   .positive_weights = positive_weights ? positive_weights + row : nullptr},
                  0, b.rows);
      },
      nothing_in_turn, to_x, to_y);
  Result result;
  for (int64_t i = 0; i < rows; ++i) {
    result.loss += weights[i] * losses[i];
    result.bias_score_grad += weights[i] * score_grads[i];
  }
  return result;
}

// Turns over the gradient of the columns of each block, where `BandScores` has left it.
void turn_blocks(float* grad, int64_t count, int64_t width) {
  over(tiles(count, kBlockColumns), kBlockColumns * width, [&](int64_t begin, int64_t end) {
    const Scratch<float> turned(kBlockColumns * width);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockColumns;
      const InBlocks places{width, std::min(kBlockColumns, count - first)};
      float* const to = grad + first * width;
      std::copy_n(to, places.width * width, static_cast<float*>(turned));
      for (int64_t k = 0; k < width; k += kTileGroup) {
        for (int64_t at = 0; at < places.width; at += kTileGroup) {
          kernels().of<float>().transpose(turned + places.place(k, at), places.wide(at),
                                          to + at * width + k, width, places.tall(k), false, 0,
                                          places.wide(at));
        }
      }
    }
  });
}

// The gradient through the rows in its place, with the residuals (null: none) of score gradients, which
// multiply rows of the other side; sum_i row_i . drow_i.
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

// How large a score gradient of bfloat16 rows may be for one part to do.
float small_score_grad(const Loss& loss, const float* weights, int64_t rows) {
  float largest = 0;
  for (int64_t i = 0; i < rows; ++i) largest = std::max(largest, std::abs(weights[i]));
  const float steep = loss.kind == Kind::squared_error ? 1 : std::abs(float(loss.scale));
  return kSmallInOneCall * largest * steep;
}

// The arguments are those of `whole` (whole.cpp) and of `BandScores`. parts: bfloat16 parts
// of an entry of the rows.
void amx_loss(Tensor x, Tensor y, Optional positives, Optional row_ids, Optional column_ids,
              Optional row_groups, Optional column_groups, Optional dense, double negative_target,
              std::string skip, Optional seen, std::string kind, double scale, double bias,
              double margin, bool normalise, bool symmetric, bool cosine,
              Optional positive_weights, Optional weights, double weight, int64_t parts,
              int64_t score_grad_parts, int64_t stripe, int64_t kept, Optional grad_x,
              Optional grad_y, Tensor total, Optional parameters, Optional totals) {
  check_matrix(y, "y", y.size(0), x.size(1));
  float* const to_x = output<float>(grad_x, "grad_x", x.size(0) * x.size(1));
  float* const to_y = output<float>(grad_y, "grad_y", y.size(0) * y.size(1));
  float* const loss_of_all = output<float>(total, "total", 1);
  double* const score_grads = output<double>(parameters, "parameters", 2);
  const SplitSide rows(x, check_parts(parts), cosine), columns(y, parts, cosine);
  Watching<float> watching(seen, totals, rows.count, cosine);
  if (totals && cosine) {
    watching.look_at_rows(Side<float>(x, true));
    watching.look_at_columns(Side<float>(y, true));
  }
  Block<float> all{};
  all.rows = rows.count;
  all.columns = columns.count;
  take_pairs({positives, row_ids, column_ids, row_groups, column_groups, dense, negative_target,
              skip, seen},
             all);
  check_positives(all);
  all.seen = watching.numbers(0);
  const Loss loss{.kind = kind_of(kind),
                  .scale = scale,
                  .bias = bias,
                  .margin = margin,
                  .positive_scale = 0,
                  .base = 0,
                  .normalise = normalise,
                  .symmetric = symmetric,
                  .score_grad = grad_x || grad_y};
  const bool softmax = loss.kind == Kind::softmax;
  STD_TORCH_CHECK(softmax || loss.kind == Kind::sigmoid || loss.kind == Kind::squared_error,
                  "fastsim: kind: wanted softmax, sigmoid or squared_error, got ", kind);
  if (rows.count == 0 || columns.count == 0) {  // no pairs: every sum is 0
    if (to_x) std::fill_n(to_x, rows.count * rows.width, 0.0f);
    if (to_y) std::fill_n(to_y, columns.count * columns.width, 0.0f);
    *loss_of_all = 0;
    if (score_grads) std::fill_n(score_grads, 2, 0.0);
    watching.write();
    return;
  }
  check_targets(all, loss);
  const std::vector<float> alike(weights ? 0 : rows.count, float(weight));
  const float* const of_rows =
      weights ? input<float>(*weights, "weights", rows.count) : alike.data();
  const float* const of_positives =
      input<float>(positive_weights, "positive_weights", rows.count);

  const bool whole = softmax && !symmetric && columns.count <= stripe;
  const bool twice = softmax && !whole && loss.score_grad;
  const bool in_part = parts == 1 && score_grad_parts == 2;  // of bfloat16 rows
  const float small = in_part ? small_score_grad(loss, of_rows, rows.count) : 0;
  std::vector<float> residuals(small > 0 ? rows.count + columns.count : 0);
  float* const of_x = small > 0 ? residuals.data() : nullptr;
  float* const of_y = small > 0 ? of_x + rows.count : nullptr;
  const ScoreGrads as_parts{check_parts(score_grad_parts), small, of_x, of_y};
  const BandScores scores(rows, columns, all, as_parts, loss.score_grad, whole, stripe,
                      twice ? kept : 0);
  const Result result =
      whole     ? softmax_of_bands(scores, loss, of_rows, to_x, to_y)
      : softmax ? softmax_of_blocks(scores, all, loss, cosine, of_rows, to_x, to_y)
                : elementwise(scores, rows.count, loss, of_rows, of_positives, to_x, to_y);
  double along = 0;
  if (to_x) along = finish(rows, columns, of_x, to_x);
  if (to_y) {
    turn_blocks(to_y, columns.count, columns.width);
    along = finish(columns, rows, of_y, to_y);
  }
  *loss_of_all = float(result.loss);
  watching.write();
  if (!score_grads) return;
  score_grads[0] = double(result.scale_score_grad) + along / scale;
  score_grads[1] = double(result.bias_score_grad);
}

std::vector<Operator> operators() {
  return {OPERATOR(amx_loss,
                   "(Tensor x, Tensor y, " PAIRS_SCHEMA
                   ", str kind, float scale, float bias, float margin, bool normalise, "
                   "bool symmetric, bool cosine, Tensor? positive_weights, Tensor? weights, float weight, "
                   "int parts, int score_grad_parts, int stripe, int kept, "
                   "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
                   "Tensor(parameters!)? parameters, Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
