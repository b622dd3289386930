// The loss of whole rows of scores, with the steps before it: pairs are left out by score or by
// guide, and scores are moved by biases and shifts. A block has some of the rows, or all of them.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "block_losses.h"
#include "metrics_recorder.h"
#include "one_call_arguments.h"
#include "totals.h"

namespace fastsim {
namespace {

// Scores of the pairs of a block by other embeddings than those of the loss: a guide's, or the
// factors of the targets. data: null if there are none.
template <class T>
struct OtherScores {
  const T* data = nullptr;
  int64_t stride = 0;
};

// Runs the kernel `leave_out_above` (pairs.h) on the rows of a block, on all threads.
template <class T>
void leave_out_above(const Block<T>& b, const T* guide, int64_t stride, const T* thresholds) {
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().leave_out_above(b, guide, stride, thresholds, begin, end);
  });
}

// Leaves out the pairs whose score is more than `margin` above the score of the row's positive.
template <class T>
void leave_out_by_score(const Block<T>& b, double margin) {
  STD_TORCH_CHECK(b.positives, "fastsim: exclude_above: wanted positives");
  std::vector<T> thresholds(b.rows);
  for (int64_t i = 0; i < b.rows; ++i) {
    thresholds[i] = b.scores[i * b.stride + b.positives[i]] + T(margin);
  }
  leave_out_above(b, b.scores, b.stride, thresholds.data());
}

// Leaves out the pairs whose guide cosine is above t - margin, or with `relative` above
// t - |t| margin, where t is the guide cosine of the row's positive. The positive stays.
template <class T>
void leave_out_by_guide(const Block<T>& b, const OtherScores<T>& guide, double margin,
                        bool relative) {
  STD_TORCH_CHECK(b.positives, "fastsim: guide_rows: wanted positives");
  std::vector<T> positive_scores(b.rows), thresholds(b.rows);
  const auto positive = [&](int64_t i) -> T& { return b.scores[i * b.stride + b.positives[i]]; };
  for (int64_t i = 0; i < b.rows; ++i) {
    positive_scores[i] = positive(i);
    const T cosine = guide.data[i * guide.stride + b.positives[i]];
    thresholds[i] = cosine - (relative ? std::abs(cosine) : T(1)) * T(margin);
  }
  leave_out_above(b, guide.data, guide.stride, thresholds.data());
  for (int64_t i = 0; i < b.rows; ++i) positive(i) = positive_scores[i];
}

// Moves the scores: adds column_bias (columns,), given for logits, divided by the scale, and
// subtracts row_shift (rows,). Null: nothing to add or subtract.
template <class T>
void move_scores(const Block<T>& b, const T* column_bias, T scale, const T* row_shift) {
  if (!column_bias && !row_shift) return;
  std::vector<T> biases(b.columns);
  for (int64_t j = 0; column_bias && j < b.columns; ++j) {
    STD_TORCH_CHECK(std::isfinite(column_bias[j]), "fastsim: column_bias: wanted finite numbers");
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

// The losses of bands of rows, each with all columns.
template <class T>
class RowLosses {
 public:
  // all: the whole matrix, whose scores need not be in memory. factor: multiplies every loss.
  RowLosses(const LossArguments& arguments, const Block<T>& all, double factor, bool score_grad)
      : loss{.kind = arguments.kind,
             .scale = arguments.options.scale,
             .bias = arguments.options.bias,
             .margin = arguments.options.margin,
             .positive_scale = arguments.options.positive_scale,
             .base = arguments.options.base,
             .normalise = arguments.options.normalise,
             .symmetric = arguments.options.symmetric,
             .score_grad = score_grad},
        options_(arguments.options), weights_(all.rows, T(factor * arguments.options.weight)),
        column_bias_(input<T>(arguments.column_bias, "column_bias", all.columns)),
        row_shift_(input<T>(arguments.row_shift, "row_shift", all.rows)) {
    const T* const weights = input<T>(arguments.weights, "weights", all.rows);
    for (int64_t i = 0; weights && i < all.rows; ++i) weights_[i] = T(factor * weights[i]);
    row_inputs = {weights_.data(), input<T>(arguments.prior, "prior", 2 * all.rows),
                  input<T>(arguments.positive_weights, "positive_weights", all.rows)};
  }

  // The loss of a band of rows, which begins at row `first` of the matrix. Its scores become score
  // gradients if these are wanted. row_metrics: the row metrics of the band, or null. targets,
  // guide: other scores of the band.
  Result operator()(const Block<T>& b, int64_t first, double* row_metrics,
                    const OtherScores<T>& targets, const OtherScores<T>& guide) const {
    Result result;
    prepare(b, first, row_metrics, targets, guide,
            [&](const Block<T>& prepared) { result = (*this)(prepared, first); });
    return result;
  }

  // The same for scores after the steps before the loss.
  Result operator()(const Block<T>& b, int64_t first) const {
    return fused_pass<T>(b, loss, row_inputs.from_row(first));
  }

  // Takes the steps before the loss, and calls run(block) with what the loss then reads. The other
  // arguments are those of the call operator.
  template <class Run>
  void prepare(Block<T> b, int64_t first, double* row_metrics, const OtherScores<T>& targets,
               const OtherScores<T>& guide, const Run& run) const {
    if (targets.data) b.dense = {targets.data, kDtypeOf<T>, targets.stride, 1};
    if (std::isfinite(options_.exclude_above)) leave_out_by_score(b, options_.exclude_above);
    if (guide.data) leave_out_by_guide(b, guide, options_.guide_margin, options_.guide_relative);
    std::optional<MetricsRecorder<T>> recorder;
    if (row_metrics) recorder.emplace(b, row_metrics);
    // Row metrics describe the scores before they are moved, but the kernels of the loss read them
    // afterwards. Those of a symmetric loss record no metrics. So the metrics are recorded here.
    if (row_metrics && (moves_scores() || loss.symmetric)) {
      record_at_once(b);
      b.row_metrics = nullptr;
    }
    move_scores(b, column_bias_, T(options_.scale), row_shift_ ? row_shift_ + first : nullptr);
    check_targets(b, loss);
    run(b);
  }

  // Whether biases or shifts move the scores.
  bool moves_scores() const { return column_bias_ || row_shift_; }

  // Whether there is a step before the loss, not counting a guide.
  bool changes_scores() const { return moves_scores() || std::isfinite(options_.exclude_above); }

  const Loss loss;
  RowInputs<T> row_inputs;

 private:
  const LossOptions& options_;
  std::vector<T> weights_;
  const T *column_bias_, *row_shift_;
};

}  // namespace
}  // namespace fastsim
