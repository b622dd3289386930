// The losses of a block of whole rows, and their score gradients: what `in_one_call` runs between
// its products.
#pragma once

#include <cmath>
#include <vector>

#include "finish.h"
#include "loss.h"
#include "passes.h"
#include "softmax_sums.h"

namespace fastsim {
namespace {

// The inputs of a loss that have entries for each row; null: not given. weights (N,): the weights
// of the row losses. prior (N, 2): the prior probability and the number of negatives, for debiased.
// positive_weights (N,): how many times a positive counts, for sigmoid.
template <class T>
struct RowInputs {
  const T *weights, *prior, *positive_weights;

  RowInputs from_row(int64_t first) const {
    return {weights + first, prior ? prior + 2 * first : nullptr,
            positive_weights ? positive_weights + first : nullptr};
  }
};

// The softmax of each row. `losses` (N,), if not null, gets the losses of the rows.
template <class T>
Result softmax_of_rows(const Block<T>& b, const Loss& loss, const T* weights,
                       T* losses = nullptr) {
  std::vector<double> top(b.rows, kLeftOut<double>), sum(b.rows), logits(b.rows), sums(b.rows);
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    const auto& k = kernels().of<T>();
    if (loss.score_grad) {
      k.softmax_fused(b,
                      {.scale = T(loss.scale),
                       .margin = T(loss.margin),
                       .normalise = loss.normalise,
                       .weights = weights,
                       .max = top.data(),
                       .sum = sum.data(),
                       .target_logits = logits.data(),
                       .target_sums = sums.data()},
                      begin, end);
    } else {
      k.softmax_forward(b,
                        {.scale = T(loss.scale),
                         .margin = T(loss.margin),
                         .max = top.data(),
                         .sum = sum.data(),
                         .target_logits = logits.data(),
                         .target_sums = sums.data()},
                        begin, end);
    }
  });
  Result result;
  for (int64_t i = 0; i < b.rows; ++i) {
    const SoftmaxRow row{top[i], sum[i], logits[i], sums[i]};
    const double row_loss = add_row(row, loss, one_positive(b), weights[i], result);
    if (losses) losses[i] = T(row_loss);
  }
  return result;
}

// Losses of single pairs or of the pairs of one row, which need no state between two passes.
template <class T>
Result row_by_row(const Block<T>& b, const Loss& loss, const RowInputs<T>& inputs) {
  const T* weights = inputs.weights;
  std::vector<double> losses(b.rows), score_grads(b.rows);
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    const auto& k = kernels().of<T>();
    if (loss.kind == Kind::sigmoid) {
      k.sigmoid(b,
                {.scale = T(loss.scale),
                 .bias = T(loss.bias),
                 .weights = loss.score_grad ? weights : nullptr,
                 .losses = losses.data(),
                 .score_grad_sums = score_grads.data(),
                 .positive_weights = inputs.positive_weights},
                begin, end);
    } else if (loss.kind == Kind::squared_error) {
      k.squared_error(b,
                      {.weights = loss.score_grad ? weights : nullptr, .losses = losses.data()},
                      begin, end);
    } else if (loss.kind == Kind::margins) {
      k.margins(b,
                {.ratio = T(loss.positive_scale),
                 .weights = loss.score_grad ? weights : nullptr,
                 .losses = losses.data()},
                begin, end);
    } else {
      k.triplet(b,
                {.semi_hard = loss.kind == Kind::semi_hard_triplet,
                 .margin = T(loss.margin),
                 .weights = weights,
                 .losses = losses.data()},
                begin, end);
    }
  });
  Result result;
  for (int64_t i = 0; i < b.rows; ++i) {
    result.loss += weights[i] * losses[i];
    result.bias_score_grad += weights[i] * score_grads[i];
  }
  return result;
}

// The loss of a row of a contrastive loss and the coefficients of its score gradients. prior: the
// prior probability and the number of negatives, for debiased; null: both are 0, and N of
// fastsim/kinds/contrast.py then has no minimum.
template <class T>
RowResult contrast_row(const ContrastState& state, const Loss& loss, const T* prior) {
  switch (loss.kind) {
    case Kind::decoupled:
      return decoupled(state, loss.scale);
    case Kind::multi_positive:
      return multi_positive(state, loss.scale);
    case Kind::circle:
      return circle(state, loss.scale);
    case Kind::debiased:
      return debiased(state, loss.scale, prior ? prior[0] : 0, prior ? prior[1] : 0);
    default:
      return multi_similarity(state, loss.scale, loss.positive_scale, loss.base);
  }
}

// Losses that contrast the negatives of a row with its positives. The three steps are called in
// this order: `forward`, `finish`, `score_grad`.
template <class T>
class ContrastLosses {
 public:
  ContrastLosses(const Block<T>& b, const Loss& loss)
      : b_(b), loss_(loss), scale_(T(loss.scale)), margin_(T(loss.margin)),
        positive_scale_(T(loss.kind == Kind::debiased ? loss.scale : loss.positive_scale)),
        max_(b.rows, kLeftOut<double>), sum_(b.rows), positive_max_(max_), positive_sum_(b.rows),
        top_(b.rows), weight_(b.rows), positive_top_(b.rows), positive_weight_(b.rows) {}

  // Computes the states (ContrastState) of the rows [begin, end).
  void forward(int64_t begin, int64_t end) {
    const auto& k = kernels().of<T>();
    double *const max = max_.data(), *const sum = sum_.data();
    double *const positive_max = positive_max_.data(), *const positive_sum = positive_sum_.data();
    switch (loss_.kind) {
      case Kind::decoupled:
        return k.decoupled_forward(b_, {scale_, max, sum, positive_max}, begin, end);
      case Kind::multi_positive:
        return k.multi_positive_forward(b_, {scale_, false, max, sum, positive_max, positive_sum},
                                        begin, end);
      case Kind::circle:
        return k.circle_forward(b_, {scale_, margin_, max, sum, positive_max, positive_sum}, begin,
                                end);
      default:
        return k.multi_similarity_forward(
            b_, {scale_, positive_scale_, max, sum, positive_max, positive_sum}, begin, end);
    }
  }

