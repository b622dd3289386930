// What follows from the state of a row: its loss, its coefficients, what else the scale's gradient
// needs. These are the formulas of fastsim/kinds, which every other engine uses, for a loss that is
// one operator call because its time is operator calls.
// tests/backends/cpu/test_one_call.py holds one to the other.
#pragma once

#include <cmath>

#include "epilogue.h"

namespace fastsim {

inline double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// weight / total, 0 where the total is.
FASTSIM_INLINE double ratio(double weight, double total) { return total == 0 ? 0 : weight / total; }

struct SoftmaxRow {
  double top, sum, target_logits, target_sums;

  double log_sum_exp(double scale) const { return scale * top + __builtin_log(sum); }

  double loss(double log_sum_exp, bool one_positive, bool normalise) const {
    if (one_positive) return log_sum_exp - target_logits;
    if (target_sums == 0 && target_logits == 0) return 0;  // whatever its log-sum-exp
    return normalise ? log_sum_exp - target_logits / target_sums
                     : log_sum_exp * target_sums - target_logits;
  }

  // Of the targets in the score gradient, from the weight of the row's logits; that of the
  // exponentials is as many times larger as the targets add up to.
  FASTSIM_INLINE double target_weight(double weight, bool normalise) const {
    return normalise ? ratio(weight, target_sums) : weight;
  }

  // The probability of the row's one positive along a row or column of that maximum and sum.
  double positive_share(double scale, double along_top, double along_sum) const {
    return __builtin_exp(target_logits - scale * along_top) / along_sum;
  }
};

// What distillation keeps of a row: of the scores, and of a teacher's, its targets.
struct DistilledRow {
  double top, sum, teacher_top, teacher_sum, own_logits, teacher_logits;

  double loss(double scale, double teacher_scale) const {
    const double lse = scale * top + std::log(sum);
    const double teacher_lse = teacher_scale * teacher_top + std::log(teacher_sum);
    return lse - teacher_lse + (teacher_logits - own_logits) / teacher_sum;
  }
};

// What a row keeps of its negatives and of its positives: two sums of exponentials relative to
// their maxima; of multi_positive the second pair is the sums of its terms and of their derivatives.
struct Sides {
  double top, sum, positive_top, positive_sum;
};

// The loss of a row, and of a score gradient what it has beside the scores, for dL/dloss of 1:
// the weights of exp(scale (s - top)) of both sides; `by_scale`: what of dL/dscale the scores do not
// show. Tops may be others than those of the state.
struct Finished {
  double loss, weight, positive_weight, by_scale = 0;
};

// softplus(lse of the negatives) / scale + the same of the positives (MultiSimilarity).
inline Finished multi_similarity(const Sides& s, double scale, double positive_scale, double base) {
  const double lse = scale * (s.top - base) + std::log(s.sum);
  const double positive_lse = positive_scale * (s.positive_top + base) + std::log(s.positive_sum);
  return {(s.sum == 0 ? 0 : softplus(lse) / scale) +
              (s.positive_sum == 0 ? 0 : softplus(positive_lse) / positive_scale),
          ratio(sigmoid(lse), s.sum), ratio(sigmoid(positive_lse), s.positive_sum)};
}

// softplus of the sum of both log-sum-exps (Circle).
inline Finished circle(const Sides& s, double scale) {
  const double both =
      scale * (s.top + s.positive_top) + std::log(s.sum) + std::log(s.positive_sum);
  const double weight = scale * sigmoid(both);
  return {softplus(both), ratio(weight, s.sum), ratio(weight, s.positive_sum)};
}

// The positive's logit is `positive_top` (Decoupled).
inline Finished decoupled(const Sides& s, double scale) {
  if (s.sum == 0) return {0 * s.positive_top, 0, 0};
  return {scale * s.top + std::log(s.sum) - s.positive_top, scale / s.sum, scale};
}

// A sum of terms that is finished, and their derivatives (MultiPositive). A NaN of the negatives
// reaches the loss where there is no positive.
inline Finished multi_positive(const Sides& s, double scale) {
  return {s.positive_top + 0 * s.sum, ratio(scale * s.positive_sum, s.sum), s.sum == 0 ? 0 : scale};
}

// Without hardness (Debiased); `prior`: the probability that a negative is a positive; of `count`.
inline Finished debiased(const Sides& s, double scale, double prior, double count) {
  if (s.sum == 0) return {0 * s.positive_sum, 0, 0};
  const double pull = scale * s.positive_top + std::log(s.positive_sum);
  const double both = scale * s.top + std::log(s.sum) + pull;
  const double least = std::log(count) - scale + pull;
  const double one = least + std::log1p(-prior), other = std::log(prior * count);
  const double high = one > other ? one : other;
  const double above = high + std::log1p(std::exp((one > other ? other : one) - high));
  if (both < above) {  // a NaN is not
    const double at_least = sigmoid(least);
    return {softplus(least), 0, ratio(scale * at_least, s.positive_sum), -at_least};
  }
  const double share = 1 / (1 + (1 - prior - prior * count) * std::exp(-both));
  const double loss =
      prior == 0 ? softplus(both) : both - std::log(share) - std::log1p(-prior);
  return {loss, ratio(scale * share, s.sum), ratio(scale * share, s.positive_sum)};
}

}  // namespace fastsim
