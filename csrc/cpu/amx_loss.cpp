// A loss of many rows with its gradient, in one operator, by products of bfloat16 operands. What it
// needs of whole rows it finds while their scores are in memory; what a softmax needs of columns, or of
// longer rows, comes from a pass before that of the gradients.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "amx_blocks.h"
#include "operators.h"
#include "whole_rows.h"

namespace fastsim {

namespace {

void nothing_in_turn(const Block<float>&, int64_t) {}

// Scores of other rows, a band at a time: by products of operands, or of float32 numbers.
class OtherBands {
 public:
  // rows, columns: None where there are none; parts: of their operands, or 0.
  OtherBands(const Optional& rows, const Optional& columns, int64_t parts, bool cosine) {
    if (!rows) return;
    if (parts != 0) split_.emplace(*rows, *columns, check_parts(parts), cosine);
    if (parts == 0) single_.emplace(*rows, *columns, cosine);
  }

  // f of those of a block's rows, from `first` on, as wide as it; of none where there are none.
  template <class F>
  void with(const Block<float>& b, int64_t first, const F& f) const {
    if (!*this) return f(OtherScores<float>{});
    const Scratch<float> scores(b.rows * b.stride);
    if (split_) split_->score_rows(first, b.rows, scores, b.stride);
    if (single_) single_->score_rows(first, b.rows, scores, b.stride);
    f(OtherScores<float>{scores, b.stride});
  }

  explicit operator bool() const { return split_ || single_; }

 private:
  struct Single {
    Single(const Tensor& x, const Tensor& y, bool cosine)
        : rows(x, cosine), columns(y, cosine), packed(packed_rows<float>(columns.count) * rows.width) {
      pack<float>(columns, columns.count, columns.width, packed);
    }

    void score_rows(int64_t first, int64_t count, float* scores, int64_t stride) const {
      const auto& k = kernels().of<float>();
      k.score_panels(rows + first * rows.width, rows.width, packed, columns.count, scores, stride,
                     false, {0, count}, {0, tiles(columns.count, k.panel_columns)}, nullptr);
    }

    const Side<float> rows, columns;
    const Scratch<float> packed;
  };

