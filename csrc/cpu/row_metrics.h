// Records the row metrics of a block: what `fastsim.metrics` needs of its scores beside the loss
// (fastsim/batch_metrics.py). The scores stay as they are.
#pragma once

#include "isa.h"
#include "pairs.h"
#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The number of columns whose scores are added up before the sum becomes a double: at most some
// hundred per lane.
constexpr int64_t kRun = 4 * kChunk;

// The metrics of one row. A pair with the row's id is going to be left out by id; any other pair
// with the score kLeftOut has been left out by score. All other pairs are positives or negatives.
template <class T>
struct RunningMetrics {
  T highest_negative = kLeftOut<T>, highest_positive = kLeftOut<T>;
  double negative_sum = 0, negatives = 0, positive_sum = 0, positives = 0, by_id = 0, by_score = 0;

  void add_positive(T s) {
    highest_positive = s > highest_positive ? s : highest_positive;
    positive_sum += s;
    positives += 1;
  }
};

// Records `count` columns, all of which are negatives. If one of them has been left out, it returns
// false and records nothing. There are four sums, as a single sum would wait for its own additions.
template <class T>
bool record_negatives(const T* s, int64_t count, RunningMetrics<T>& metrics) {
  constexpr int64_t kWays = 4, kWide = kLanes<T>;
  const auto greater_of = [](auto a, auto b) { return a > b ? a : b; };
  Vector<T> high[kWays], sum[kWays] = {};
  for (auto& top : high) top = Vector<T>{} + kLeftOut<T>;
  int64_t at = 0;
  for (; at + kWays * kWide <= count; at += kWays * kWide) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < kWays; ++k) {
      const Vector<T> scores = vector_at(s + at + k * kWide);
      high[k] = greater_of(scores, high[k]);
      sum[k] += scores;
    }
  }
  for (; at + kWide <= count; at += kWide) {
    high[0] = greater_of(vector_at(s + at), high[0]);
    sum[0] += vector_at(s + at);
  }
  const Vector<T> highs =
      greater_of(greater_of(high[0], high[1]), greater_of(high[2], high[3]));
  const Vector<T> sums = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  T highest = kLeftOut<T>, total = 0;
#pragma omp simd reduction(max : highest) reduction(+ : total)
  for (int64_t k = 0; k < kWide; ++k) {
    highest = highs[k] > highest ? highs[k] : highest;
    total += sums[k];
  }
  for (; at < count; ++at) {
    highest = greater_of(s[at], highest);
    total += s[at];
  }
  // The score kLeftOut outweighs the sum of all others, unless one of these is as large.
  const T large = -kLeftOut<T> / T(4 * kRun);
  if (highest > large || total <= kLeftOut<T> / 2) return false;
  metrics.highest_negative =
      highest > metrics.highest_negative ? highest : metrics.highest_negative;
  metrics.negative_sum += total;
  metrics.negatives += count;
  return true;
}

// Records `count` columns of a row, at most a chunk. The counts are exact, though they are of type
// T: a chunk has fewer columns than the mantissa of T can count.
template <bool with_ids, bool with_targets, class T>
void record_chunk(const T* s, const T* targets, const int64_t* ids, int64_t id, int64_t count,
                  RunningMetrics<T>& metrics) {
  T highest = kLeftOut<T>, positive_highest = kLeftOut<T>, sum = 0, positive_sum = 0, positives = 0,
    by_id = 0, by_score = 0;
#pragma omp simd reduction(max : highest, positive_highest) \
    reduction(+ : sum, positive_sum, positives, by_id, by_score)
  for (int64_t j = 0; j < count; ++j) {
    const bool left_out = s[j] == kLeftOut<T>, same_id = with_ids && ids[j] == id;
    const bool has_target = with_targets && targets[j] > T(0);
    const T negative = left_out || same_id || has_target ? kLeftOut<T> : s[j];
    highest = negative > highest ? negative : highest;
    sum += left_out || same_id || has_target ? T(0) : s[j];
    if constexpr (with_targets) {
      const bool is_positive = has_target && !left_out && !same_id;
      const T positive = is_positive ? s[j] : kLeftOut<T>;
      positive_highest = positive > positive_highest ? positive : positive_highest;
      positive_sum += is_positive ? s[j] : T(0);
      positives += is_positive ? T(1) : T(0);
    }
    if constexpr (with_ids) by_id += same_id ? T(1) : T(0);
    by_score += left_out && !same_id ? T(1) : T(0);
  }
  metrics.highest_negative =
      highest > metrics.highest_negative ? highest : metrics.highest_negative;
  metrics.negative_sum += sum;
  metrics.negatives += T(count) - positives - by_id - by_score;  // every pair is one of the four
  if constexpr (with_targets) {
    metrics.highest_positive =
        positive_highest > metrics.highest_positive ? positive_highest : metrics.highest_positive;
    metrics.positive_sum += positive_sum;
    metrics.positives += positives;
  }
  metrics.by_id += by_id;
  metrics.by_score += by_score;
}

// Records the columns [begin, end) of a row.
template <bool with_ids, bool with_targets, class T>
void record_columns(const Block<T>& b, int64_t row, int64_t begin, int64_t end,
                    RunningMetrics<T>& metrics) {
  const int64_t id = with_ids ? b.row_ids[row] : 0;
  for_chunks(begin, end, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    if constexpr (with_targets) load_targets(b, row, at, n, targets);
    record_chunk<with_ids, with_targets>(b.scores + row * b.stride + at, targets,
                                         with_ids ? b.column_ids + at : nullptr, id, n, metrics);
  });
}

