// Selection: the closest negative of each row, the hardest pairs by group, the k largest scores.
#pragma once

#include <limits>

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The largest of the scores that `rule` admits, kLeftOut if there is none. ceiling: the score of
// the positive. NaNs are ignored.
template <class T>
T largest_admitted(const T* s, int64_t count, Closest<T> rule, T ceiling) {
  const T limit = rule.semi_hard ? ceiling : std::numeric_limits<T>::infinity();
  return largest(s, count, kLeftOut<T>, [limit](auto scores) {
    using Numbers = decltype(scores);  // one number or a vector of numbers
    return scores <= limit - Numbers{} ? scores : kLeftOut<T> - Numbers{};
  });
}

// The index of the first number equal to `value`, which has to be among the numbers.
template <class T>
int64_t first_index_of(const T* s, int64_t count, T value) {
  constexpr int kStep = 256;
  for (int64_t at = 0;; at += kStep) {
    const int n = int(min_of(kStep, count - at));
    int first = kStep;
#pragma omp simd reduction(min : first)
    for (int j = 0; j < n; ++j) {
      const int index = s[at + j] == value ? j : kStep;
      first = index < first ? index : first;
    }
    if (first < kStep) return at + first;
  }
}

// Finds for each row the largest admitted score but the positive's, and the first column that has
// it. ceilings: the scores of the positives, for rows whose positive is in another block.
template <class T>
void closest(const Block<T>& b, ClosestNegative<T> args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t positive = mark_left_out(b, row);
    T* s = b.scores + row * b.stride;
    const T ceiling = positive >= 0 ? s[positive] : args.ceilings[row];
    if (positive >= 0) s[positive] = kLeftOut<T>;
    const T top = largest_admitted(s, b.columns, Closest<T>{args.semi_hard}, ceiling);
    if (top > kLeftOut<T> && top > args.values[row]) {
      args.values[row] = top;
      args.indices[row] = b.column0 + first_index_of(s, b.columns, top);
    }
  }
}

// Finds for each row the hardest positive, the lowest score within the row's group, and the hardest
// negative, the highest score outside of it, each with the first column that has it. offsets:
// numbers to subtract from the scores of each column first, or null.
template <class T>
void hardest(const Block<T>& b, HardestPairs<T> args, int64_t begin, int64_t end) {
  const int64_t* groups = b.column_groups;
  const T* offsets = args.offsets;
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    T* s = b.scores + row * b.stride;
    const int64_t group = b.row_groups[row];
    if (offsets) {
#pragma omp simd
      for (int64_t j = 0; j < b.columns; ++j) s[j] -= offsets[j];
    }
    T low = -kLeftOut<T>, high = kLeftOut<T>;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t j = 0; j < b.columns; ++j) {
      const bool same_group = groups[j] == group;
      const T positive = same_group && s[j] > kLeftOut<T> ? s[j] : -kLeftOut<T>;
      const T negative = same_group ? kLeftOut<T> : s[j];
      low = positive < low ? positive : low;
      high = negative > high ? negative : high;
    }
    const auto first_with = [&](T value, bool same_group) {
      int64_t column = 0;
      while (s[column] != value || (groups[column] == group) != same_group) ++column;
      return b.column0 + column;
    };
    if (low < -kLeftOut<T> && low < args.low[row]) {
      args.low[row] = low;
      args.low_index[row] = first_with(low, true);
    }
    if (high > kLeftOut<T> && high > args.high[row]) {
      args.high[row] = high;
      args.high_index[row] = first_with(high, false);
    }
  }
}

// Writes relu(mean negative - positive + margin) + relu(closest negative - positive + margin) of
// whole rows to `losses`. The scores become score gradients.
template <class T>
void triplet(const Block<T>& b, TripletRows<T> args, int64_t begin, int64_t end) {
  const T* weights = args.weights;
  const auto hinge = [](double x) { return x <= 0 ? 0 : x; };  // keeps a NaN
  for (int64_t row = begin; row < end; ++row) {
    const int64_t positive = mark_left_out(b, row);
    T* s = b.scores + row * b.stride;
    const T positive_score = s[positive];
    s[positive] = kLeftOut<T>;
    T sum = 0, count = 0;
#pragma omp simd reduction(+ : sum, count)
    for (int64_t j = 0; j < b.columns; ++j) {
      const bool left_out = s[j] <= kLeftOut<T>;
      sum += left_out ? T(0) : s[j];
      count += left_out ? T(0) : T(1);
    }
    const T top = largest_admitted(s, b.columns, Closest<T>{args.semi_hard}, positive_score);
    // Without a negative it is 0, or NaN if the positive's score is not finite.
    const double mean_loss = count > 0 ? hinge(double(sum) / count - positive_score + args.margin)
                                       : 0 * positive_score;
    const double closest_loss =
        top > kLeftOut<T> ? hinge(double(top) - positive_score + args.margin) : 0;
    args.losses[row] = mean_loss + closest_loss;
    const int64_t closest_column = closest_loss == 0 ? -1 : first_index_of(s, b.columns, top);
    const T score_grad = mean_loss == 0 ? T(0) : weights[row] / count;
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = s[j] <= kLeftOut<T> ? T(0) : score_grad;
    if (closest_column >= 0) s[closest_column] += weights[row];
    s[positive] = -weights[row] * ((mean_loss != 0) + (closest_column >= 0));
  }
}

// Merges the scores of a block into the k largest of each row. `values` and `indices` (rows, k)
// hold the largest so far, in descending order; of equal scores the earlier column is first. A NaN
// ranks above every number.
template <class T>
void top_k(const Block<T>& b, TopK<T> args, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 64;
  const int64_t k = args.k;
  if (k == 0) return;
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    T* value = args.values + row * k;
    int64_t* index = args.indices + row * k;
    for (int64_t at = 0; at < b.columns; at += kStep) {
      const int64_t n = min_of(kStep, b.columns - at);
      int candidates = 0;
      const T least = value[k - 1];
#pragma omp simd reduction(+ : candidates)
      for (int64_t j = 0; j < n; ++j) candidates += !(s[at + j] <= least);
      if (candidates == 0) continue;
      for (int64_t j = at; j < at + n; ++j) {
        if (s[j] <= value[k - 1] || value[k - 1] != value[k - 1]) continue;
        int64_t place = k - 1;
        for (; place > 0 && !(s[j] <= value[place - 1]) && value[place - 1] == value[place - 1];
             --place) {
          value[place] = value[place - 1];
          index[place] = index[place - 1];
        }
        value[place] = s[j];
        index[place] = b.column0 + j;
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
