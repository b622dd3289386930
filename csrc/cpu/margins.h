// Margin-MSE: compares how far each score is below that of the row's positive with how far its
// target is below the positive's target.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Computes how far the differences s_j - ratio t_j of a chunk are below the positive's difference,
// and adds these distances to `sum` and their squares to `squares`. with_score_grad: score
// gradients replace the scores. Numbers are passed by value, as compilers do not vectorise a loop
// that might read what it has written.
template <bool with_score_grad, class T>
FASTSIM_INLINE void add_margins(T* s, const T* targets, int64_t count, T ratio,
                                T positive_difference, T weight, double& squares, double& sum) {
  T chunk_squares = 0, chunk_sum = 0;
#pragma omp simd reduction(+ : chunk_squares, chunk_sum)
  for (int64_t j = 0; j < count; ++j) {
    const T below = positive_difference - fused(-ratio, targets[j], s[j]);
    chunk_squares += below * below;  // not `fused`, which clang does not take for a sum
    chunk_sum += below;
    if constexpr (with_score_grad) s[j] = -weight * below;
  }
  squares += chunk_squares;
  sum += chunk_sum;
}

// losses[row] = sum_j (d_p - d_j)^2, where d_j = s_j - ratio t_j and p is the column of the
// positive. with_score_grad: the scores become score gradients.
template <bool with_score_grad, class T>
void margins_of_rows(const Block<T>& b, MarginRows<T> args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = b.positive(row);
    T target;
    load_targets(b, row, positive, 1, &target);
    const T positive_difference = fused(-args.ratio, target, s[positive]);
    const T weight = with_score_grad ? T(2) * args.weights[row] : T(0);
    double loss = 0, sum = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      add_margins<with_score_grad>(s + at, targets, n, args.ratio, positive_difference, weight,
                                   loss, sum);
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