// The columns of a row that may not be negatives, in ascending order: its positive, a skipped
// diagonal, and the columns with its group or its id.
struct SpecialColumns {
  static constexpr int64_t kMost = 32;

  int64_t count = 0, columns[kMost];

  // Adds a column, unless it is there already. Returns false if there is no room for it.
  bool add(int64_t column) {
    int64_t at = count;
    while (at > 0 && columns[at - 1] > column) --at;
    if (at > 0 && columns[at - 1] == column) return true;
    if (count == kMost) return false;
    for (int64_t k = count++; k > at; --k) columns[k] = columns[k - 1];
    columns[at] = column;
    return true;
  }
};

// Records a whole row in which all but a few columns are negatives. If the row is not like that, it
// returns false and records nothing. In the special columns the score of a negative stands in for
// their own until the end, so that the whole row is one run of negatives.
template <class T>
bool record_row(const Block<T>& b, int64_t row, int64_t positive, int64_t skipped,
                RunningMetrics<T>& metrics) {
  SpecialColumns special;
  bool room = (positive < 0 || special.add(positive)) && (skipped < 0 || special.add(skipped));
  if (b.akin.first) {
    const int64_t last = b.akin.first[row + 1];
    for (int64_t k = b.akin.first[row]; k < last; ++k) {
      room = room && special.add(b.akin.columns[k]);
    }
  }
  int64_t negative = 0;  // the first column that is not special
  for (int64_t k = 0; k < special.count; ++k) negative += special.columns[k] == negative;
  if (!room || negative >= b.columns) return false;
  T* s = b.scores + row * b.stride;
  T special_scores[SpecialColumns::kMost];
  for (int64_t k = 0; k < special.count; ++k) {
    special_scores[k] = s[special.columns[k]];
    s[special.columns[k]] = s[negative];
  }
  RunningMetrics<T> row_metrics;
  bool all_negatives = true;
  for (int64_t at = 0; at < b.columns && all_negatives; at += kRun) {
    all_negatives = record_negatives(s + at, min_of(kRun, b.columns - at), row_metrics);
  }
  // `volatile` makes these single stores: compilers would scatter a vector of scores.
  for (int64_t k = 0; k < special.count; ++k) {
    static_cast<volatile T&>(s[special.columns[k]]) = special_scores[k];
  }
  if (!all_negatives) return false;
  row_metrics.negative_sum -= double(special.count) * s[negative];
  row_metrics.negatives -= special.count;
  for (int64_t k = 0; k < special.count; ++k) {
    const int64_t column = special.columns[k];
    if (column == positive || column == skipped) continue;
    if (b.row_ids) {
      row_metrics.by_id += 1;
    } else if (special_scores[k] == kLeftOut<T>) {
      row_metrics.by_score += 1;
    } else {
      row_metrics.add_positive(special_scores[k]);
    }
  }
  metrics = row_metrics;
  return true;
}

// Merges the metrics of rows into b.row_metrics (rows, kRowMetrics), in the order of ROW_METRICS in
// fastsim/batch_metrics.py. Runs before the epilogue of a loss, which marks left-out pairs and
// subtracts margins.
template <class T>
void record_rows(const Block<T>& b, int64_t begin, int64_t end) {
  const bool targets = has_matrix_targets(b);
  const auto record = b.row_ids ? targets ? record_columns<true, true, T>
                                          : record_columns<true, false, T>
                      : targets ? record_columns<false, true, T>
                                : record_columns<false, false, T>;
  // Whether the special columns of each row are known.
  const bool known =
      b.akin.first ? b.row_ids || !(b.negative_target > T(0)) : !b.row_ids && !targets;
  const bool mostly_negatives = known && b.skip != Skip::lower;
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    const int64_t diagonal = b.row0 + row - b.column0;
    const int64_t positive = b.positives ? b.positive(row) : -1;
    const bool skips = b.skip == Skip::diagonal && diagonal >= 0 && diagonal < b.columns;
    const int64_t skipped = skips ? diagonal : -1;
    RunningMetrics<T> metrics;
    if (!mostly_negatives || !record_row(b, row, positive, skipped, metrics)) {
      // The columns before, between and after the positive and a skipped diagonal, which are -1 if
      // the block does not have them.
      int64_t from = b.skip == Skip::lower && diagonal >= 0 ? min_of(diagonal + 1, b.columns) : 0;
      for (const int64_t stop : {min_of(positive, skipped), max_of(positive, skipped)}) {
        if (stop < from) continue;
        record(b, row, from, stop, metrics);
        from = stop + 1;
      }
      record(b, row, from, b.columns, metrics);
    }
    if (positive >= 0) {
      if (s[positive] == kLeftOut<T>) {
        metrics.by_score += 1;
      } else {
        metrics.add_positive(s[positive]);
      }
    }
    double* to = b.row_metrics + row * kRowMetrics;
    const double values[kRowMetrics] = {
        metrics.highest_negative, metrics.highest_positive, metrics.negative_sum,
        metrics.negatives,        metrics.positive_sum,     metrics.positives,
        metrics.by_id,            metrics.by_score};
    for (int k = 0; k < kRowMetrics; ++k) {  // two maxima, then sums
      to[k] = k < 2 ? (values[k] > to[k] ? values[k] : to[k]) : to[k] + values[k];
    }
  }
}

// Records the row metrics and does nothing else. As for every kernel with PassKind::first_look,
// they are recorded before this is called (kernels.cpp), which leaves nothing to do.
template <class T>
void record_metrics(const Block<T>&, RecordMetrics<T>, int64_t, int64_t) {}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
