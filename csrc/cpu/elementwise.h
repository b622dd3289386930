// Elementwise losses: losses[row] += sum_j loss, and with weights the score gradient in place.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// One chunk; everything by value, so that no store into `s` can be thought to change it.
template <bool with_score_grad, class T, class Epilogue>
void elementwise_chunk(T* s, const T* targets, int64_t count, Epilogue epilogue, T weight,
                       double& losses, double& score_grads) {
  T losses_part = 0, score_grads_part = 0;
#pragma omp simd reduction(+ : losses_part, score_grads_part)
  for (int64_t j = 0; j < count; ++j) {
    T loss, score_grad;
    epilogue(s[j], targets[j], loss, score_grad);
    losses_part += loss;
    score_grads_part += score_grad;
    if constexpr (with_score_grad) s[j] = weight * score_grad;
  }
  losses += losses_part;
  score_grads += score_grads_part;
}

template <bool with_score_grad, class T, class Epilogue>
void elementwise_rows(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                      double* losses, double* score_grad_sums, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_score_grad ? weights[row] * factor : T(0);
    double loss = 0, score_grad = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      elementwise_chunk<with_score_grad>(b.scores + row * b.stride + at, targets, n, epilogue, weight,
                                    loss, score_grad);
    });
    losses[row] += loss;
    if (score_grad_sums) score_grad_sums[row] += score_grad;
  }
}

template <class T, class Epilogue>
void elementwise(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                 double* losses, double* score_grad_sums, int64_t begin, int64_t end) {
  const auto run = weights ? elementwise_rows<true, T, Epilogue> : elementwise_rows<false, T, Epilogue>;
  run(b, epilogue, factor, weights, losses, score_grad_sums, begin, end);
}

template <class T>
void sigmoid(const Block<T>& b, T scale, T bias, const T* weights, double* losses,
             double* score_grad_sums, int64_t begin, int64_t end) {
  elementwise(b, Sigmoid<T>{scale, bias}, scale, weights, losses, score_grad_sums, begin, end);
}

template <class T>
void squared_error(const Block<T>& b, const T* weights, double* losses, int64_t begin,
                   int64_t end) {
  elementwise(b, SquaredError<T>{}, T(1), weights, losses, static_cast<double*>(nullptr), begin,
              end);
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
