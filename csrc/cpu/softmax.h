// Normalised losses: InfoNCE, SupCon, matrix cross entropy.
#pragma once

#include "finish.h"
#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// A row of scores, the column of its positive in the block (-1: none), and its maximum.
template <class T>
struct Row {
  T* scores;
  int64_t positive;
  T top;
};

// Marks the left-out pairs of a row, subtracts the margin from its positive and finds its maximum.
template <class T>
Row<T> open_row(const Block<T>& b, T margin, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = mark_left_out(b, row);
  if (positive >= 0 && !has_matrix_targets(b)) s[positive] -= margin;
  return {s, positive, maximum(s, b.columns)};
}

// Adds the exponentials of up to kSums<T> scores to `sums`, one per lane. With `keep` they replace
// the scores. Numbers are passed by value, as compilers do not vectorise a loop that might read
// what it has written.
template <bool keep, class T>
FASTSIM_INLINE void exponential_lanes(T* s, int64_t count, T top, Softmax<T> softmax, T* sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const T e = softmax.share(s[j], top);
    if constexpr (keep) s[j] = e;
    sums[j] += e;
  }
}

// The sum of the exponentials of `count` scores. With `keep` they replace the scores. next: as in
// `prefetch_ahead`.
template <bool keep, class T>
double sum_exponentials(T* s, int64_t count, T top, const Softmax<T>& softmax,
                        int64_t next = 0) {
  double sum = 0;
  for_chunks(0, count, [&](int64_t at, int64_t n) {
    T* chunk = s + at;
    prefetch_ahead(chunk, next, n);
    T sums[kSums<T>] = {};
    int64_t j = 0;
    for (; j + kSums<T> <= n; j += kSums<T>) {  // a constant length
      exponential_lanes<keep>(chunk + j, kSums<T>, top, softmax, sums);
    }
    exponential_lanes<keep>(chunk + j, n - j, top, softmax, sums);
    sum += sum_of<kSums<T>>(sums);
  });
  return sum;
}

// Adds targets times scores to `logits`, and targets to `sums`, one per lane. The sums of targets
// are doubles: in a float sum with a target of 1, many small and equal targets would all be rounded
// in the same direction.
template <class T>
FASTSIM_INLINE void target_lanes(const T* targets, const T* s, int64_t count, T* logits,
                                 double* sums) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    logits[j] = fused(targets[j], s[j], logits[j]);
    sums[j] += double(targets[j]);
  }
}

// Adds sum_j t z and sum_j t of a row to its state.
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
    T lane_logits[kSums<T>] = {};
    double lane_targets[kSums<T>] = {};
    int64_t j = 0;
    for (; j + kSums<T> <= n; j += kSums<T>) {
      target_lanes(targets + j, s + j, kSums<T>, lane_logits, lane_targets);
    }
    target_lanes(targets + j, s + j, n - j, lane_logits, lane_targets);
    logits += sum_of<kSums<T>>(lane_logits);
    sums += sum_of<kSums<T>>(lane_targets);
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

// Turns the exponentials of a row into score gradients: multiplies them by `factor`, and subtracts
// `weight` times the targets.
template <class T>
void exponentials_to_score_grads(const Block<T>& b, int64_t row, const Row<T>& r, T factor,
                                 T weight) {
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

// Computes the state and the score gradients of whole rows in one pass.
template <class T>
void softmax_fused(const Block<T>& b, SoftmaxFused<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, args.margin, row);
    double target_logits = 0, target_sum = 0;
    add_targets(b, row, r, args.scale, target_logits, target_sum);
    const int64_t next = row + 1 < b.rows ? b.stride : 0;
    const double sum = sum_exponentials<true>(r.scores, b.columns, r.top, softmax, next);
    const bool empty = !any_pair(r.top, sum);
    const SoftmaxRow state{r.top, empty ? 0 : sum, target_logits, target_sum};
    args.max[row] = state.top;
    args.sum[row] = state.sum;
    args.target_logits[row] = target_logits;
    args.target_sums[row] = target_sum;
    const double logit_weight = empty ? 0 : double(args.weights[row]) * args.scale;
    const double weight = state.target_weight(logit_weight, args.normalise);
    exponentials_to_score_grads(b, row, r, T(ratio(weight * target_sum, state.sum)), T(weight));
  }
}

// Adds the scores of a block to the states of its rows.
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

