// The totals of a batch for `fastsim.metrics`: sums of the row metrics (row_metrics.h) that can be
// added up over batches and ranks.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "passes.h"
#include "scratch.h"
#include "side.h"

namespace fastsim {

// The metrics of a row, in the order of ROW_METRICS in fastsim/batch_metrics.py.
struct RowMetrics {
  double highest_negative, highest_positive, negative_sum, negatives, positive_sum, positives,
      by_id, by_score;
};
static_assert(sizeof(RowMetrics) == kRowMetrics * sizeof(double));

// The totals of all rows, in the order of TOTALS in fastsim/batch_metrics.py.
struct Totals {
  double rows, hits, rows_with_positive, hardest_sum, rows_with_negative, negative_sum, negatives,
      positive_sum, positives, by_id, by_score, squared_distances, distances, row_potential,
      row_potentials, column_potential, column_potentials;
};
constexpr int64_t kTotals = sizeof(Totals) / sizeof(double);

// Adds the metrics (rows, kRowMetrics) of rows to the totals. cosine: whether scores are cosines;
// only then do they give distances.
inline void add_rows(Totals& t, const double* row_metrics, int64_t rows, bool cosine) {
  const RowMetrics* metrics_of_rows = reinterpret_cast<const RowMetrics*>(row_metrics);
  t.rows += rows;
  for (int64_t i = 0; i < rows; ++i) {
    const RowMetrics& row = metrics_of_rows[i];
    const bool has_positive = row.positives > 0, has_negative = row.negatives > 0;
    t.hits += has_positive && row.highest_positive > row.highest_negative;
    t.rows_with_positive += has_positive;
    t.hardest_sum += has_negative ? row.highest_negative : 0;
    t.rows_with_negative += has_negative;
    t.negative_sum += row.negative_sum;
    t.negatives += row.negatives;
    t.positive_sum += row.positive_sum;
    t.positives += row.positives;
    t.by_id += row.by_id;
    t.by_score += row.by_score;
  }
  if (!cosine) return;
  t.squared_distances = 2 * (t.positives - t.positive_sum);
  t.distances = t.positives;
}

constexpr double kSharpness = 2;  // t of the Gaussian potential exp(-t |x - y|^2)

// The sum of the potentials of the pairs of unit rows i and i + half, over i < half.
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

// Adds the potentials of the unit rows of a side to `sum`, and their number to `count`.
template <class T>
void add_potentials(const Side<T>& side, double& sum, double& count) {
  const int64_t half = side.count / 2;
  sum += potential<T>(side, half, side.width);
  count += half;
}

inline void write(const Totals& totals, const Tensor& out, const char* name) {
  *reinterpret_cast<Totals*>(output<double>(out, name, kTotals)) = totals;
}

// Sets `row_metrics` (rows, kRowMetrics) to the metrics of rows without any scores.
inline void clear_row_metrics(double* row_metrics, int64_t rows) {
  const double none = kLeftOut<double>;
  std::fill_n(reinterpret_cast<RowMetrics*>(row_metrics), rows,
              RowMetrics{none, none, 0, 0, 0, 0, 0, 0});
}

// The metrics of one operator call that computes a loss. If `totals` is given, the row metrics are
// kept here until `write`. Otherwise they are merged into the caller's `row_metrics`
// (rows, kRowMetrics), if that is given.
template <class T>
class BatchMetrics {
 public:
  BatchMetrics(const Optional& row_metrics, const Optional& totals, int64_t rows, bool cosine)
      : totals_(totals), rows_(rows), cosine_(cosine), memory_(totals ? rows * kRowMetrics : 0) {
    if (totals) clear_row_metrics(memory_, rows);
    double* const caller_metrics = output<double>(row_metrics, "row_metrics", rows * kRowMetrics);
    row_metrics_ = totals ? memory_ : caller_metrics;
  }

  // Add the potentials of the unit rows of one side. Call these before anything else is written to
  // the memory of the unit rows.
  void add_row_potentials(const Side<T>& side) {
    if (totals_ && cosine_) add_potentials(side, batch_.row_potential, batch_.row_potentials);
  }
  void add_column_potentials(const Side<T>& side) {
    if (totals_ && cosine_) add_potentials(side, batch_.column_potential, batch_.column_potentials);
  }

  // The metrics of the rows from `first` on, for MetricsRecorder; null if none are wanted.
  double* row_metrics(int64_t first) const {
    return row_metrics_ ? row_metrics_ + first * kRowMetrics : nullptr;
  }

  // Writes the totals, if they are wanted.
  void write() {
    if (!totals_) return;
    add_rows(batch_, memory_, rows_, cosine_);
    fastsim::write(batch_, *totals_, "totals");
  }

 private:
  const Optional& totals_;
  const int64_t rows_;
  const bool cosine_;
  const Scratch<double> memory_;
  double* row_metrics_;
  Totals batch_{};
};

}  // namespace fastsim
