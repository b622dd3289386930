// Margin-MSE: by how much each score is below the row's positive, against the same of the targets.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// By how much the scores of a chunk, less their targets, are below `gap`: sum and sum of squares. With
// the score gradients in the place of the scores. Everything by value: a loop that might read what it
// has written is not vectorised.
template <bool with_score_grad, class T>
FASTSIM_INLINE void add_margins(T* s, const T* targets, int64_t count, T ratio, T gap, T weight,
                                double& squares, double& sum) {
  T square = 0, beyond = 0;
#pragma omp simd reduction(+ : square, beyond)
  for (int64_t j = 0; j < count; ++j) {
    const T below = gap - fused(-ratio, targets[j], s[j]);
    square += below * below;  // `fused` is no sum to clang
    beyond += below;
    if constexpr (with_score_grad) s[j] = -weight * below;
  }
  squares += square;
  sum += beyond;
}

// losses[row] = sum_j (d_p - d_j)^2 for d_j = s_j - ratio t_j and the positive's column p.
template <bool with_score_grad, class T>
void margins_of_rows(const Block<T>& b, MarginRows<T> args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = b.positive(row);
    T target;
    load_targets(b, row, positive, 1, &target);
    const T gap = fused(-args.ratio, target, s[positive]);
    const T weight = with_score_grad ? T(2) * args.weights[row] : T(0);
    double loss = 0, sum = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      add_margins<with_score_grad>(s + at, targets, n, args.ratio, gap, weight, loss, sum);
    });
    args.losses[row] = loss;
    if constexpr (with_score_grad) s[positive] = T(weight * sum);
  }
}

template <class T>
void margins(const Block<T>& b, MarginRows<T> args, int64_t begin, int64_t end) {
  const auto run = args.weights ? margins_of_rows<true, T> : margins_of_rows<false, T>;
  run(b, args, begin, end);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
