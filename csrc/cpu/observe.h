// What a block's scores say of a batch, beside any loss: fastsim/batch_metrics.py. The scores are then
// as they were.
#pragma once

#include "isa.h"
#include "pairs.h"
#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Columns whose scores are added up before the sum is a double: no more than some hundred in a lane.
constexpr int64_t kRun = 4 * kChunk;

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
// Four parts at once: one alone would wait for its own additions.
template <class T>
bool observe_negatives(const T* s, int64_t count, Observed<T>& o) {
  constexpr int64_t kParts = 4, kWide = kLanes<T>;
  const auto higher = [](auto a, auto b) { return a > b ? a : b; };
  Vector<T> high[kParts], sum[kParts] = {};
  for (auto& part : high) part = Vector<T>{} + kLeftOut<T>;
  int64_t at = 0;
  for (; at + kParts * kWide <= count; at += kParts * kWide) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < kParts; ++k) {
      const Vector<T> part = vector_at(s + at + k * kWide);
      high[k] = higher(part, high[k]);
      sum[k] += part;
    }
  }
  for (; at + kWide <= count; at += kWide) {
    high[0] = higher(vector_at(s + at), high[0]);
    sum[0] += vector_at(s + at);
  }
  const Vector<T> highs = higher(higher(high[0], high[1]), higher(high[2], high[3]));
  const Vector<T> sums = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  T highest = kLeftOut<T>, total = 0;
#pragma omp simd reduction(max : highest) reduction(+ : total)
  for (int64_t k = 0; k < kWide; ++k) {
    highest = highs[k] > highest ? highs[k] : highest;
    total += sums[k];
  }
  for (; at < count; ++at) {
    highest = higher(s[at], highest);
    total += s[at];
  }
  // One that is left out outweighs all others, unless one of them is as large.
  const T large = -kLeftOut<T> / T(4 * kRun);
  if (highest > large || total <= kLeftOut<T> / 2) return false;
  o.highest_negative = highest > o.highest_negative ? highest : o.highest_negative;
  o.negative_sum += total;
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

// The columns of a row that may be no negatives, ascending: its positive, a skipped diagonal, those of
// its group or its id.
struct Stops {
  static constexpr int64_t kMost = 32;

  int64_t count = 0, columns[kMost];

  // False where there is no room.
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

// A whole row of which all but a few columns are negatives; false where they are not, and nothing is
// added. At those few another column's score stands in, so that the row is one run of columns.
template <class T>
bool observe_row(const Block<T>& b, int64_t row, int64_t positive, int64_t skipped,
                 Observed<T>& o) {
  Stops stops;
  bool room = (positive < 0 || stops.add(positive)) && (skipped < 0 || stops.add(skipped));
  if (b.akin.first) {
    const int64_t last = b.akin.first[row + 1];
    for (int64_t k = b.akin.first[row]; k < last; ++k) room = room && stops.add(b.akin.columns[k]);
  }
  int64_t other = 0;
  for (int64_t k = 0; k < stops.count; ++k) other += stops.columns[k] == other;
  if (!room || other >= b.columns) return false;
  T* s = b.scores + row * b.stride;
  T kept[Stops::kMost];
  for (int64_t k = 0; k < stops.count; ++k) {
    kept[k] = s[stops.columns[k]];
    s[stops.columns[k]] = s[other];
  }
  Observed<T> found;
  bool all = true;
  for (int64_t at = 0; at < b.columns && all; at += kRun) {
    all = observe_negatives(s + at, smaller(kRun, b.columns - at), found);
  }
  // One by one: a vector of them would be scattered.
  for (int64_t k = 0; k < stops.count; ++k) {
    static_cast<volatile T&>(s[stops.columns[k]]) = kept[k];
  }
  if (!all) return false;
  found.negative_sum -= double(stops.count) * s[other];
  found.negatives -= stops.count;
  for (int64_t k = 0; k < stops.count; ++k) {
    const int64_t column = stops.columns[k];
    if (column == positive || column == skipped) continue;
    if (b.row_ids) {
      found.by_id += 1;
    } else if (kept[k] == kLeftOut<T>) {
      found.by_score += 1;
    } else {
      found.add_positive(kept[k]);
    }
  }
  o = found;
  return true;
}

// Before the epilogue of a loss, which marks pairs by their indices and takes margins. Adds to the
// numbers b.seen of each row, `kObserved` apart, in the order of SEEN in fastsim/batch_metrics.py.
template <class T>
void observe_rows(const Block<T>& b, int64_t begin, int64_t end) {
  const bool targets = has_matrix_targets(b);
  const auto part = b.row_ids ? targets ? observe_part<true, true, T> : observe_part<true, false, T>
                    : targets ? observe_part<false, true, T>
                              : observe_part<false, false, T>;
  const bool known = b.akin.first ? b.row_ids || !(b.negative_target > T(0)) : !b.row_ids && !targets;
  const bool plain = known && b.skip != Skip::lower;
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    const int64_t diagonal = b.row0 + row - b.column0;
    const int64_t positive = b.positives ? b.positive(row) : -1;
    const bool skips = b.skip == Skip::diagonal && diagonal >= 0 && diagonal < b.columns;
    const int64_t skipped = skips ? diagonal : -1;
    Observed<T> o;
    if (!plain || !observe_row(b, row, positive, skipped, o)) {
      // Around the row's positive and a skipped diagonal: those of two columns that are there.
      int64_t from = b.skip == Skip::lower && diagonal >= 0 ? smaller(diagonal + 1, b.columns) : 0;
      for (const int64_t stop : {smaller(positive, skipped), larger(positive, skipped)}) {
        if (stop < from) continue;
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
    double* to = b.seen + row * kObserved;
    const double numbers[kObserved] = {o.highest_negative, o.highest_positive, o.negative_sum,
                                       o.negatives,        o.positive_sum,     o.positives,
                                       o.by_id,            o.by_score};
    for (int k = 0; k < kObserved; ++k) {
      to[k] = k < 2 ? (numbers[k] > to[k] ? numbers[k] : to[k]) : to[k] + numbers[k];
    }
  }
}

// The scores observed and nothing else: the first look does that, here there is no other.
template <class T>
void observe(const Block<T>&, Observe<T>, int64_t, int64_t) {}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
