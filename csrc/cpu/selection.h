// Selection: the closest negative, the hardest pairs by group, the k largest.
#pragma once

#include <limits>

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The largest of the scores that the rule admits; a NaN is above none.
template <class T>
T largest_admitted(const T* s, int64_t count, Closest<T> rule, T ceiling) {
  const T most = rule.semi_hard ? ceiling : std::numeric_limits<T>::infinity();
  return largest(s, count, kLeftOut<T>, [most](auto scores) {
    using Numbers = decltype(scores);  // one or a vector of them
    return scores <= most - Numbers{} ? scores : kLeftOut<T> - Numbers{};
  });
}

// Index of the first of the values equal to one that is among them.
template <class T>
int64_t first_of(const T* s, int64_t count, T value) {
  constexpr int kStep = 256;
  for (int64_t at = 0;; at += kStep) {
    const int n = int(smaller(kStep, count - at));
    int first = kStep;
#pragma omp simd reduction(min : first)
    for (int j = 0; j < n; ++j) {
      const int here = s[at + j] == value ? j : kStep;
      first = here < first ? here : first;
    }
    if (first < kStep) return at + first;
  }
}

// The largest admitted score of each row other than its positive, and its first column.
// `ceilings` holds the positives' scores for rows whose positive lies in another block.
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
      args.indices[row] = b.column0 + first_of(s, b.columns, top);
    }
  }
}

// The lowest score of each row within its own group and the highest outside of it, with their first
// columns: the hardest positive and the hardest negative. `offsets`, if given, are taken from the
// scores by column.
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
      const bool own = groups[j] == group;
      const T positive = own && s[j] > kLeftOut<T> ? s[j] : -kLeftOut<T>;
      const T negative = own ? kLeftOut<T> : s[j];
      low = positive < low ? positive : low;
      high = negative > high ? negative : high;
    }
    const auto first = [&](T value, bool own) {
      int64_t at = 0;
      while (s[at] != value || (groups[at] == group) != own) ++at;
      return b.column0 + at;
    };
    if (low < -kLeftOut<T> && low < args.low[row]) {
      args.low[row] = low;
      args.low_index[row] = first(low, true);
    }
    if (high > kLeftOut<T> && high > args.high[row]) {
      args.high[row] = high;
      args.high_index[row] = first(high, false);
    }
  }
}

// relu(mean negative - positive + margin) + relu(closest - positive + margin) of whole rows, and
// the score gradients in place of the scores.
template <class T>
void triplet(const Block<T>& b, TripletRows<T> args, int64_t begin, int64_t end) {
  const T* weights = args.weights;
  const auto hinge = [](double x) { return x <= 0 ? 0 : x; };  // keeps a NaN
  for (int64_t row = begin; row < end; ++row) {
    const int64_t positive = mark_left_out(b, row);
    T* s = b.scores + row * b.stride;
    const T own = s[positive];
    s[positive] = kLeftOut<T>;
    T sum = 0, count = 0;
#pragma omp simd reduction(+ : sum, count)
    for (int64_t j = 0; j < b.columns; ++j) {
      const bool out = s[j] <= kLeftOut<T>;
      sum += out ? T(0) : s[j];
      count += out ? T(0) : T(1);
    }
    const T top = largest_admitted(s, b.columns, Closest<T>{args.semi_hard}, own);
    const double from_mean = count > 0 ? hinge(double(sum) / count - own + args.margin) : 0;
    const double from_closest = top > kLeftOut<T> ? hinge(double(top) - own + args.margin) : 0;
    args.losses[row] = from_mean + from_closest;
    const int64_t at = from_closest == 0 ? -1 : first_of(s, b.columns, top);
    const T each = from_mean == 0 ? T(0) : weights[row] / count;
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = s[j] <= kLeftOut<T> ? T(0) : each;
    if (at >= 0) s[at] += weights[row];
    s[positive] = -weights[row] * ((from_mean != 0) + (at >= 0));
  }
}

// Keeps the k largest of each row in descending order, the earlier column first among equals;
// `values` and `indices` (rows, k) hold the best so far. A NaN ranks above every number.
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
      const int64_t n = smaller(kStep, b.columns - at);
      int hits = 0;
      const T bar = value[k - 1];
#pragma omp simd reduction(+ : hits)
      for (int64_t j = 0; j < n; ++j) hits += !(s[at + j] <= bar);
      if (hits == 0) continue;
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
