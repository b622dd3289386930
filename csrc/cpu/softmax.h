// Normalised losses: InfoNCE, SupCon, matrix cross entropy.
#pragma once

#include "finish.h"
#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

template <class T>
struct Row {
  T* scores;
  int64_t positive;
  T top;
};

// Leaves out what takes no part, takes the margin from the positive, finds the maximum.
template <class T>
Row<T> open_row(const Block<T>& b, T margin, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = mark_left_out(b, row);
  if (positive >= 0 && !has_matrix_targets(b)) s[positive] -= margin;
  return {s, positive, maximum(s, b.columns)};
}

// One exponential a lane. Everything by value: a loop that might read what it has written is not
// vectorised.
template <bool keep, class T>
FASTSIM_INLINE void exponential_lanes(T* s, int64_t count, T top, Softmax<T> softmax, T* sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const T e = softmax.share(s[j], top);
    if constexpr (keep) s[j] = e;
    sums[j] += e;
  }
}

// Sum of exponentials; `keep` leaves them in place of the scores. next: as of `ask_for`.
template <bool keep, class T>
double sum_exponentials(T* s, int64_t count, T top, const Softmax<T>& softmax,
                        int64_t next = 0) {
  double sum = 0;
  for_chunks(0, count, [&](int64_t at, int64_t n) {
    T* chunk = s + at;
    ask_for(chunk, next, n);
    T sums[kSums<T>] = {};
    int64_t j = 0;
    for (; j + kSums<T> <= n; j += kSums<T>) {  // of a length known here
      exponential_lanes<keep>(chunk + j, kSums<T>, top, softmax, sums);
    }
    exponential_lanes<keep>(chunk + j, n - j, top, softmax, sums);
    sum += sum_of<kSums<T>>(sums);
  });
  return sum;
}

// The sums of targets are doubles: a target of 1 among many small ones, all alike, would have each of
// these rounded in the same direction.
template <class T>
FASTSIM_INLINE void target_lanes(const T* targets, const T* s, int64_t count, T* logits,
                                 double* sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    logits[j] = fused(targets[j], s[j], logits[j]);
    sums[j] += double(targets[j]);
  }
}

// Adds sum_j t z and sum_j t of the row to a state.
template <class T>
void add_targets(const Block<T>& b, int64_t row, const Row<T>& r, T scale, double& target_logits,
                 double& target_sums) {
  if (!has_matrix_targets(b)) {
    if (r.positive >= 0) {
      target_logits = double(scale) * r.scores[r.positive];
      target_sums = 1;
    }
    return;
  }
  double logits = 0, sums = 0;
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T memory[kChunk];
    const T* targets = read_targets(b, row, at, n, memory);
    const T* s = r.scores + at;
    T of_logits[kSums<T>] = {};
    double of_targets[kSums<T>] = {};
    int64_t j = 0;
    for (; j + kSums<T> <= n; j += kSums<T>) {
      target_lanes(targets + j, s + j, kSums<T>, of_logits, of_targets);
    }
    target_lanes(targets + j, s + j, n - j, of_logits, of_targets);
    logits += sum_of<kSums<T>>(of_logits);
    sums += sum_of<kSums<T>>(of_targets);
  });
  target_logits += double(scale) * logits;
  target_sums += sums;
}

// Subtracts `weight` times the targets from the score gradients of a row.
template <class T>
void subtract_targets(const Block<T>& b, int64_t row, int64_t positive, T weight, T* score_grad) {
  if (!has_matrix_targets(b)) {
    if (positive >= 0) score_grad[positive] -= weight;
    return;
  }
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T memory[kChunk];
    const T* targets = read_targets(b, row, at, n, memory);
    T* chunk = score_grad + at;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) chunk[j] = fused(-weight, targets[j], chunk[j]);
  });
}

// Exponentials become score gradients: times `factor`, less `weight` times the targets.
template <class T>
void score_grads_of(const Block<T>& b, int64_t row, const Row<T>& r, T factor, T weight) {
  if (!has_matrix_targets(b)) {
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) r.scores[j] *= factor;
    subtract_targets(b, row, r.positive, weight, r.scores);
    return;
  }
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T memory[kChunk];
    const T* targets = read_targets(b, row, at, n, memory);
    T* s = r.scores + at;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) s[j] = fused(-weight, targets[j], s[j] * factor);
  });
}

// State and score gradient of whole rows in one fused pass.
template <class T>
void softmax_fused(const Block<T>& b, SoftmaxFused<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, args.margin, row);
    double target_logits = 0, targets = 0;
    add_targets(b, row, r, args.scale, target_logits, targets);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    const double sum = sum_exponentials<true>(r.scores, b.columns, r.top, softmax, next);
    const bool none = !any_pair(r.top, sum);
    const SoftmaxRow state{r.top, none ? 0 : sum, target_logits, targets};
    args.max[row] = state.top;
    args.sum[row] = state.sum;
    args.target_logits[row] = target_logits;
    args.target_sums[row] = targets;
    const double of_logits = none ? 0 : double(args.weights[row]) * args.scale;
    const double weight = state.target_weight(of_logits, args.normalise);
    score_grads_of(b, row, r, T(ratio(weight * targets, state.sum)), T(weight));
  }
}

template <class T>
void softmax_forward(const Block<T>& b, SoftmaxForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, args.margin, row);
    add_targets(b, row, r, args.scale, args.target_logits[row], args.target_sums[row]);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    const double sum = sum_exponentials<false>(r.scores, b.columns, r.top, softmax, next);
    if (any_pair(r.top, sum)) merge({args.max, args.sum}, row, r.top, sum, args.scale);
  }
}

