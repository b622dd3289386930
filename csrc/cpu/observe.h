// What a block's scores say of a batch, beside any loss: fastsim/batch_metrics.py. The scores are then
// as they were.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// One row's numbers. Pairs at kLeftOut have been left out for their score, those with the row's id
// are; what is neither is a positive or a negative.
template <class T>
struct Observed {
  T highest_negative = kLeftOut<T>, highest_positive = kLeftOut<T>;
  double negative_sum = 0, negatives = 0, positive_sum = 0, positives = 0, by_id = 0, by_score = 0;

  void add_positive(T s) {
    highest_positive = s > highest_positive ? s : highest_positive;
    positive_sum += s;
    positives += 1;
  }
};

// Columns that are negatives, all of them; false where one has been left out, and nothing is added.
// Two parts at once: one alone would wait for its own additions.
template <class T>
bool observe_negatives(const T* s, int64_t count, Observed<T>& o) {
  const int64_t part = count / 2;
  const T* other = s + part;
  T high = kLeftOut<T>, high1 = high, low = -high, low1 = low, sum = 0, sum1 = 0;
#pragma omp simd reduction(max : high, high1) reduction(min : low, low1) reduction(+ : sum, sum1)
  for (int64_t j = 0; j < part; ++j) {
    high = s[j] > high ? s[j] : high;
    high1 = other[j] > high1 ? other[j] : high1;
    low = s[j] < low ? s[j] : low;
    low1 = other[j] < low1 ? other[j] : low1;
    sum += s[j];
    sum1 += other[j];
  }
  if (count % 2 != 0) {
    const T last = s[count - 1];
    high = last > high ? last : high;
    low = last < low ? last : low;
    sum += last;
  }
  if (low <= kLeftOut<T> || low1 <= kLeftOut<T>) return false;
  high = high > high1 ? high : high1;
  o.highest_negative = high > o.highest_negative ? high : o.highest_negative;
  o.negative_sum += sum + sum1;
  o.negatives += count;
  return true;
}

// Counts of a chunk are held in T, exactly: a chunk is shorter than its mantissa.
template <bool with_ids, bool with_targets, class T>
void observe_chunk(const T* s, const T* targets, const int64_t* ids, int64_t id, int64_t count,
                   Observed<T>& o) {
  T highest = kLeftOut<T>, positive_highest = kLeftOut<T>, sum = 0, positive_sum = 0, positives = 0,
    by_id = 0, by_score = 0;
#pragma omp simd reduction(max : highest, positive_highest) \
    reduction(+ : sum, positive_sum, positives, by_id, by_score)
  for (int64_t j = 0; j < count; ++j) {
    const bool out = s[j] == kLeftOut<T>, same = with_ids && ids[j] == id;
    const bool own = with_targets && targets[j] > T(0);
    const T negative = out || same || own ? kLeftOut<T> : s[j];
    highest = negative > highest ? negative : highest;
    sum += out || same || own ? T(0) : s[j];
    if constexpr (with_targets) {
      const bool counts = own && !out && !same;
      const T positive = counts ? s[j] : kLeftOut<T>;
      positive_highest = positive > positive_highest ? positive : positive_highest;
      positive_sum += counts ? s[j] : T(0);
      positives += counts ? T(1) : T(0);
    }
    if constexpr (with_ids) by_id += same ? T(1) : T(0);
    by_score += out && !same ? T(1) : T(0);
  }
  o.highest_negative = highest > o.highest_negative ? highest : o.highest_negative;
  o.negative_sum += sum;
  o.negatives += T(count) - positives - by_id - by_score;  // every pair is one of the four
  if constexpr (with_targets) {
    o.highest_positive =
        positive_highest > o.highest_positive ? positive_highest : o.highest_positive;
    o.positive_sum += positive_sum;
    o.positives += positives;
  }
  o.by_id += by_id;
  o.by_score += by_score;
}

// Columns [begin, end) of a row.
template <bool with_ids, bool with_targets, class T>
void observe_part(const Block<T>& b, int64_t row, int64_t begin, int64_t end, Observed<T>& o) {
  const int64_t id = with_ids ? b.row_ids[row] : 0;
  for_chunks(begin, end, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    if constexpr (with_targets) load_targets(b, row, at, n, targets);
    observe_chunk<with_ids, with_targets>(b.scores + row * b.stride + at, targets,
                                          with_ids ? b.column_ids + at : nullptr, id, n, o);
  });
}

// A whole row but for the columns `stops` of it, where all others are negatives; false where they are
// not. Another column's score stands in for those, so that the row is one run of columns.
template <class T>
bool observe_row(const Block<T>& b, int64_t row, const int64_t (&stops)[2], Observed<T>& o) {
  T* s = b.scores + row * b.stride;
  int64_t within[2], count = 0, other = 0;
  for (const int64_t stop : stops) {
    if (stop >= 0 && stop < b.columns && !(count && stop == within[0])) within[count++] = stop;
  }
  for (int64_t k = 0; k < count; ++k) other += within[k] == other;  // they ascend
  if (other >= b.columns) return false;
  T kept[2];
  for (int64_t k = 0; k < count; ++k) {
    kept[k] = s[within[k]];
    s[within[k]] = s[other];
  }
  Observed<T> found;
  bool all = true;
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    all = all && observe_negatives(s + at, n, found);
  });
  for (int64_t k = 0; k < count; ++k) s[within[k]] = kept[k];
  if (!all) return false;
  found.negative_sum -= double(count) * s[other];
  found.negatives -= count;
  o = found;
  return true;
}

// Before the epilogue of a loss, which marks pairs by their indices and takes margins. Adds to the
// numbers of each row, `kObserved` apart, in the order of SEEN in fastsim/batch_metrics.py.
template <class T>
void observe(const Block<T>& b, Observe<T> to_rows, int64_t begin, int64_t end) {
  const bool targets = has_matrix_targets(b);
  const auto part = b.row_ids ? targets ? observe_part<true, true, T> : observe_part<true, false, T>
                    : targets ? observe_part<false, true, T>
                              : observe_part<false, false, T>;
  const bool plain = !b.row_ids && !targets && b.skip != Skip::lower;
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    const int64_t diagonal = b.row0 + row - b.column0;
    const int64_t positive = b.positives ? b.positive(row) : -1;
    Observed<T> o;
    // Around the row's positive and a skipped diagonal: those of two columns that are there.
    int64_t from = b.skip == Skip::lower && diagonal >= 0 ? smaller(diagonal + 1, b.columns) : 0;
    int64_t stops[2] = {positive, b.skip == Skip::diagonal ? diagonal : -1};
    if (stops[0] > stops[1]) {
      const int64_t later = stops[0];
      stops[0] = stops[1];
      stops[1] = later;
    }
    if (!plain || !observe_row(b, row, stops, o)) {
      for (const int64_t stop : stops) {
        if (stop < from || stop >= b.columns) continue;
        part(b, row, from, stop, o);
        from = stop + 1;
      }
      part(b, row, from, b.columns, o);
    }
    if (positive >= 0) {
      if (s[positive] == kLeftOut<T>) {
        o.by_score += 1;
      } else {
        o.add_positive(s[positive]);
      }
    }
    double* to = to_rows.seen + row * kObserved;
    const double numbers[kObserved] = {o.highest_negative, o.highest_positive, o.negative_sum,
                                       o.negatives,        o.positive_sum,     o.positives,
                                       o.by_id,            o.by_score};
    for (int k = 0; k < kObserved; ++k) {
      to[k] = k < 2 ? (numbers[k] > to[k] ? numbers[k] : to[k]) : to[k] + numbers[k];
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
