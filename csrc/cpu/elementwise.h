// Elementwise losses, those of single pairs: losses[row] += sum_j loss. If weights are given, the
// scores become score gradients.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The sums of a chunk, one per lane. `losses` lacks the logarithms of 1 + e, with e in [0, 1].
// `product` is the product of these 1 + e, minus 1, which keeps the digits of small e. A lane takes
// kChunk / kSums factors.
template <class T>
struct LaneSums {
  static constexpr int64_t kSums = 64, kWide = 8;
  T losses[kSums] = {}, score_grads[kSums] = {}, product[kSums] = {};

  // Adds the sums of all lanes to `loss` and `score_grad`.
  void add_to(double& loss, double& score_grad) const {
    double wide_losses[kWide] = {}, wide_score_grads[kWide] = {}, wide_product[kWide] = {};
    for (int64_t at = 0; at < kSums; at += kWide) {
#pragma omp simd
      for (int64_t l = 0; l < kWide; ++l) {
        wide_losses[l] += losses[at + l];
        wide_score_grads[l] += score_grads[at + l];
        wide_product[l] = join(wide_product[l], product[at + l]);
      }
    }
    double halves[2] = {};  // in one, the product could reach 2^1024, which is infinite
    for (int64_t l = 0; l < kWide; ++l) {
      loss += wide_losses[l];
      score_grad += wide_score_grads[l];
      halves[l % 2] = join(halves[l % 2], wide_product[l]);
    }
    loss += __builtin_log1p(halves[0]) + __builtin_log1p(halves[1]);
  }

  // (1 + a) (1 + b) - 1.
  static double join(double a, double b) { return fused(a, b, a + b); }
};

// Adds up to kSums scores to the sums, one per lane. Numbers are passed by value, so that compilers
// need not assume that a store to `s` changes them. with_score_grad: the scores become `weight`
// times their score gradients. weighted: a pair with a target above 0 counts `positive_weight`
// times, and its logarithm is not in the product (`logarithms_of_positives`). negative: all targets
// are -1, and `targets` is not read.
template <bool with_score_grad, bool weighted, bool negative, class T, class Epilogue>
FASTSIM_INLINE void elementwise_lanes(T* s, const T* targets, int64_t count, Epilogue epilogue,
                                      T weight, T positive_weight, LaneSums<T>& sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    T e, score_grad, loss;
    if constexpr (negative) {
      loss = epilogue.of_negative(s[j], e, score_grad);
    } else {
      loss = epilogue.without_logarithm(s[j], targets[j], e, score_grad);
    }
    if constexpr (weighted) {
      const bool positive = targets[j] > T(0);
      const T pair_weight = positive ? positive_weight : T(1);
      loss *= pair_weight;
      score_grad *= pair_weight;
      e = positive ? T(0) : e;
    }
    sums.losses[j] += loss;
    sums.score_grads[j] += score_grad;
    sums.product[j] = fused(sums.product[j], e, sums.product[j] + e);
    if constexpr (with_score_grad) s[j] = weight * score_grad;
  }
}

// The sum of log(1 + e) over the pairs with a target above 0, which are few.
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

// Adds the losses and the score gradients of a chunk of a row to `losses` and `score_grads`. next:
// as in `prefetch_ahead`.
template <bool with_score_grad, bool weighted, bool negative, class T, class Epilogue>
void elementwise_chunk(T* s, int64_t next, const T* targets, int64_t count, Epilogue epilogue,
                       T weight, T positive_weight, double& losses, double& score_grads) {
  constexpr int64_t kSums = LaneSums<T>::kSums;
  static_assert(kChunk / kSums * kSums == kChunk && kChunk <= 1024);
  if constexpr (weighted) {  // before the scores become score gradients
    losses += positive_weight * logarithms_of_positives(s, targets, count, epilogue);
  }
  LaneSums<T> sums;
  const auto lanes = elementwise_lanes<with_score_grad, weighted, negative, T, Epilogue>;
  int64_t at = 0;
  // A constant length: with another, each call would have to prepare its loop.
  for (; at + kSums <= count; at += kSums) {
    prefetch_ahead(s + at, next, kSums);
    lanes(s + at, targets + at, kSums, epilogue, weight, positive_weight, sums);
  }
  lanes(s + at, targets + at, count - at, epilogue, weight, positive_weight, sums);
  sums.add_to(losses, score_grads);
}

template <bool with_score_grad, bool weighted, class T, class Epilogue>
void elementwise_rows(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                      const T* positive_weights, double* losses, double* score_grad_sums,
                      int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_score_grad ? weights[row] * factor : T(0);
    const T positive_weight = weighted ? positive_weights[row] : T(1);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    double loss = 0, score_grad = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T memory[kChunk], *chunk = b.scores + row * b.stride + at;
      const T* targets = read_targets(b, row, at, n, memory);
      elementwise_chunk<with_score_grad, weighted, false>(
          chunk, next, targets, n, epilogue, weight, positive_weight, loss, score_grad);
    });
    losses[row] += loss;
    if (score_grad_sums) score_grad_sums[row] += score_grad;
  }
}

template <bool weighted, class T, class Epilogue>
void elementwise(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                 const T* positive_weights, double* losses, double* score_grad_sums, int64_t begin,
                 int64_t end) {
  const auto run = weights ? elementwise_rows<true, weighted, T, Epilogue>
                           : elementwise_rows<false, weighted, T, Epilogue>;
  run(b, epilogue, factor, weights, positive_weights, losses, score_grad_sums, begin, end);
}

// The same for the loss of pairs with the target -1 but for a few positives (Block::few_positives).
// They are taken one by one, and left out of the sums over all pairs of their row.
template <bool with_score_grad, class T>
void sigmoid_rows_of_few_positives(const Block<T>& b, const SigmoidRows<T>& args, int64_t begin,
                                   int64_t end) {
  const Sigmoid<T> epilogue{args.scale, args.bias};
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_score_grad ? args.weights[row] * args.scale : T(0);
    const T positive_weight = args.positive_weights ? args.positive_weights[row] : T(1);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    T* const s = b.scores + row * b.stride;
    const int64_t* column = b.few_positives.columns + b.few_positives.first[row];
    const int64_t* const last = b.few_positives.columns + b.few_positives.first[row + 1];
    double loss = 0, score_grad_sum = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T score_grads[kChunk];
      int64_t count = 0;
      for (; column + count < last && column[count] < at + n; ++count) {
        T &score = s[column[count]], e, score_grad;
        const T rest = epilogue.without_logarithm(score, T(1), e, score_grad);
        loss += positive_weight * (rest + __builtin_log1p(double(e)));
        score_grads[count] = positive_weight * score_grad;
        score_grad_sum += score_grads[count];
        score = kLeftOut<T>;  // as a negative it has no loss and no gradient
      }
      elementwise_chunk<with_score_grad, false, true>(s + at, next, s + at, n, epilogue, weight,
                                                      T(1), loss, score_grad_sum);
      for (int64_t k = 0; k < count; ++k) s[column[k]] = weight * score_grads[k];
      column += count;
    });
    args.losses[row] += loss;
    if (args.score_grad_sums) args.score_grad_sums[row] += score_grad_sum;
  }
}

template <class T>
void sigmoid(const Block<T>& b, SigmoidRows<T> args, int64_t begin, int64_t end) {
  if (b.few_positives.first) {
    const auto run = args.weights ? sigmoid_rows_of_few_positives<true, T>
                                  : sigmoid_rows_of_few_positives<false, T>;
    return run(b, args, begin, end);
  }
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
