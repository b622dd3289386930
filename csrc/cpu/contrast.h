// Losses that contrast the negatives of a row with its positives (fastsim/kinds/contrast.py).
// Multi-similarity and circle loss have one sum over each. multi_positive has a sum over the
// negatives, and one term for each positive.
#pragma once

#include "isa.h"
#include "pairs.h"
#include "softmax.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// A chunk of a row, split into negatives and positives. `negatives` holds the scores of the
// negatives at their places in the chunk, and kLeftOut elsewhere. `positives` holds the scores of
// the positives, which are few, one after another; `places` are their places in the chunk.
template <class T>
struct SplitChunk {
  T negatives[kChunk], positives[kChunk];
  int32_t places[kChunk];
  int64_t count;  // the number of positives

  // Splits the columns [at, at + n) of a row, n <= kChunk.
  void fill(const Block<T>& b, int64_t row, int64_t at, int64_t n) {
    const T* s = b.scores + row * b.stride + at;
    const int64_t group = b.row_groups[row], *groups = b.column_groups + at;
    count = 0;
    for (int64_t first = 0; first < n; first += kStep) {
      const int64_t end = min_of(first + kStep, n);
      T group_members = 0;
#pragma omp simd reduction(+ : group_members)
      for (int64_t j = first; j < end; ++j) {
        const bool same_group = groups[j] == group;
        negatives[j] = same_group ? kLeftOut<T> : s[j];
        group_members += same_group ? T(1) : T(0);
      }
      if (group_members == 0) continue;
      for (int64_t j = first; j < end; ++j) {
        positives[count] = s[j];
        places[count] = static_cast<int32_t>(j);
        count += groups[j] == group && s[j] != kLeftOut<T>;
      }
    }
  }

 private:
  static constexpr int64_t kStep = 64;  // columns, few enough that most steps have no positive
};

// Merges the maximum of the values of a chunk, and their sum of exponentials, into the state of a
// row.
template <class T>
void forward_chunk(T* values, int64_t count, Softmax<T> softmax, const MaxSum& state, int64_t row) {
  const T top = maximum(values, count);
  const double sum = sum_exponentials<false>(values, count, top, softmax);
  if (any_pair(top, sum)) merge(state, row, top, sum, softmax.scale);
}

// Adds the scores of a block to the states of its rows.
template <class T>
void multi_similarity_forward(const Block<T>& b, MultiSimilarityForward<T> args, int64_t begin,
                              int64_t end) {
  const Softmax<T> negative_softmax{args.scale}, positive_softmax{args.positive_scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  const MaxSum positives{args.positive_max, args.positive_sum};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      forward_chunk(split.negatives, n, negative_softmax, negatives, row);
      for (int64_t k = 0; k < split.count; ++k) split.positives[k] = -split.positives[k];
      forward_chunk(split.positives, split.count, positive_softmax, positives, row);
    });
  }
}

// Turns the scores of a block into score gradients.
template <class T>
void multi_similarity_score_grad(const Block<T>& b, MultiSimilarityScoreGrad<T> args, int64_t begin,
                                 int64_t end) {
  const Softmax<T> negative_softmax{args.scale}, positive_softmax{args.positive_scale};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T top = args.negative_top[row], weight = args.negative_weight[row];
    const T positive_top = args.positive_top[row], positive_weight = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] = weight * negative_softmax.share(split.negatives[j], top);
      }
      for (int64_t k = 0; k < split.count; ++k) {
        chunk[split.places[k]] =
            -positive_weight * positive_softmax.share(-split.positives[k], positive_top);
      }
    });
  }
}

// Whether a row has a negative. Its score may be -Inf.
template <class T>
bool any_negative(const Block<T>& b, int64_t row) {
  const T* s = b.scores + row * b.stride;
  const int64_t group = b.row_groups[row], *groups = b.column_groups;
  T count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t j = 0; j < b.columns; ++j) {
    count += groups[j] != group && s[j] != kLeftOut<T> ? T(1) : T(0);
  }
  return count > 0;
}

// The loss of a row that has no terms: 0, or NaN if a score is not finite.
template <class T>
T loss_without_terms(const Block<T>& b, int64_t row) {
  const T* s = b.scores + row * b.stride;
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < b.columns; ++j) sum += 0 * s[j];
  return sum;
}

