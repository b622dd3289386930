// Elementwise losses: losses[row] += sum_j loss, and with weights the score gradient in place.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Sums of a chunk in lanes. What the losses lack are logarithms of 1 + e with e in [0, 1]: `product`
// is the product of these, less 1, which keeps the digits of small e; a lane takes kChunk / kSums.
template <class T>
struct LaneSums {
  static constexpr int64_t kSums = 64, kWide = 8;
  T losses[kSums] = {}, score_grads[kSums] = {}, product[kSums] = {};

  void add_to(double& loss, double& score_grad) const {
    double wide_losses[kWide] = {}, wide_score_grads[kWide] = {}, wide_product[kWide] = {};
    for (int64_t at = 0; at < kSums; at += kWide) {
#pragma omp simd
      for (int64_t l = 0; l < kWide; ++l) {
        wide_losses[l] += losses[at + l];
        wide_score_grads[l] += score_grads[at + l];
        wide_product[l] = both(wide_product[l], product[at + l]);
      }
    }
    double half[2] = {};  // a product of 2^1024 would be infinite
    for (int64_t l = 0; l < kWide; ++l) {
      loss += wide_losses[l];
      score_grad += wide_score_grads[l];
      half[l % 2] = both(half[l % 2], wide_product[l]);
    }
    loss += __builtin_log1p(half[0]) + __builtin_log1p(half[1]);
  }

  static double both(double a, double b) { return fused(a, b, a + b); }  // (1 + a) (1 + b) - 1
};

// Up to kSums scores, one a lane; everything by value, so that no store into `s` can be thought to
// change it. weighed: pairs with a target above 0 count `positive_weight`; the logarithms of these
// are not in the product (`logarithms_of_positives`).
template <bool with_score_grad, bool weighed, class T, class Epilogue>
FASTSIM_INLINE void elementwise_lanes(T* s, const T* targets, int64_t count, Epilogue epilogue,
                                      T weight, T positive_weight, LaneSums<T>& sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    T e, score_grad;
    T loss = epilogue.without_logarithm(s[j], targets[j], e, score_grad);
    if constexpr (weighed) {
      const bool positive = targets[j] > T(0);
      const T counts = positive ? positive_weight : T(1);
      loss *= counts;
      score_grad *= counts;
      e = positive ? T(0) : e;
    }
    sums.losses[j] += loss;
    sums.score_grads[j] += score_grad;
    sums.product[j] = fused(sums.product[j], e, sums.product[j] + e);
    if constexpr (with_score_grad) s[j] = weight * score_grad;
  }
}

// The sum of log(1 + e) over pairs with a target above 0, few of all.
template <class T, class Epilogue>
double logarithms_of_positives(const T* s, const T* targets, int64_t count, Epilogue epilogue) {
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (!(targets[j] > T(0))) continue;
    T e, score_grad;
    epilogue.without_logarithm(s[j], targets[j], e, score_grad);
    sum += __builtin_log1p(double(e));
  }
  return sum;
}

template <bool with_score_grad, bool weighed, class T, class Epilogue>
void elementwise_chunk(T* s, int64_t next, const T* targets, int64_t count, Epilogue epilogue, T weight,
                       T positive_weight, double& losses, double& score_grads) {
  constexpr int64_t kSums = LaneSums<T>::kSums;
  static_assert(kChunk / kSums * kSums == kChunk && kChunk <= 1024);
  if constexpr (weighed) {  // before the scores become their gradients
    losses += positive_weight * logarithms_of_positives(s, targets, count, epilogue);
  }
  LaneSums<T> sums;
  const auto lanes = elementwise_lanes<with_score_grad, weighed, T, Epilogue>;
  int64_t at = 0;
  for (; at + kSums <= count; at += kSums) {  // of a length known here, or each began anew
    ask_for(s + at, next, kSums);
    lanes(s + at, targets + at, kSums, epilogue, weight, positive_weight, sums);
  }
  lanes(s + at, targets + at, count - at, epilogue, weight, positive_weight, sums);
  sums.add_to(losses, score_grads);
}

template <bool with_score_grad, bool weighed, class T, class Epilogue>
void elementwise_rows(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                      const T* positive_weights, double* losses, double* score_grad_sums,
                      int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_score_grad ? weights[row] * factor : T(0);
    const T positive_weight = weighed ? positive_weights[row] : T(1);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    double loss = 0, score_grad = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T memory[kChunk], *chunk = b.scores + row * b.stride + at;
      const T* targets = read_targets(b, row, at, n, memory);
      elementwise_chunk<with_score_grad, weighed>(chunk, next, targets, n, epilogue, weight,
                                                  positive_weight, loss, score_grad);
    });
    losses[row] += loss;
    if (score_grad_sums) score_grad_sums[row] += score_grad;
  }
}

template <bool weighed, class T, class Epilogue>
void elementwise(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                 const T* positive_weights, double* losses, double* score_grad_sums, int64_t begin,
                 int64_t end) {
  const auto run = weights ? elementwise_rows<true, weighed, T, Epilogue>
                           : elementwise_rows<false, weighed, T, Epilogue>;
  run(b, epilogue, factor, weights, positive_weights, losses, score_grad_sums, begin, end);
}

template <class T>
void sigmoid(const Block<T>& b, SigmoidRows<T> args, int64_t begin, int64_t end) {
  const auto run = args.positive_weights ? elementwise<true, T, Sigmoid<T>>
                                         : elementwise<false, T, Sigmoid<T>>;
  run(b, Sigmoid<T>{args.scale, args.bias}, args.scale, args.weights, args.positive_weights,
      args.losses, args.score_grad_sums, begin, end);
}

template <class T>
void squared_error(const Block<T>& b, SquaredErrorRows<T> args, int64_t begin, int64_t end) {
  elementwise<false>(b, SquaredError<T>{}, T(1), args.weights, static_cast<const T*>(nullptr),
                     args.losses, static_cast<double*>(nullptr), begin, end);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
