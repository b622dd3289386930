// What is added up over batches and ranks of what observe.h counted in each row.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "passes.h"
#include "scratch.h"
#include "side.h"

namespace fastsim {

// The numbers of a row (SEEN in fastsim/batch_metrics.py), and their sums, as TOTALS there.
struct Seen {
  double highest_negative, highest_positive, negative_sum, negatives, positive_sum, positives, by_id,
      by_score;
};
static_assert(sizeof(Seen) == kObserved * sizeof(double));

struct Totals {
  double rows, hits, rows_with_positive, hardest_sum, rows_with_negative, negative_sum, negatives,
      positive_sum, positives, by_id, by_score, squared_distances, distances, row_potential,
      row_potentials, column_potential, column_potentials;
};
constexpr int64_t kTotals = sizeof(Totals) / sizeof(double);

// Adds the numbers of so many rows; cosine: whether scores are cosines, and say what distances are.
inline void add_rows(Totals& t, const double* numbers, int64_t rows, bool cosine) {
  const Seen* seen = reinterpret_cast<const Seen*>(numbers);
  t.rows += rows;
  for (int64_t i = 0; i < rows; ++i) {
    const Seen& s = seen[i];
    const bool some = s.positives > 0, other = s.negatives > 0;
    t.hits += some && s.highest_positive > s.highest_negative;
    t.rows_with_positive += some;
    t.hardest_sum += other ? s.highest_negative : 0;
    t.rows_with_negative += other;
    t.negative_sum += s.negative_sum;
    t.negatives += s.negatives;
    t.positive_sum += s.positive_sum;
    t.positives += s.positives;
    t.by_id += s.by_id;
    t.by_score += s.by_score;
  }
  if (!cosine) return;
  t.squared_distances = 2 * (t.positives - t.positive_sum);
  t.distances = t.positives;
}

constexpr double kSharpness = 2;  // of the Gaussian potential exp(-t |x - y|^2)

// The sum of the potentials of rows i and i + half of the unit rows, over the first half.
template <class T>
double potential(const T* unit, int64_t half, int64_t width) {
  Scratch<T> potentials(half);
  over(half, width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().potentials(unit, unit + half * width, width, T(2 * kSharpness), potentials,
                                 begin, end);
  });
  double sum = 0;
  for (int64_t i = 0; i < half; ++i) sum += potentials[i];
  return sum;
}

// Adds the potentials of a side of unit rows.
template <class T>
void add_potentials(const Side<T>& side, double& sum, double& count) {
  const int64_t half = side.count / 2;
  sum += potential<T>(side, half, side.width);
  count += half;
}

inline void write(const Totals& totals, const Tensor& out, const char* name) {
  *reinterpret_cast<Totals*>(output<double>(out, name, kTotals)) = totals;
}

// The numbers (rows, kObserved) of rows of which no score has been looked at.
inline void clear_seen(double* seen, int64_t rows) {
  const double none = kLeftOut<double>;
  std::fill_n(reinterpret_cast<Seen*>(seen), rows, Seen{none, none, 0, 0, 0, 0, 0, 0});
}

// What a call that makes a loss does for `fastsim.metrics`. The numbers of its rows are added to
// `seen` (rows, kObserved), or where totals are wanted they are kept here until `write`.
template <class T>
class Watching {
 public:
  Watching(const Optional& seen, const Optional& totals, int64_t rows, bool cosine)
      : totals_(totals), rows_(rows), cosine_(cosine), own_(totals ? rows * kObserved : 0) {
    if (totals) clear_seen(own_, rows);
    double* const of_caller = output<double>(seen, "seen", rows * kObserved);
    numbers_ = totals ? own_ : of_caller;
  }

  // Of unit rows, before anything takes their place.
  void look_at_rows(const Side<T>& side) {
    if (totals_ && cosine_) add_potentials(side, batch_.row_potential, batch_.row_potentials);
  }
  void look_at_columns(const Side<T>& side) {
    if (totals_ && cosine_) add_potentials(side, batch_.column_potential, batch_.column_potentials);
  }

  // The numbers of the rows from `first` on, for Observing; null: nobody asks.
  double* numbers(int64_t first) const { return numbers_ ? numbers_ + first * kObserved : nullptr; }

  // The totals, where they are wanted.
  void write() {
    if (!totals_) return;
    add_rows(batch_, own_, rows_, cosine_);
    fastsim::write(batch_, *totals_, "totals");
  }

 private:
  const Optional& totals_;
  const int64_t rows_;
  const bool cosine_;
  const Scratch<double> own_;
  double* numbers_;
  Totals batch_{};
};

}  // namespace fastsim