// Adds the scores of a block to the states of its columns. Runs after softmax_forward on the same
// block, which has marked the left-out pairs.
template <class T>
void softmax_forward_columns(const Block<T>& b, SoftmaxForwardColumns<T> args, int64_t begin,
                             int64_t end) {
  const Softmax<T> softmax{args.scale};
  for_chunks(begin, end, [&](int64_t at, int64_t n) {
    T top[kChunk], group_sum[kChunk];
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
      for (int64_t j = 0; j < n; ++j) group_sum[j] = 0;
      for (int64_t row = first; row < min_of(first + kSumRows, b.rows); ++row) {
        const T* s = b.scores + row * b.stride + at;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) group_sum[j] += softmax.share(s[j], top[j]);
      }
      for (int64_t j = 0; j < n; ++j) sum[j] += group_sum[j];
    }
    for (int64_t j = 0; j < n; ++j) {
      if (any_pair(top[j], sum[j])) merge({args.max, args.sum}, at + j, top[j], sum[j], args.scale);
    }
  });
}

// Turns the scores of a block into score gradients, with the exponentials of rows and, if
// `column_top` is given, of columns.
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
        prefetch_ahead(chunk, next, n);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          const T column_term = weights[j] * softmax.share(chunk[j], tops[j]);
          chunk[j] = fused(weight, softmax.share(chunk[j], top), column_term);
        }
      });
    } else {
#pragma omp simd
      for (int64_t j = 0; j < b.columns; ++j) s[j] = weight * softmax.share(s[j], top);
    }
    subtract_targets(b, row, r.positive, args.target_weight[row], s);
  }
}

// ---- a softmax over rows and over columns, relative to one number `top` ----
// `top` replaces the maxima of all rows and columns, so that one exponential of a score serves its
// row and its column. If a positive outweighs all other pairs, its exponential is the whole sum.
// The logarithms and the ratio of both are taken in double, so that the loss and the score gradient
// are then 0.

// Adds the scores of a block to the sums of its rows and columns, after subtracting the margin from
// the positives.
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
      prefetch_ahead(chunk, next, n);
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
    const double positive_term = softmax.share(s[positive], args.top);
    args.positive_logits[row] = double(args.scale) * args.top + __builtin_log(positive_term);
  }
}

// Turns the scores of a block into score gradients. The margin is subtracted from the positives
// first.
template <class T>
void softmax_both_score_grad(const Block<T>& b, SoftmaxBothScoreGrad<T> args, int64_t begin,
                             int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t positive = mark_left_out(b, row), next = row + 1 < end ? b.stride : 0;
    const double weight = args.weight[row], sum = args.sum[row];
    double positive_score_grad = 0;
    if (positive >= 0) {
      const double positive_term = softmax.share(s[positive] - args.margin, args.top);
      positive_score_grad = weight * (ratio(positive_term, sum) - 1) - weight +
                            args.column_weight[positive] *
                                ratio(positive_term, args.column_sum[positive]);
    }
    const T factor = T(ratio(weight, sum));
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T* chunk = s + at;
      const T* factors = args.column_factor + at;
      prefetch_ahead(chunk, next, n);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] = softmax.share(chunk[j], args.top) * (factor + factors[j]);
      }
    });
    if (positive >= 0) s[positive] = T(positive_score_grad);
  }
}

// ---- decoupled: the positive is in no sum of exponentials ----

// Marks the left-out pairs of a row and its positive, whose score moves to `positive_score`, and
// finds the maximum of the other scores.
template <class T>
Row<T> open_without_positive(const Block<T>& b, int64_t row, T& positive_score) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = mark_left_out(b, row);
  if (positive >= 0) {
    positive_score = s[positive];
    s[positive] = kLeftOut<T>;
  }
  return {s, positive, maximum(s, b.columns)};
}

// Adds the scores of a block to the states of its rows.
template <class T>
void decoupled_forward(const Block<T>& b, DecoupledForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T positive_score = 0;
    const Row<T> r = open_without_positive(b, row, positive_score);
    const double sum = sum_exponentials<false>(r.scores, b.columns, r.top, softmax);
    if (any_pair(r.top, sum)) merge({args.max, args.sum}, row, r.top, sum, args.scale);
    if (r.positive < 0) continue;
    args.positive_logits[row] = double(args.scale) * positive_score;
    r.scores[r.positive] = positive_score;
  }
}

// Turns the scores of a block into score gradients.
template <class T>
void decoupled_score_grad(const Block<T>& b, DecoupledScoreGrad<T> args, int64_t begin,
                          int64_t end) {
  const Softmax<T> softmax{args.scale};
  for (int64_t row = begin; row < end; ++row) {
    T positive_score = 0;
    const Row<T> r = open_without_positive(b, row, positive_score);
    const T top = args.row_top[row], weight = args.row_weight[row];
    T* s = r.scores;
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = weight * softmax.share(s[j], top);
    if (r.positive >= 0) s[r.positive] = -args.positive_weight[row];
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
