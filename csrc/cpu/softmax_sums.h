// The states of a softmax over all rows, and for a symmetric loss over all columns too. The scores
// come in blocks: once for the sums, and once more to become score gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "column_sums.h"
#include "finish.h"
#include "loss.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {
namespace {

// Adds the weighted loss of a row to the result, and returns the loss of the row.
inline double add_row(const SoftmaxRow& row, const Loss& loss, bool one_positive, double weight,
                      Result& result) {
  const double row_loss = row.loss(row.log_sum_exp(loss.scale), one_positive, loss.normalise);
  result.loss += weight * row_loss;
  if (loss.score_grad && loss.margin != 0) {
    const double probability = row.positive_probability(loss.scale, row.top, row.sum);
    result.scale_score_grad -= loss.margin * weight * (probability - 1);
  }
  return row_loss;
}

// Whether 0 may replace the maximum of every row and column in a symmetric loss of cosines. One
// exponential of a score then serves its row and its column (fastsim/backends/cpu/both_ways.py).
inline bool has_common_top(const Loss& loss) {
  constexpr double kLargest = 56;  // of a logit: LARGEST of both_ways.py
  return loss.symmetric && std::abs(loss.scale) * (1 + std::abs(loss.margin)) <= kLargest;
}

template <class T>
class SoftmaxSums {
 public:
  // all: the whole matrix, whose scores need not be in memory. bands: the number of bands of rows
  // if the sums are relative to the common top 0, otherwise 0.
  SoftmaxSums(const Block<T>& all, const Loss& loss, int64_t bands = 0)
      : all_(all), loss_(loss), common_top_(bands > 0),
        top_(all.rows, common_top_ ? 0.0 : kLeftOut<double>), sum_(all.rows), logits_(all.rows),
        targets_(all.rows, common_top_ ? 1.0 : 0.0), band_sums_(bands * all.columns) {
    if (!loss.symmetric) return;
    column_top_.assign(all.columns, common_top_ ? 0.0 : kLeftOut<double>);
    column_sum_.assign(all.columns, 0.0);
  }

  // Adds the scores of whole rows, on all threads. Row 0 of the block is row `row` of the matrix.
  // Subtracts the margin from the positives' scores. With a common top there is one band. Row
  // metrics are recorded before (RowLosses).
  void add(const Block<T>& b, int64_t row) {
    if (!common_top_) {
      over(b.rows, b.columns, [&](int64_t begin, int64_t end) { add_rows(b, row, {begin, end}); });
      over(b.columns, b.rows, [&](int64_t begin, int64_t end) { add_columns(b, 0, {begin, end}); });
      return;
    }
    over_row_groups<T>(b.rows, b.columns, b.columns, {band_sums_.data(), 1, all_.columns}, [&] {
      return [&](int64_t begin, int64_t end, T* group_sums) {
        add_group(b, row, {begin, end}, group_sums);
      };
    });
  }

  // Adds the scores of a block to the sums of its rows and columns, relative to the common top. The
  // block is part of band number `band`, and begins at this row and column of the matrix. Subtracts
  // the margin from the positives' scores. Columns are added up in groups of rows, as in
  // column_sums.h: a single sum of type T would round everything that is added after a positive.
  void add_both(const Block<T>& b, int64_t row, int64_t column, int64_t band) {
    if (b.row_metrics) kernels().of<T>().record_metrics(b, {}, 0, b.rows);
    const Scratch<T> group_sums(b.columns);
    double* const band_sums = band_sums_.data() + band * all_.columns + column;
    for (int64_t first = 0; first < b.rows; first += kSumRows) {
      std::fill_n(static_cast<T*>(group_sums), b.columns, T(0));
      add_group(b, row, {first, std::min(first + kSumRows, b.rows)}, group_sums);
      for (int64_t j = 0; j < b.columns; ++j) band_sums[j] += double(group_sums[j]);
    }
  }

  // Adds the scores of rows of a block to the states of these rows. Row 0 of the block is row
  // `first` of the matrix. Subtracts the margin from the positives' scores.
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

  // Adds the scores of columns of a block to the states of these columns, after `add_rows` for all
  // rows of the block. Column 0 of the block is column `first` of the matrix.
  void add_columns(const Block<T>& b, int64_t first, Range columns) {
    kernels().of<T>().softmax_forward_columns(b,
                                              {.scale = T(loss_.scale),
                                               .max = column_top_.data() + first,
                                               .sum = column_sum_.data() + first},
                                              columns.begin, columns.end);
  }

  // Returns the loss, once all scores are added, and computes the coefficients for `score_grad`.
  Result finish(const T* weights) {
    for (size_t band = 0; band < band_sums_.size(); band += all_.columns) {
      for (int64_t j = 0; j < all_.columns; ++j) column_sum_[j] += band_sums_[band + j];
    }
    tops_.assign(top_.begin(), top_.end());
    factors_.resize(all_.rows);
    target_weights_.resize(all_.rows);
    return loss_.symmetric ? finish_both_ways(weights) : finish_rows(weights);
  }