  std::optional<SplitSides> split_;
  std::optional<Single> single_;
};

// In one pass, of whole rows.
Result by_rows(const BandScores& scores, const RowLosses<float>& losses,
               const Watching<float>& watching, const OtherBands& targets, const OtherBands& guide,
               float* to_x, float* to_y) {
  std::vector<Result> of_bands(scores.bands());
  scores.each_whole(
      [&](const Block<float>& b, int64_t row) {
        targets.with(b, row, [&](const OtherScores<float>& of_targets) {
          guide.with(b, row, [&](const OtherScores<float>& of_guide) {
            of_bands[row / scores.tall()] =
                losses(b, row, watching.numbers(row), of_targets, of_guide);
          });
        });
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
Result elementwise(const BandScores& scores, int64_t rows, const Loss& loss, const OfRows<float>& of,
                   float* to_x, float* to_y) {
  const float *const weights = of.weights, *const positive_weights = of.positive_weights;
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

// How large a score gradient of bfloat16 rows may be for one part to do. share: of the largest that an
// entry can be.
float small_score_grad(const Loss& loss, const float* weights, int64_t rows, float share) {
  float largest = 0;
  for (int64_t i = 0; i < rows; ++i) largest = std::max(largest, std::abs(weights[i]));
  const bool of_logits = loss.kind != Kind::squared_error && loss.kind != Kind::margins;
  const float steep = of_logits ? std::abs(float(loss.scale)) : 1;
  return share * largest * steep;
}

// Whether a loss takes its scores block by block: those of whole rows are not needed.
bool is_of_blocks(Kind kind) {
  return kind == Kind::softmax || kind == Kind::sigmoid || kind == Kind::squared_error;
}

// The arguments are those of `whole` (whole.cpp) and of `BandScores`. parts: bfloat16 parts of an entry
// of the rows; guide_parts, factor_parts: of the rows of the guide and of the factors, 0 for products
// of float32 numbers.
void amx_loss(Tensor x, Tensor y, Optional positives, Optional row_ids, Optional column_ids,
              Optional row_groups, Optional column_groups, Optional dense, std::string skip,
              Optional seen, std::string kind, std::vector<double> numbers, Optional guide_rows,
              Optional guide_columns, Optional column_bias, Optional row_shift,
              Optional factor_rows, Optional factor_columns, Optional prior,
              Optional positive_weights, Optional weights, int64_t parts, int64_t score_grad_parts,
              int64_t guide_parts, int64_t factor_parts, int64_t stripe, int64_t kept,
              Optional grad_x, Optional grad_y, Tensor total, Optional parameters,
              Optional totals) {
  check_matrix(y, "y", y.size(0), x.size(1));
  float* const to_x = output<float>(grad_x, "grad_x", x.size(0) * x.size(1));
  float* const to_y = output<float>(grad_y, "grad_y", y.size(0) * y.size(1));
  float* const loss_of_all = output<float>(total, "total", 1);
  double* const score_grads = output<double>(parameters, "parameters", 2);
  const Numbers of(numbers);
  STD_TORCH_CHECK(of.prefixes.empty(), "fastsim: numbers: wanted no prefixes");
  const Optional others(y);
  const Given given{x, others,
                    {positives, row_ids, column_ids, row_groups, column_groups, dense,
                     of.negative_target, skip, seen},
                    kind_of(kind), of, guide_rows, guide_columns, column_bias, row_shift,
                    factor_rows, factor_columns, prior, positive_weights, weights, seen, totals};
  check_sides(given, x.size(0), y.size(0));
  const SplitSide rows(x, check_parts(parts), of.cosine), columns(y, parts, of.cosine);
  const OtherBands targets(factor_rows, factor_columns, factor_parts, of.factor_cosine);
  const OtherBands guide(guide_rows, guide_columns, guide_parts, true);
  Watching<float> watching(seen, totals, rows.count, of.cosine);
  if (totals && of.cosine) {
    watching.look_at_rows(Side<float>(x, true));
    watching.look_at_columns(Side<float>(y, true));
  }
  Block<float> all{};
  all.rows = rows.count;
  all.columns = columns.count;
  take_pairs(given.pairs, all);
  check_positives(all);
  all.seen = watching.numbers(0);
  const RowLosses<float> losses(given, all, 1, grad_x || grad_y);
  const Loss& loss = losses.loss;
  if (rows.count == 0 || columns.count == 0) {  // no pairs: every sum is 0
    if (to_x) std::fill_n(to_x, rows.count * rows.width, 0.0f);
    if (to_y) std::fill_n(to_y, columns.count * columns.width, 0.0f);
    *loss_of_all = 0;
    if (score_grads) std::fill_n(score_grads, 2, 0.0);
    watching.write();
    return;
  }
  if (!targets) check_targets(all, loss);
  const bool softmax = loss.kind == Kind::softmax;
  const bool needs_rows = !is_of_blocks(loss.kind) || targets || guide || losses.moves();
  STD_TORCH_CHECK(!needs_rows || (columns.count <= stripe && !loss.symmetric),
                  "fastsim: kind: wanted a loss of whole rows, of no more columns than a stripe");
  const bool whole = needs_rows || (softmax && !loss.symmetric && columns.count <= stripe);
  const bool twice = !whole && softmax && loss.score_grad;
  const bool in_part = parts == 1 && score_grad_parts == 2;  // of bfloat16 rows
  const float* const weight = losses.of_rows.weights;
  // A row with more targets than one, or with a teacher's, may have none that is nearly so large.
  const bool one_target = softmax ? one_positive(all) : is_of_blocks(loss.kind);
  const float share = one_target && !needs_rows ? kSmallInOneCall : kSmallShare;
  const float small = in_part ? small_score_grad(loss, weight, rows.count, share) : 0;
  std::vector<float> residuals(small > 0 ? rows.count + columns.count : 0);
  float* const of_x = small > 0 ? residuals.data() : nullptr;
  float* const of_y = small > 0 ? of_x + rows.count : nullptr;
  const ScoreGrads as_parts{check_parts(score_grad_parts), small, of_x, of_y};
  const BandScores scores(rows, columns, all, as_parts, loss.score_grad, whole, stripe,
                          twice ? kept : 0);
  const Result result =
      whole     ? by_rows(scores, losses, watching, targets, guide, to_x, to_y)
      : softmax ? softmax_of_blocks(scores, all, loss, of.cosine, weight, to_x, to_y)
                : elementwise(scores, rows.count, loss, losses.of_rows, to_x, to_y);
  double along = 0;
  if (to_x) along = finish(rows, columns, of_x, to_x);
  if (to_y) {
    turn_blocks(to_y, columns.count, columns.width);
    along = finish(columns, rows, of_y, to_y);
  }
  *loss_of_all = float(result.loss);
  watching.write();
  if (!score_grads) return;
  score_grads[0] = of.scale_grad ? double(result.scale_score_grad) + along / loss.scale : 0;
  score_grads[1] = double(result.bias_score_grad);
}

std::vector<Operator> operators() {
  return {OPERATOR(amx_loss,
                   "(Tensor x, Tensor y, " GIVEN_SCHEMA
                   ", int parts, int score_grad_parts, int guide_parts, int factor_parts, "
                   "int stripe, int kept, " RESULTS_SCHEMA ") -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
