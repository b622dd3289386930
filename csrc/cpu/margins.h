// Margin-MSE: by how much each score is below the row's positive, against the same of the targets.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// losses[row] = sum_j (d_p - d_j)^2 for d_j = s_j - ratio t_j and the positive's column p; with
// weights the score gradients in the place of the scores.
template <bool with_score_grad, class T>
void margins_of_rows(const Block<T>& b, const MarginRows<T>& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = b.positive(row);
    T target;
    load_targets(b, row, positive, 1, &target);
    const T gap = fused(-args.ratio, target, s[positive]);
    const T weight = with_score_grad ? T(2) * args.weights[row] : T(0);
    double loss = 0, total = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      T* chunk = s + at;
      T squares = 0, sum = 0;
#pragma omp simd reduction(+ : squares, sum)
      for (int64_t j = 0; j < n; ++j) {
        const T beyond = gap - fused(-args.ratio, targets[j], chunk[j]);
        squares = fused(beyond, beyond, squares);
        sum += beyond;
        if constexpr (with_score_grad) chunk[j] = -weight * beyond;
      }
      loss += squares;
      total += sum;
    });
    args.losses[row] = loss;
    if constexpr (with_score_grad) s[positive] = T(weight * total);
  }
}

template <class T>
void margins(const Block<T>& b, MarginRows<T> args, int64_t begin, int64_t end) {
  const auto run = args.weights ? margins_of_rows<true, T> : margins_of_rows<false, T>;
  run(b, args, begin, end);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
