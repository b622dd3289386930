// What follows from the state of a softmax, a row at a time: its loss, its coefficients, the gradient
// of its margin. These are the formulas of fastsim/kinds/softmax.py, which every other engine uses,
// for a loss that is one operator call because its time is operator calls.
// tests/backends/cpu/test_whole.py holds one to the other.
#pragma once

#include "epilogue.h"

namespace fastsim {

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

}  // namespace fastsim
