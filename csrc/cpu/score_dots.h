// The sum over all pairs of score times score gradient, from which the derivative by scale follows.
// The gradients of the rows give the same sum. But if score gradients have fewer parts than
// kAllParts (amx.h), that sum has fewer digits than a float32, and may cancel.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "amx_operands.h"
#include "block.h"
#include "scratch.h"

namespace fastsim {
namespace {

class ScoreDots {
 public:
  // wanted: whether the sum is needed. rows: those of the whole matrix.
  ScoreDots(bool wanted, int64_t rows) : of_rows_(wanted ? rows : 0) {}

  explicit operator bool() const { return !of_rows_.empty(); }

  // Calls process(part, row) for each part of a block: for some of its rows, the first of which is
  // row `row` of the matrix. `process` turns scores into score gradients, so a part's scores are
  // copied first. If the sum is not wanted, the only part is the block. first: its first row.
  template <class Process>
  void of_block(const Block<float>& b, int64_t first, const Process& process) {
    if (!*this) return process(b, first);
    const int64_t tall = std::clamp<int64_t>(kScoresAtOnce / b.columns, 1, b.rows);
    const Scratch<float> scores(tall * b.columns);
    for (int64_t i = 0; i < b.rows; i += tall) {
      const Block<float> part = rows_of(b, i, std::min(tall, b.rows - i));
      for (int64_t r = 0; r < part.rows; ++r) {
        std::copy_n(part.scores + r * part.stride, part.columns, scores + r * part.columns);
      }
      process(part, first + i);
      amx_in_use().add_row_dots(scores, part.columns, part.scores, part.stride, part.rows,
                                part.columns, of_rows_.data() + first + i);
    }
  }

  double total() const { return std::accumulate(of_rows_.begin(), of_rows_.end(), 0.0); }

 private:
  static constexpr int64_t kScoresAtOnce = 1 << 16;  // 256 KB, which stay in the L2 cache

  // Rows [first, first + count) of a block.
  static Block<float> rows_of(const Block<float>& b, int64_t first, int64_t count) {
    Block<float> part = b.from_row(first);
    part.scores += first * b.stride;
    part.rows = count;
    if (part.row_metrics) part.row_metrics += first * kRowMetrics;
    return part;
  }

  std::vector<double> of_rows_;  // the sum of each row; a thread adds to those of its own bands
};

}  // namespace
}  // namespace fastsim
