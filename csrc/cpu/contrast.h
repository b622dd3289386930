// Losses with one sum over a row's positives and one over its negatives: multi-similarity, circle,
// and multi_positive, which has one term for each positive (fastsim/kinds/contrast.py).
#pragma once

#include "isa.h"
#include "pairs.h"
#include "softmax.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// A chunk of a row: the negatives' scores in place, kLeftOut elsewhere, and the positives, of which
// there are few, closed up with their places.
template <class T>
struct SplitChunk {
  T negatives[kChunk], positives[kChunk];
  int32_t places[kChunk];
  int64_t count;  // of positives

  void split(const Block<T>& b, int64_t row, int64_t at, int64_t n) {
    const T* s = b.scores + row * b.stride + at;
    const int64_t group = b.row_groups[row], *groups = b.column_groups + at;
    count = 0;
    for (int64_t first = 0; first < n; first += kFew) {
      const int64_t end = smaller(first + kFew, n);
      T own = 0;
#pragma omp simd reduction(+ : own)
      for (int64_t j = first; j < end; ++j) {
        const bool alike = groups[j] == group;
        negatives[j] = alike ? kLeftOut<T> : s[j];
        own += alike ? T(1) : T(0);
      }
      if (own == 0) continue;
      for (int64_t j = first; j < end; ++j) {
        positives[count] = s[j];
        places[count] = static_cast<int32_t>(j);
        count += groups[j] == group && !(s[j] <= kLeftOut<T>);
      }
    }
  }

 private:
  static constexpr int64_t kFew = 64;  // columns that mostly have no positive among them
};

// Merges the maximum of a chunk and its sum of exponentials into the running state.
template <class T>
void forward_chunk(T* values, int64_t count, Softmax<T> softmax, const MaxSum& state, int64_t row) {
  const T top = maximum(values, count);
  const double sum = sum_exponentials<false>(values, count, top, softmax);
  if (any_pair(top, sum)) merge(state, row, top, sum, softmax.scale);
}

template <class T>
void multi_similarity_forward(const Block<T>& b, MultiSimilarityForward<T> args, int64_t begin,
                              int64_t end) {
  const Softmax<T> rise{args.scale}, fall{args.positive_scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  const MaxSum positives{args.positive_max, args.positive_sum};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      forward_chunk(sides.negatives, n, rise, negatives, row);
      for (int64_t k = 0; k < sides.count; ++k) sides.positives[k] = -sides.positives[k];
      forward_chunk(sides.positives, sides.count, fall, positives, row);
    });
  }
}

template <class T>
void multi_similarity_score_grad(const Block<T>& b, MultiSimilarityScoreGrad<T> args, int64_t begin,
                                 int64_t end) {
  const Softmax<T> rise{args.scale}, fall{args.positive_scale};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T high = args.negative_top[row], up = args.negative_weight[row];
    const T low = args.positive_top[row], down = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) chunk[j] = up * rise.share(sides.negatives[j], high);
      for (int64_t k = 0; k < sides.count; ++k) {
        chunk[sides.places[k]] = -down * fall.share(-sides.positives[k], low);
      }
    });
  }
}

// State of whole rows: the negatives' sum of exponentials, then the positives' terms against it;
// known: the sum is there already, of these columns and of others.
template <class T>
void multi_positive_forward(const Block<T>& b, MultiPositiveForward<T> args, int64_t begin,
                            int64_t end) {
  const MultiPositive<T> term{args.scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, args.known ? 0 : b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      forward_chunk(sides.negatives, n, Softmax<T>{args.scale}, negatives, row);
    });
    args.losses[row] = args.score_grads[row] = 0;
    if (negatives.sum[row] == 0) {  // the loss is 0, and NaN where a score is
      for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
        sides.split(b, row, at, n);
        for (int64_t k = 0; k < sides.count; ++k) args.losses[row] += 0 * sides.positives[k];
      });
      continue;
    }
    const T top = T(negatives.max[row]), log_sum = T(__builtin_log(negatives.sum[row]));
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      T losses = 0, score_grads = 0;
#pragma omp simd reduction(+ : losses, score_grads)
      for (int64_t k = 0; k < sides.count; ++k) {
        T loss, score_grad;
        term(sides.positives[k], top, log_sum, loss, score_grad);
        losses += loss;
        score_grads += score_grad;
      }
      args.losses[row] += losses;
      args.score_grads[row] += score_grads;
    });
  }
}

template <class T>
void multi_positive_score_grad(const Block<T>& b, MultiPositiveScoreGrad<T> args, int64_t begin,
                               int64_t end) {
  const Softmax<T> softmax{args.scale};
  const MultiPositive<T> term{args.scale};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T top = args.negative_top[row], up = args.negative_weight[row];
    const T log_sum = args.log_sum[row], down = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) chunk[j] = up * softmax.share(sides.negatives[j], top);
      for (int64_t k = 0; k < sides.count; ++k) {
        T loss, share;
        term(sides.positives[k], top, log_sum, loss, share);
        chunk[sides.places[k]] = -down * share;
      }
    });
  }
}

// The negatives' scores and the positives', each where the other is not, become their values.
template <class T>
void take_values(SplitChunk<T>& sides, int64_t n, Circle<T> circle) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const T s = sides.negatives[j], value = circle.negative_value(s);
    sides.negatives[j] = s <= kLeftOut<T> ? kLeftOut<T> : value;
  }
  for (int64_t k = 0; k < sides.count; ++k) {
    sides.positives[k] = circle.positive_value(sides.positives[k]);
  }
}

template <class T>
void circle_forward(const Block<T>& b, CircleForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  const MaxSum negatives{args.negative_max, args.negative_sum};
  const MaxSum positives{args.positive_max, args.positive_sum};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      take_values(sides, n, Circle<T>{args.margin});
      forward_chunk(sides.negatives, n, softmax, negatives, row);
      forward_chunk(sides.positives, sides.count, softmax, positives, row);
    });
  }
}

template <class T>
void circle_score_grad(const Block<T>& b, CircleScoreGrad<T> args, int64_t begin, int64_t end) {
  const Circle<T> circle{args.margin};
  const Softmax<T> softmax{args.scale};
  SplitChunk<T> sides;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T high = args.negative_top[row], up = args.negative_weight[row];
    const T low = args.positive_top[row], down = args.positive_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      sides.split(b, row, at, n);
      T* chunk = b.scores + row * b.stride + at;
      T weights[kChunk];
      for (int64_t k = 0; k < sides.count; ++k) {
        weights[k] = circle.positive_weight(sides.positives[k]);
      }
      take_values(sides, n, circle);
      // A pair that takes no part has weight 0 for its score and share 0 for its value.
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] = up * circle.negative_weight(chunk[j]) * softmax.share(sides.negatives[j], high);
      }
      for (int64_t k = 0; k < sides.count; ++k) {
        chunk[sides.places[k]] = -down * weights[k] * softmax.share(sides.positives[k], low);
      }
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
