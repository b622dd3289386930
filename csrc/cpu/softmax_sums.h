// The softmax of all rows, and of a symmetric loss of all columns too, of scores that come in
// blocks and come again for their gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "finish.h"
#include "loss.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {
namespace {

// Adds the loss of a row to the result, and returns it.
inline double add_row(const SoftmaxRow& row, const Loss& loss, bool one_positive, double weight,
                      Result& result) {
  const double of_row = row.loss(row.log_sum_exp(loss.scale), one_positive, loss.normalise);
  result.loss += weight * of_row;
  if (loss.score_grad && loss.margin != 0) {
    const double share = row.positive_share(loss.scale, row.top, row.sum);
    result.scale_score_grad -= loss.margin * weight * (share - 1);
  }
  return of_row;
}

// Whether 0 may stand for the maximum of every row and column of a symmetric loss of cosines, so that
// one exponential of a score does for its row and its column (fastsim/backends/cpu/both_ways.py).
inline bool has_common_top(const Loss& loss) {
  constexpr double kLargest = 56;  // logits
  return loss.symmetric && std::abs(loss.scale) * (1 + std::abs(loss.margin)) <= kLargest;
}

template <class T>
class SoftmaxSums {
 public:
  // all: the whole matrix, whose scores need not be in memory. bands: of how many bands of rows the
  // scores have a common top; 0 for none.
  SoftmaxSums(const Block<T>& all, const Loss& loss, int64_t bands = 0)
      : all_(all), loss_(loss), common_(bands > 0),
        top_(all.rows, common_ ? 0.0 : kLeftOut<double>), sum_(all.rows), logits_(all.rows),
        targets_(all.rows, common_ ? 1.0 : 0.0), of_bands_(bands * all.columns) {
    if (!loss.symmetric) return;
    column_top_.assign(all.columns, common_ ? 0.0 : kLeftOut<double>);
    column_sum_.assign(all.columns, 0.0);
  }

  // Adds the scores of a block of a band, which begins at this row and column of the matrix, with a
  // common top. Takes the margin from them. Columns are added up a group of rows at a time, as in
  // column_sums.h: what one sum in T has of a positive would round all that comes after it.
  void add_both(const Block<T>& b, int64_t row, int64_t column, int64_t band) {
    const auto& k = kernels().of<T>();
    if (b.seen) k.observe(b, {}, 0, b.rows);
    const Scratch<T> of_group(b.columns);
    double* const of_band = of_bands_.data() + band * all_.columns + column;
    for (int64_t first = 0; first < b.rows; first += kSumRows) {
      std::fill_n(static_cast<T*>(of_group), b.columns, T(0));
      k.softmax_both_forward(b,
                             {.scale = T(loss_.scale),
                              .margin = T(loss_.margin),
                              .top = T(0),
                              .sum = sum_.data() + row,
                              .positive_logits = logits_.data() + row,
                              .column_sums = of_group},
                             first, std::min(first + kSumRows, b.rows));
      for (int64_t j = 0; j < b.columns; ++j) of_band[j] += double(of_group[j]);
    }
  }

  // Adds the scores of rows of a block; its first row is row `first` of the matrix. Takes the
  // margin from its scores.
  void add_rows(const Block<T>& b, int64_t first, Range rows) {
    kernels().of<T>().softmax_forward(b,
                                      {.scale = T(loss_.scale),
                                       .margin = T(loss_.margin),
                                       .max = top_.data() + first,
                                       .sum = sum_.data() + first,
                                       .target_logits = logits_.data() + first,
                                       .target_sums = targets_.data() + first},
                                      rows.begin, rows.end);
  }

  // After its rows: those of its columns.
  void add_columns(const Block<T>& b, int64_t first, Range columns) {
    kernels().of<T>().softmax_forward_columns(b,
                                              {.scale = T(loss_.scale),
                                               .max = column_top_.data() + first,
                                               .sum = column_sum_.data() + first},
                                              columns.begin, columns.end);
  }

