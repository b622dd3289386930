// What follows from the state of a row: its loss, the coefficients of its score gradients, and what
// else the gradient of the scale needs. These are the formulas of fastsim/kinds, which all other
// engines use, for losses in one operator call: operator calls would be most of their time.
// tests/backends/cpu/test_one_call.py compares both.
#pragma once

#include <cmath>

#include "epilogue.h"

namespace fastsim {

inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// weight / total, or 0 if the total is 0.
FASTSIM_INLINE double ratio(double weight, double total) { return total == 0 ? 0 : weight / total; }

// The state of a row of a softmax: the maximum score, the sum of exponentials relative to it,
// sum_j t z and sum_j t.
struct SoftmaxRow {
  double top, sum, target_logits, target_sums;

  double log_sum_exp(double scale) const { return scale * top + __builtin_log(sum); }

  double loss(double log_sum_exp, bool one_positive, bool normalise) const {
    if (one_positive) return log_sum_exp - target_logits;
    if (target_sums == 0 && target_logits == 0) return 0;  // for any log_sum_exp
    return normalise ? log_sum_exp - target_logits / target_sums
                     : log_sum_exp * target_sums - target_logits;
  }

  // The weight of the targets in the score gradient, given the weight of the row's logits. The
  // weight of the exponentials is target_sums times as large.
  FASTSIM_INLINE double target_weight(double weight, bool normalise) const {
    return normalise ? ratio(weight, target_sums) : weight;
  }

  // The probability of the row's one positive in the softmax of a row or column, given the maximum
  // of that softmax and its sum of exponentials.
  double positive_probability(double scale, double softmax_top, double softmax_sum) const {
    return __builtin_exp(target_logits - scale * softmax_top) / softmax_sum;
  }
};

// The state of a row of distillation: a softmax of its scores, and one of its targets, the scores
// of a teacher. own_logits, teacher_logits: the sums of their logits, weighted by the teacher's
// exponentials.
struct DistilledRow {
  double top, sum, teacher_top, teacher_sum, own_logits, teacher_logits;

  double loss(double scale, double teacher_scale) const {
    const double lse = scale * top + std::log(sum);
    const double teacher_lse = teacher_scale * teacher_top + std::log(teacher_sum);
    return lse - teacher_lse + (teacher_logits - own_logits) / teacher_sum;
  }
};

// The state of a row of a loss that contrasts its negatives with its positives: the maximum and the
// sum of exponentials of each. In multi_positive, positive_top and positive_sum are instead the sum
// of the terms of the positives and the sum of their derivatives.
struct ContrastState {
  double top, sum, positive_top, positive_sum;
};

// The loss of a row and the coefficients of its score gradients, for dL/dloss = 1. weight and
// positive_weight: the weights of exp(scale (s - top)) for the negatives and for the positives,
// where top may differ from that of the state. scale_grad: the part of dL/dscale that does not
// follow from the score gradients.
struct RowResult {
  double loss, weight, positive_weight, scale_grad = 0;
};

// MultiSimilarity: softplus(lse of the negatives) / scale, plus the same of the positives with
// their scale.
inline RowResult multi_similarity(const ContrastState& s, double scale, double positive_scale,
                                  double base) {
  const double lse = scale * (s.top - base) + std::log(s.sum);
  const double positive_lse = positive_scale * (s.positive_top + base) + std::log(s.positive_sum);
  return {(s.sum == 0 ? 0 : softplus(lse) / scale) +
              (s.positive_sum == 0 ? 0 : softplus(positive_lse) / positive_scale),
          ratio(sigmoid(lse), s.sum), ratio(sigmoid(positive_lse), s.positive_sum)};
}

// Circle: softplus of the sum of both log-sum-exps.
inline RowResult circle(const ContrastState& s, double scale) {
  const double lse_sum =
      scale * (s.top + s.positive_top) + std::log(s.sum) + std::log(s.positive_sum);
  const double weight = scale * sigmoid(lse_sum);
  return {softplus(lse_sum), ratio(weight, s.sum), ratio(weight, s.positive_sum)};
}

// Decoupled: lse of the negatives minus the logit of the positive, which is `positive_top`. The sum
// is 0 if all negatives have the score -Inf.
inline RowResult decoupled(const ContrastState& s, double scale) {
  return {scale * s.top + std::log(s.sum) - s.positive_top, scale / s.sum, scale};
}

// MultiPositive: the state has the sum of the terms already. 0 * s.sum passes a NaN of the
// negatives to the loss of a row without positives.
inline RowResult multi_positive(const ContrastState& s, double scale) {
  return {s.positive_top + 0 * s.sum, ratio(scale * s.positive_sum, s.sum), s.sum == 0 ? 0 : scale};
}

// Debiased without hardness. prior: the probability that a negative is in fact a positive. count:
// the number of negatives.
inline RowResult debiased(const ContrastState& s, double scale, double prior, double count) {
  if (s.sum == 0) return {0 * s.positive_sum, 0, 0};
  const double pull = scale * s.positive_top + std::log(s.positive_sum);
  const double both = scale * s.top + std::log(s.sum) + pull;
  const double least = std::log(count) - scale + pull;
  // limit = log(e^a + e^b). N of fastsim/kinds/contrast.py is at its minimum if `both` is below it.
  const double a = least + std::log1p(-prior), b = std::log(prior * count);
  const double high = a > b ? a : b;
  const double limit = high + std::log1p(std::exp((a > b ? b : a) - high));
  if (both < limit) {  // false for NaN, which then reaches the loss
    const double sigma = sigmoid(least);
    return {softplus(least), 0, ratio(scale * sigma, s.positive_sum), -sigma};
  }
  const double share = 1 / (1 + (1 - prior - prior * count) * std::exp(-both));
  const double loss =
      prior == 0 ? softplus(both) : both - std::log(share) - std::log1p(-prior);
  return {loss, ratio(scale * share, s.sum), ratio(scale * share, s.positive_sum)};
}

}  // namespace fastsim