  // Turns the scores of whole rows into score gradients, on all threads. row, margin: as below.
  void score_grad(const Block<T>& b, int64_t row, T margin) {
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      score_grad(b, row, 0, margin, {begin, end});
    });
  }

  // Turns the scores of rows of a block into score gradients. The block begins at this row and
  // column of the matrix. margin: what to subtract from the positives' scores.
  void score_grad(const Block<T>& b, int64_t row, int64_t column, T margin, Range rows) {
    if (common_top_) {
      kernels().of<T>().softmax_both_score_grad(b,
                                                {.scale = T(loss_.scale),
                                                 .margin = margin,
                                                 .top = T(0),
                                                 .sum = sum_.data() + row,
                                                 .weight = weights_.data() + row,
                                                 .column_sum = column_sum_.data() + column,
                                                 .column_weight = column_weights_.data() + column,
                                                 .column_factor = column_factors_.data() + column},
                                                rows.begin, rows.end);
      return;
    }
    const bool both = loss_.symmetric;
    kernels().of<T>().softmax_score_grad(
        b,
        {.scale = T(loss_.scale),
         .margin = margin,
         .row_top = tops_.data() + row,
         .row_weight = factors_.data() + row,
         .target_weight = target_weights_.data() + row,
         .column_top = both ? column_tops_.data() + column : nullptr,
         .column_weight = both ? column_factors_.data() + column : nullptr},
        rows.begin, rows.end);
  }

 private:
  // Adds the scores of rows of a block to the sums of these rows and to `column_sums` (columns,).
  void add_group(const Block<T>& b, int64_t first, Range rows, T* column_sums) {
    kernels().of<T>().softmax_both_forward(b,
                                           {.scale = T(loss_.scale),
                                            .margin = T(loss_.margin),
                                            .top = T(0),
                                            .sum = sum_.data() + first,
                                            .positive_logits = logits_.data() + first,
                                            .column_sums = column_sums},
                                           rows.begin, rows.end);
  }

  SoftmaxRow row_state(int64_t i) const { return {top_[i], sum_[i], logits_[i], targets_[i]}; }

  Result finish_rows(const T* weights) {
    Result result;
    for (int64_t i = 0; i < all_.rows; ++i) {
      const SoftmaxRow row = row_state(i);
      const double weight = weights[i];
      add_row(row, loss_, one_positive(all_), weight, result);
      const double logit_weight = row.sum == 0 ? 0 : weight * loss_.scale;
      const double target_weight = row.target_weight(logit_weight, loss_.normalise);
      target_weights_[i] = T(target_weight);
      factors_[i] = T(ratio(target_weight * row.target_sums, row.sum));
    }
    return result;
  }

  Result finish_both_ways(const T* weights) {
    const double scale = loss_.scale, margin = loss_.margin;
    // The weight of a column is half the sum of the weights of the rows whose positive it is.
    std::vector<double>& column_weight = column_weights_;
    column_weight.assign(all_.columns, 0.0);
    weights_.resize(all_.rows);
    for (int64_t i = 0; i < all_.rows; ++i) column_weight[all_.positives[i]] += 0.5 * weights[i];
    Result result;
    for (int64_t i = 0; i < all_.rows; ++i) {
      const int64_t j = all_.positives[i];
      const double weight = weights[i];
      const SoftmaxRow row = row_state(i);
      const SoftmaxRow column{column_top_[j], column_sum_[j], row.target_logits, 1};
      const double lse = 0.5 * (row.log_sum_exp(scale) + column.log_sum_exp(scale));
      result.loss += weight * row.loss(lse, true, false);
      if (margin != 0) {
        const double in_row = row.positive_probability(scale, row.top, row.sum);
        const double in_column = row.positive_probability(scale, column.top, column.sum);
        result.scale_score_grad -=
            margin * (0.5 * weight * in_row + column_weight[j] * in_column - weight);
      }
      weights_[i] = 0.5 * weight * scale;
      factors_[i] = T(ratio(weights_[i], row.sum));
      target_weights_[i] = T(weight * scale);
    }
    column_tops_.assign(column_top_.begin(), column_top_.end());
    column_factors_.resize(all_.columns);
    for (int64_t j = 0; j < all_.columns; ++j) {
      column_weight[j] *= scale;
      column_factors_[j] = T(ratio(column_weight[j], column_sum_[j]));
    }
    return result;
  }

  const Block<T> all_;
  const Loss loss_;
  const bool common_top_;
  std::vector<double> top_, sum_, logits_, targets_, column_top_, column_sum_;
  std::vector<double> band_sums_;  // (bands, columns): column sums of each band
  // Coefficients of the score gradients. A factor is a weight divided by a sum of exponentials.
  std::vector<double> weights_, column_weights_;
  std::vector<T> tops_, factors_, target_weights_, column_tops_, column_factors_;
};

}  // namespace
}  // namespace fastsim
