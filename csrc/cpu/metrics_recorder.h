// Prepares a block for the recording of row metrics (row_metrics.h) by the first kernel that reads
// its scores. It finds the columns with the id or the group of each row, once for all rows; the
// kernel would have to compare every pair.
#pragma once

#include "arguments.h"
#include "columns_by_row.h"
#include "threads.h"

namespace fastsim {

// While a MetricsRecorder lives, the first kernel that reads the scores of its block merges their
// metrics into `row_metrics` (rows, kRowMetrics).
template <class T>
class MetricsRecorder {
 public:
  MetricsRecorder(Block<T>& b, double* row_metrics) {
    b.row_metrics = row_metrics;
    const bool by_id = b.row_ids, by_group = b.row_groups && !b.dense.data;
    if (by_id == by_group || b.dense.data) return;
    if (by_group && b.few_positives.first) {  // found already
      b.akin = b.few_positives;
      return;
    }
    const int64_t* rows = by_id ? b.row_ids : b.row_groups;
    const int64_t* columns = by_id ? b.column_ids : b.column_groups;
    // With more columns than this, comparing every pair is faster.
    const int64_t most = b.rows * (1 + b.columns / kPairsPerColumn);
    if (akin_.find(rows, b.rows, columns, b.columns, most)) b.akin = akin_.lists();
  }

  MetricsRecorder(Block<T>& b, const Tensor& row_metrics)
      : MetricsRecorder(b, output<double>(row_metrics, "row_metrics", b.rows * kRowMetrics)) {}

 private:
  static constexpr int64_t kPairsPerColumn = 16;

  ColumnsByRow akin_;
};

// Records the row metrics of a block, for which a MetricsRecorder lives, now instead of while the
// first kernel reads its scores.
template <class T>
void record_at_once(const Block<T>& b) {
  over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().record_metrics(b, {}, begin, end);
  });
}

}  // namespace fastsim