// After softmax_forward on the same block, which has marked the pairs left out.
template <class T>
void softmax_forward_columns(const Block<T>& b, SoftmaxForwardColumns<T> args, int64_t begin,
                             int64_t end) {
  const Softmax<T> softmax{args.scale};
  for_chunks(begin, end, [&](int64_t at, int64_t n) {
    T top[kChunk], part[kChunk];
    double sum[kChunk];
    for (int64_t j = 0; j < n; ++j) {
      top[j] = kLeftOut<T>;
      sum[j] = 0;
    }
    for (int64_t row = 0; row < b.rows; ++row) {
      const T* s = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) top[j] = s[j] > top[j] ? s[j] : top[j];
    }
    for (int64_t first = 0; first < b.rows; first += kSumRows) {
      for (int64_t j = 0; j < n; ++j) part[j] = 0;
      for (int64_t row = first; row < smaller(first + kSumRows, b.rows); ++row) {
        const T* s = b.scores + row * b.stride + at;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) part[j] += softmax.share(s[j], top[j]);
      }
      for (int64_t j = 0; j < n; ++j) sum[j] += part[j];
    }
    for (int64_t j = 0; j < n; ++j) {
      if (any_pair(top[j], sum[j])) merge({args.max, args.sum}, at + j, top[j], sum[j], args.scale);
    }
  });
}

template <class T>
void softmax_score_grad(const Block<T>& b, SoftmaxScoreGrad<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, args.margin, row);
    T* s = r.scores;
    const T top = args.row_top[row], weight = args.row_weight[row];
    if (args.column_top) {
      const int64_t next = row + 1 < b.rows ? b.stride : 0;
      for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
        const T *tops = args.column_top + at, *weights = args.column_weight + at;
        T* chunk = s + at;
        ask_for(chunk, next, n);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          const T of_column = weights[j] * softmax.share(chunk[j], tops[j]);
          chunk[j] = fused(weight, softmax.share(chunk[j], top), of_column);
        }
      });
    } else {
#pragma omp simd
      for (int64_t j = 0; j < b.columns; ++j) s[j] = weight * softmax.share(s[j], top);
    }
    subtract_targets(b, row, r.positive, args.target_weight[row], s);
  }
}

// ---- both ways, where one number `top` serves as the maximum of all rows and all columns ----
// One exponential then does for a row and a column. Where a positive outweighs all else, its
// exponential is the sum: logarithms and ratios of both are taken in double, so that the loss and
// the score gradient are 0.

template <class T>
void softmax_both_forward(const Block<T>& b, SoftmaxBothForward<T> args, int64_t begin,
                          int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = mark_left_out(b, row), next = row + 1 < end ? b.stride : 0;
    if (positive >= 0) s[positive] -= args.margin;
    double total = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      const T* chunk = s + at;
      T* sums = args.column_sums + at;
      ask_for(chunk, next, n);
      T part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t j = 0; j < n; ++j) {
        const T e = softmax.share(chunk[j], args.top);
        sums[j] += e;
        part += e;
      }
      total += part;
    });
    args.sum[row] += total;
    if (positive < 0) continue;
    const double own = softmax.share(s[positive], args.top);
    args.positive_logits[row] = double(args.scale) * args.top + __builtin_log(own);
  }
}

template <class T>
void softmax_both_score_grad(const Block<T>& b, SoftmaxBothScoreGrad<T> args, int64_t begin,
                             int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = mark_left_out(b, row), next = row + 1 < end ? b.stride : 0;
    const double weight = args.weight[row], sum = args.sum[row];
    double of_positive = 0;
    if (positive >= 0) {
      const double own = softmax.share(s[positive] - args.margin, args.top);
      of_positive = weight * (ratio(own, sum) - 1) - weight +
                    args.column_weight[positive] * ratio(own, args.column_sum[positive]);
    }
    const T factor = T(ratio(weight, sum));
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T* chunk = s + at;
      const T* factors = args.column_factor + at;
      ask_for(chunk, next, n);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] = softmax.share(chunk[j], args.top) * (factor + factors[j]);
      }
    });
    if (positive >= 0) s[positive] = T(of_positive);
  }
}

// ---- decoupled: the positive is in no sum of exponentials ----

template <class T>
Row<T> open_without_positive(const Block<T>& b, int64_t row, T& own) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = mark_left_out(b, row);
  if (positive >= 0) {
    own = s[positive];
    s[positive] = kLeftOut<T>;
  }
  return {s, positive, maximum(s, b.columns)};
}

template <class T>
void decoupled_forward(const Block<T>& b, DecoupledForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T own = 0;
    const Row<T> r = open_without_positive(b, row, own);
    const double sum = sum_exponentials<false>(r.scores, b.columns, r.top, softmax);
    if (any_pair(r.top, sum)) merge({args.max, args.sum}, row, r.top, sum, args.scale);
    if (r.positive < 0) continue;
    args.positive_logits[row] = double(args.scale) * own;
    r.scores[r.positive] = own;
  }
}

template <class T>
void decoupled_score_grad(const Block<T>& b, DecoupledScoreGrad<T> args, int64_t begin,
                          int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T own = 0;
    const Row<T> r = open_without_positive(b, row, own);
    const T top = args.row_top[row], weight = args.row_weight[row];
    T* s = r.scores;
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = weight * softmax.share(s[j], top);
    if (r.positive >= 0) s[r.positive] = -args.positive_weight[row];
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