// Computes the states of whole rows: the sum of exponentials of the negatives, then from it the
// terms of the positives. known: the state already has that sum, over these columns and others, and
// the terms are added to those of other columns.
template <class T>
void multi_positive_forward(const Block<T>& b, MultiPositiveForward<T> args, int64_t begin,
                            int64_t end) {
  const MultiPositive<T> term{args.scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, args.known ? 0 : b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      forward_chunk(split.negatives, n, Softmax<T>{args.scale}, negatives, row);
    });
    if (!args.known) args.losses[row] = args.score_grads[row] = 0;
    const bool zero_sum = negatives.sum[row] == 0;  // no negative, or all have the score -Inf
    if (zero_sum && !any_negative(b, row)) {
      args.losses[row] += loss_without_terms(b, row);
      continue;
    }
    const T top = T(negatives.max[row]), log_sum = T(__builtin_log(negatives.sum[row]));
    int64_t count = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      count += split.count;
      T losses = 0, score_grads = 0;
#pragma omp simd reduction(+ : losses, score_grads)
      for (int64_t k = 0; k < split.count; ++k) {
        T loss, score_grad;
        term(split.positives[k], top, log_sum, loss, score_grad);
        losses += loss;
        score_grads += score_grad;
      }
      args.losses[row] += losses;
      args.score_grads[row] += score_grads;
    });
    if (count == 0 && !args.known) args.losses[row] = loss_without_terms(b, row);
  }
}

// Turns the scores of a block into score gradients.
template <class T>
void multi_positive_score_grad(const Block<T>& b, MultiPositiveScoreGrad<T> args, int64_t begin,
                               int64_t end) {
  const Softmax<T> softmax{args.scale};
  const MultiPositive<T> term{args.scale};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T top = args.negative_top[row], weight = args.negative_weight[row];
    const T log_sum = args.log_sum[row], positive_weight = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) chunk[j] = weight * softmax.share(split.negatives[j], top);
      for (int64_t k = 0; k < split.count; ++k) {
        T loss, score_grad;
        term(split.positives[k], top, log_sum, loss, score_grad);
        chunk[split.places[k]] = -positive_weight * score_grad;
      }
    });
  }
}

// Replaces the scores of the negatives and of the positives by their values in circle loss. Entries
// of `negatives` that are no negatives stay kLeftOut.
template <class T>
void scores_to_values(SplitChunk<T>& split, int64_t n, Circle<T> circle) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const T s = split.negatives[j], value = circle.negative_value(s);
    split.negatives[j] = s <= kLeftOut<T> ? kLeftOut<T> : value;
  }
  for (int64_t k = 0; k < split.count; ++k) {
    split.positives[k] = circle.positive_value(split.positives[k]);
  }
}

// Adds the scores of a block to the states of its rows.
template <class T>
void circle_forward(const Block<T>& b, CircleForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  const MaxSum positives{args.positive_max, args.positive_sum};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      scores_to_values(split, n, Circle<T>{args.margin});
      forward_chunk(split.negatives, n, softmax, negatives, row);
      forward_chunk(split.positives, split.count, softmax, positives, row);
    });
  }
}

// Turns the scores of a block into score gradients.
template <class T>
void circle_score_grad(const Block<T>& b, CircleScoreGrad<T> args, int64_t begin, int64_t end) {
  const Circle<T> circle{args.margin};
  const Softmax<T> softmax{args.scale};
  SplitChunk<T> split;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T top = args.negative_top[row], weight = args.negative_weight[row];
    const T positive_top = args.positive_top[row], positive_weight = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split.fill(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
      T factors[kChunk];  // the weights of the positives' scores
      for (int64_t k = 0; k < split.count; ++k) {
        factors[k] = circle.positive_weight(split.positives[k]);
      }
      scores_to_values(split, n, circle);
      // A left-out pair gets 0: circle.negative_weight of its score and its exponential are 0.
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] =
            weight * circle.negative_weight(chunk[j]) * softmax.share(split.negatives[j], top);
      }
      for (int64_t k = 0; k < split.count; ++k) {
        chunk[split.places[k]] =
            -positive_weight * factors[k] * softmax.share(split.positives[k], positive_top);
      }
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