  // Returns the loss of all rows, and computes the coefficients of their score gradients. prior: as
  // in RowInputs.
  Result finish(const T* weights, const T* prior) {
    Result result;
    for (int64_t i = 0; i < b_.rows; ++i) {
      const ContrastState state{max_[i], sum_[i], positive_max_[i], positive_sum_[i]};
      const RowResult row = contrast_row(state, loss_, prior ? prior + 2 * i : nullptr);
      const double weight = weights[i];
      result.loss += weight * row.loss;
      result.scale_score_grad += weight * row.scale_grad;
      top_[i] = T(max_[i]);
      weight_[i] = T(weight * row.weight);
      // multi_positive takes the logarithm of the negatives' sum in this place.
      const bool takes_log_sum = loss_.kind == Kind::multi_positive;
      positive_top_[i] = T(takes_log_sum ? std::log(sum_[i]) : positive_max_[i]);
      positive_weight_[i] = T(weight * row.positive_weight);
    }
    return result;
  }

  // Turns the scores of the rows [begin, end) into score gradients.
  void score_grad(int64_t begin, int64_t end) const {
    const auto& k = kernels().of<T>();
    const T *const top = top_.data(), *const weight = weight_.data();
    const T *const positive_top = positive_top_.data();
    const T* const positive_weight = positive_weight_.data();
    switch (loss_.kind) {
      case Kind::decoupled:
        return k.decoupled_score_grad(b_, {scale_, top, weight, positive_weight}, begin, end);
      case Kind::multi_positive:
        return k.multi_positive_score_grad(
            b_, {scale_, top, weight, positive_top, positive_weight}, begin, end);
      case Kind::circle:
        return k.circle_score_grad(
            b_, {scale_, margin_, top, weight, positive_top, positive_weight}, begin, end);
      default:
        return k.multi_similarity_score_grad(
            b_, {scale_, positive_scale_, top, weight, positive_top, positive_weight}, begin, end);
    }
  }

 private:
  const Block<T>& b_;
  const Loss& loss_;
  const T scale_, margin_, positive_scale_;
  std::vector<double> max_, sum_, positive_max_, positive_sum_;     // the states
  std::vector<T> top_, weight_, positive_top_, positive_weight_;  // the coefficients
};

template <class T>
Result contrast_losses(const Block<T>& b, const Loss& loss, const RowInputs<T>& inputs) {
  ContrastLosses<T> losses(b, loss);
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) { losses.forward(begin, end); });
  const Result result = losses.finish(inputs.weights, inputs.prior);
  if (loss.score_grad) {
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) { losses.score_grad(begin, end); });
  }
  return result;
}

// Distillation: the softmax of a row compared with the softmax of its targets, a teacher's scores.
template <class T>
Result distillation_losses(const Block<T>& b, const Loss& loss, const T* weights) {
  const T scale = T(loss.scale), teacher_scale = T(loss.positive_scale);
  std::vector<double> top(b.rows, kLeftOut<double>), sum(b.rows), own_logits(b.rows);
  std::vector<double> teacher_top(top), teacher_sum(b.rows), teacher_logits(b.rows);
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().distillation_forward(b,
                                           {.scale = scale,
                                            .positive_scale = teacher_scale,
                                            .max = top.data(),
                                            .sum = sum.data(),
                                            .teacher_max = teacher_top.data(),
                                            .teacher_sum = teacher_sum.data(),
                                            .own_logits = own_logits.data(),
                                            .teacher_logits = teacher_logits.data()},
                                           begin, end);
  });
  Result result;
  std::vector<T> tops(b.rows), factors(b.rows), teacher_tops(b.rows), teacher_factors(b.rows);
  for (int64_t i = 0; i < b.rows; ++i) {
    const double weight = weights[i] * loss.scale;
    const DistilledRow row{top[i],         sum[i],        teacher_top[i],
                           teacher_sum[i], own_logits[i], teacher_logits[i]};
    result.loss += weights[i] * row.loss(loss.scale, loss.positive_scale);
    tops[i] = T(top[i]);
    factors[i] = T(ratio(weight, sum[i]));
    teacher_tops[i] = T(teacher_top[i]);
    teacher_factors[i] = T(ratio(weight, teacher_sum[i]));
  }
  if (!loss.score_grad) return result;
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().distillation_score_grad(b,
                                              {.scale = scale,
                                               .positive_scale = teacher_scale,
                                               .top = tops.data(),
                                               .weight = factors.data(),
                                               .teacher_top = teacher_tops.data(),
                                               .teacher_weight = teacher_factors.data()},
                                              begin, end);
  });
  return result;
}

// The losses of a block, which is not that of a symmetric loss. With loss.score_grad its scores
// become score gradients.
template <class T>
Result fused_pass(const Block<T>& b, const Loss& loss, const RowInputs<T>& inputs) {
  const T* weights = inputs.weights;
  switch (loss.kind) {
    case Kind::softmax:
      return softmax_of_rows(b, loss, weights);
    case Kind::sigmoid:
    case Kind::squared_error:
    case Kind::hard_triplet:
    case Kind::semi_hard_triplet:
    case Kind::margins:
      return row_by_row(b, loss, inputs);
    case Kind::distillation:
      return distillation_losses(b, loss, weights);
    default:
      return contrast_losses(b, loss, inputs);
  }
}

}  // namespace
}  // namespace fastsim
