// The loss of whole rows of scores: what leaves pairs out or moves scores before the loss looks at
// them, and the loss. Of rows by themselves, or of all rows at once.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "block_losses.h"
#include "observing.h"
#include "totals.h"
#include "whole_arguments.h"

namespace fastsim {
namespace {

// Scores of a band of rows with all columns, made of others than the rows of the loss; null: none.
template <class T>
struct OtherScores {
  const T* data = nullptr;
  int64_t stride = 0;
};

template <class T>
void leave_out_above(const Block<T>& b, const T* guide, int64_t stride, const T* thresholds) {
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().leave_out_above(b, guide, stride, thresholds, begin, end);
  });
}

// Pairs whose score is more than `margin` above that of the row's positive.
template <class T>
void leave_out_by_score(const Block<T>& b, double margin) {
  STD_TORCH_CHECK(b.positives, "fastsim: exclude_above: wanted positives");
  std::vector<T> thresholds(b.rows);
  for (int64_t i = 0; i < b.rows; ++i) {
    thresholds[i] = b.scores[i * b.stride + b.positives[i]] + T(margin);
  }
  leave_out_above(b, b.scores, b.stride, thresholds.data());
}

// Pairs but for a row's positive whose cosine by the guide is more than the margin above the
// positive's, or, `relative`, than the margin times its size.
template <class T>
void leave_out_by_guide(const Block<T>& b, const OtherScores<T>& guide, double margin, bool relative) {
  STD_TORCH_CHECK(b.positives, "fastsim: guide_rows: wanted positives");
  std::vector<T> kept(b.rows), thresholds(b.rows);
  const auto positive = [&](int64_t i) -> T& { return b.scores[i * b.stride + b.positives[i]]; };
  for (int64_t i = 0; i < b.rows; ++i) {
    kept[i] = positive(i);
    const T cosine = guide.data[i * guide.stride + b.positives[i]];
    thresholds[i] = cosine - (relative ? std::abs(cosine) : T(1)) * T(margin);
  }
  leave_out_above(b, guide.data, guide.stride, thresholds.data());
  for (int64_t i = 0; i < b.rows; ++i) positive(i) = kept[i];
}

// Scores with what is added to the logits of a column and taken from the scores of a row.
template <class T>
void move_scores(const Block<T>& b, const T* column_bias, T scale, const T* row_shift) {
  if (!column_bias && !row_shift) return;
  std::vector<T> biases(b.columns);
  for (int64_t j = 0; column_bias && j < b.columns; ++j) {
    STD_TORCH_CHECK(std::isfinite(column_bias[j]), "fastsim: column_bias: wanted finite ones");
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

// The losses of rows of whole scores.
template <class T>
class RowLosses {
 public:
  // all: the matrix, whose scores need not be in memory; factor: of all losses.
  RowLosses(const Given& given, const Block<T>& all, double factor, bool score_grad)
      : loss{.kind = given.kind,
             .scale = given.of.scale,
             .bias = given.of.bias,
             .margin = given.of.margin,
             .positive_scale = given.of.positive_scale,
             .base = given.of.base,
             .normalise = given.of.normalise,
             .symmetric = given.of.symmetric,
             .score_grad = score_grad},
        of_(given.of), weights_(all.rows, T(factor * given.of.weight)),
        column_bias_(input<T>(given.column_bias, "column_bias", all.columns)),
        row_shift_(input<T>(given.row_shift, "row_shift", all.rows)) {
    const T* const own = input<T>(given.weights, "weights", all.rows);
    for (int64_t i = 0; own && i < all.rows; ++i) weights_[i] = T(factor * own[i]);
    of_rows = {weights_.data(), input<T>(given.prior, "prior", 2 * all.rows),
               input<T>(given.positive_weights, "positive_weights", all.rows)};
  }

  // The loss of a band of rows, of which `first` is the first of all; its scores become its score
  // gradients where these are wanted. seen: the numbers of the band's rows, or null; targets, guide:
  // those of the band's rows, whose data is null where there are none.
  Result operator()(Block<T> b, int64_t first, double* seen, const OtherScores<T>& targets,
                    const OtherScores<T>& guide) const {
    if (targets.data) b.dense = {targets.data, kDtypeOf<T>, targets.stride, 1};
    if (std::isfinite(of_.exclude_above)) leave_out_by_score(b, of_.exclude_above);
    if (guide.data) leave_out_by_guide(b, guide, of_.guide_margin, of_.guide_relative);
    std::optional<Observing<T>> observing;
    if (seen) observing.emplace(b, seen);
    if (seen && (column_bias_ || row_shift_)) {  // which move the scores before the loss looks
      over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
        kernels().of<T>().observe(b, {}, begin, end);
      });
      b.seen = nullptr;
    }
    move_scores(b, column_bias_, T(of_.scale), row_shift_ ? row_shift_ + first : nullptr);
    check_targets(b, loss);
    return fused_pass<T>(b, loss, of_rows.from_row(first));
  }

  // Whether more than the loss decides what becomes of scores.
  bool moves() const {
    return column_bias_ || row_shift_ || std::isfinite(of_.exclude_above);
  }

  const Loss loss;
  OfRows<T> of_rows;

 private:
  const Numbers& of_;
  std::vector<T> weights_;
  const T *column_bias_, *row_shift_;
};

}  // namespace
}  // namespace fastsim