  // The loss, once all is added; what the score gradients are made of.
  Result finish(const T* weights) {
    for (size_t band = 0; band < of_bands_.size(); band += all_.columns) {
      for (int64_t j = 0; j < all_.columns; ++j) column_sum_[j] += of_bands_[band + j];
    }
    tops_.assign(top_.begin(), top_.end());
    shares_.resize(all_.rows);
    target_weights_.resize(all_.rows);
    return loss_.symmetric ? finish_both_ways(weights) : finish_rows(weights);
  }

  // Makes score gradients of rows of a block, which begins at this row and column of the matrix.
  void score_grad(const Block<T>& b, int64_t row, int64_t column, T margin, Range rows) {
    if (common_) {
      kernels().of<T>().softmax_both_score_grad(b,
                                                {.scale = T(loss_.scale),
                                                 .margin = margin,
                                                 .top = T(0),
                                                 .sum = sum_.data() + row,
                                                 .weight = weights_.data() + row,
                                                 .column_sum = column_sum_.data() + column,
                                                 .column_weight = column_weights_.data() + column,
                                                 .column_factor = column_shares_.data() + column},
                                                rows.begin, rows.end);
      return;
    }
    const bool both = loss_.symmetric;
    kernels().of<T>().softmax_score_grad(
        b,
        {.scale = T(loss_.scale),
         .margin = margin,
         .row_top = tops_.data() + row,
         .row_weight = shares_.data() + row,
         .target_weight = target_weights_.data() + row,
         .column_top = both ? column_tops_.data() + column : nullptr,
         .column_weight = both ? column_shares_.data() + column : nullptr},
        rows.begin, rows.end);
  }

 private:
  SoftmaxRow row(int64_t i) const { return {top_[i], sum_[i], logits_[i], targets_[i]}; }

  Result finish_rows(const T* weights) {
    Result result;
    for (int64_t i = 0; i < all_.rows; ++i) {
      const SoftmaxRow of = row(i);
      const double weight = weights[i];
      add_row(of, loss_, one_positive(all_), weight, result);
      const double of_logits = of.sum == 0 ? 0 : weight * loss_.scale;
      const double of_targets = of.target_weight(of_logits, loss_.normalise);
      target_weights_[i] = T(of_targets);
      shares_[i] = T(ratio(of_targets * of.target_sums, of.sum));
    }
    return result;
  }

  Result finish_both_ways(const T* weights) {
    const double scale = loss_.scale, margin = loss_.margin;
    // Half of those of the rows whose positive it is.
    std::vector<double>& column_weight = column_weights_;
    column_weight.assign(all_.columns, 0.0);
    weights_.resize(all_.rows);
    for (int64_t i = 0; i < all_.rows; ++i) column_weight[all_.positives[i]] += 0.5 * weights[i];
    Result result;
    for (int64_t i = 0; i < all_.rows; ++i) {
      const int64_t j = all_.positives[i];
      const double weight = weights[i];
      const SoftmaxRow of = row(i);
      const SoftmaxRow column{column_top_[j], column_sum_[j], of.target_logits, 1};
      const double lse = 0.5 * (of.log_sum_exp(scale) + column.log_sum_exp(scale));
      result.loss += weight * of.loss(lse, true, false);
      if (margin != 0) {
        const double along_row = of.positive_share(scale, of.top, of.sum);
        const double along_column = of.positive_share(scale, column.top, column.sum);
        result.scale_score_grad -=
            margin * (0.5 * weight * along_row + column_weight[j] * along_column - weight);
      }
      weights_[i] = 0.5 * weight * scale;
      shares_[i] = T(ratio(weights_[i], of.sum));
      target_weights_[i] = T(weight * scale);
    }
    column_tops_.assign(column_top_.begin(), column_top_.end());
    column_shares_.resize(all_.columns);
    for (int64_t j = 0; j < all_.columns; ++j) {
      column_weight[j] *= scale;
      column_shares_[j] = T(ratio(column_weight[j], column_sum_[j]));
    }
    return result;
  }

  const Block<T> all_;
  const Loss loss_;
  const bool common_;
  std::vector<double> top_, sum_, logits_, targets_, column_top_, column_sum_;
  std::vector<double> of_bands_;  // (bands, columns): sums of columns
  std::vector<double> weights_, column_weights_;
  std::vector<T> tops_, shares_, target_weights_, column_tops_, column_shares_;
};

}  // namespace
}  // namespace fastsim
