// The full triplet loss of a large batch and its gradient, in one operator
// (fastsim/losses/full_triplet.py). One product computes the scores, of which the closest negatives
// are chosen. The mean negative of a row follows from its product with the sum of all columns. So a
// gradient has one term from this sum and a few from single rows.
//
// A thread takes a band of rows from their norms to their gradient. It computes their scores a part
// of the columns at a time, and reads them while they are in its cache. It keeps only the parts
// that contain a positive.

#include <algorithm>
#include <functional>
#include <optional>
#include <type_traits>
#include <vector>

#include "amx_sides.h"
#include "arguments.h"
#include "operators.h"
#include "side.h"
#include "totals.h"
#include "unit_columns.h"

namespace fastsim {

namespace {

// The rows of a slice, which are whole register tiles. A sum over all rows consists of sums over
// the rows of each slice, so it is the same however rows are divided among threads.
constexpr int64_t kSliceRows = 12;
// The most slices in a band, the rows that a thread processes at a time.
constexpr int64_t kBandSlices = 16;
// The slices that fill whole groups of operand rows.
constexpr int64_t kGroupSlices = 8;
static_assert(kGroupSlices * kSliceRows % kTileGroup == 0);
// The least number of slices in a thread's piece. All columns pass through its cache once per
// piece.
constexpr int64_t kLeastSlices = 4;
// The micro-panels of columns in a part of the scores, which is read while it is in cache.
constexpr int64_t kPartPanels = 8;

double hinge(double x) { return x <= 0 ? 0 : x; }  // keeps a NaN

// The losses of the rows, and their score gradients. All columns of a row have a common score
// gradient; its positive and its closest negative each have a further one.
template <class T>
class Triplets {
 public:
  explicit Triplets(int64_t rows)
      : positive_scores(rows), sums(rows), closest_scores(rows, kLeftOut<T>),
        closest_columns(rows, -1), common_score_grads(rows), losses_(rows), shares_(2 * rows) {}

  // Computes the losses and score gradients of the rows [begin, end), whose scores have been
  // written to the public members. negatives: the number of negatives of each row.
  void finish(const int64_t* positives, const T* weights, double weight, double margin,
              int64_t negatives, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T row_weight = weights ? weights[i] : T(weight);
      const double from_mean =
          negatives > 0
              ? hinge((sums[i] - positive_scores[i]) / negatives - positive_scores[i] + margin)
              : 0 * positive_scores[i];
      const double from_closest =
          closest_columns[i] >= 0
              ? hinge(double(closest_scores[i]) - positive_scores[i] + margin)
              : 0;
      losses_[i] = row_weight * (from_mean + from_closest);
      common_score_grads[i] = from_mean == 0 ? T(0) : row_weight / T(negatives);
      const double positive_score_grad =
          -row_weight * ((from_mean != 0) + (from_closest != 0)) - common_score_grads[i];
      shares_[2 * i] = {positive_score_grad == 0 ? -1 : positives[i], positive_score_grad};
      shares_[2 * i + 1] = {from_closest == 0 ? -1 : closest_columns[i], row_weight};
    }
  }

  double loss() const {
    Sum sum;
    for (double each : losses_) sum += each;
    return sum;
  }

  // Lists the terms that single columns add to the gradients of the rows [begin, end). The terms of
  // row begin + i are shares[starts[i]] to shares[starts[i + 1] - 1].
  void by_row(int64_t begin, int64_t end, std::vector<int64_t>& starts,
              std::vector<Share>& shares) const {
    starts.assign(1, 0);
    shares.clear();
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t at : {2 * i, 2 * i + 1}) {
        if (shares_[at].row >= 0) shares.push_back(shares_[at]);
      }
      starts.push_back(int64_t(shares.size()));
    }
  }

  // Lists the terms that single rows add to the gradients of the columns, in the same form.
  void by_column(int64_t columns, std::vector<int64_t>& starts, std::vector<Share>& shares) const {
    starts.assign(columns + 1, 0);
    for (const Share& share : shares_) {
      if (share.row >= 0) ++starts[share.row + 1];
    }
    for (int64_t j = 0; j < columns; ++j) starts[j + 1] += starts[j];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    shares.resize(starts[columns]);
    for (size_t at = 0; at < shares_.size(); ++at) {
      const auto [column, factor] = shares_[at];
      if (column >= 0) shares[next[column]++] = {int64_t(at / 2), factor};
    }
  }

  // For each row: the score of its positive; the sum of all of its scores; the score of its closest
  // negative, and the column, -1 for none; the common score gradient.
  std::vector<T> positive_scores, sums, closest_scores;
  std::vector<int64_t> closest_columns;
  std::vector<T> common_score_grads;

 private:
  std::vector<double> losses_;
  // Two terms for each row, from its positive and from its closest negative; row -1 for none.
  std::vector<Share> shares_;
};

// Computes the scores of a band of rows with the columns [begin, end). `begin` is the first column
// of a micro-panel.
template <class T>
using ComputeScores = std::function<void(int64_t begin, int64_t end, T* scores, int64_t stride)>;

// The scores of a band of rows, a part of the columns at a time.
template <class T>
class PanelScores {
 public:
  // all: what decides the roles of the rows' pairs.
  PanelScores(const ComputeScores<T>& score, int64_t rows, const Block<T>& all)
      : score_(score), rows_(rows), all_(all),
        part_columns_(kPartPanels * kernels().of<T>().panel_columns),
        // No power of two: rows a power of two apart would share few cache sets.
        stride_(part_columns_ + kAligned / int64_t(sizeof(T))),
        places_(ceil_div(all.columns, part_columns_)), memory_((1 + keep()) * rows * stride_) {}

  // Writes the score of each row's positive, with which its other scores are compared.
  void positive_scores(T* scores) const {
    for (size_t part = 0; part < places_.size(); ++part) {
      if (places_[part] > 0) fill(part);
    }
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t column = all_.positives[i], part = column / part_columns_;
      scores[i] = at(part)[i * stride_ + column % part_columns_];
    }
  }

  // Calls f(block) for each part, in the order of the columns. `positive_scores` comes first.
  template <class F>
  void each_part(const F& f) const {
    for (size_t part = 0; part < places_.size(); ++part) {
      if (places_[part] == 0) fill(part);
      Block<T> b = all_;
      b.scores = at(part);
      b.stride = stride_;
      b.rows = rows_;
      b.column0 = part * part_columns_;
      b.columns = std::min(part_columns_, all_.columns - b.column0);
      f(b);
    }
  }

 private:
  // Gives each part that contains a positive a place of its own, and returns the number of these.
  int64_t keep() {
    int64_t kept = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      int64_t& place = places_[all_.positives[i] / part_columns_];
      if (place == 0) place = ++kept;
    }
    return kept;
  }

  T* at(int64_t part) const { return memory_ + places_[part] * rows_ * stride_; }

  void fill(int64_t part) const {
    const int64_t begin = part * part_columns_;
    score_(begin, std::min(all_.columns, begin + part_columns_), at(part), stride_);
  }

  const ComputeScores<T>& score_;
  const int64_t rows_;
  const Block<T> all_;
  const int64_t part_columns_, stride_;
  // The place of each part in memory. Place 0 is shared by the parts that are not kept.
  std::vector<int64_t> places_;
  const Scratch<T> memory_;
};

// The loss of the anchors x (N, D) and the columns y (M, D). positives (N,): the column of each
// row's positive; all other columns are its negatives. parts: the number of bfloat16 parts of the
// operands of the scores; 0: products of unit rows. The other arguments are those of `in_one_call`.
void full_triplet(Tensor x, Tensor y, Tensor positives, Optional row_metrics, bool semi_hard,
                  double margin, int64_t parts, Optional weights, double weight, Optional grad_x,
                  Optional grad_y, Tensor total, Optional totals) {
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    const auto& k = kernels().of<T>();
    STD_TORCH_CHECK(parts == 0 || (std::is_same_v<T, float>),
                    "fastsim: parts: wanted 0 for a total of float64, got ", parts);
    const Matrix rows = matrix(x);
    const int64_t count = x.size(0), width = x.size(1), slice_count = ceil_div(count, kSliceRows);
    check_matrix(y, "y", y.size(0), width);
    T* const to_x = output<T>(grad_x, "grad_x", count * width);
    T* const to_y = output<T>(grad_y, "grad_y", y.size(0) * width);
    T* const loss = output<T>(total, "total", 1);
    Block<T> all{};
    all.rows = count;
    all.columns = y.size(0);
    all.positives = input<int64_t>(positives, "positives", count);
    check_positives(all);

    BatchMetrics<T> metrics(row_metrics, totals, count, true);
    if (totals) {
      metrics.add_row_potentials(Side<T>(x, true));
      metrics.add_column_potentials(Side<T>(y, true));
    }
    const UnitColumns<T> columns(y, parts == 0);
    std::optional<SplitSides> split;
    if (parts != 0) split.emplace(x, y, check_parts(parts), true);
    const T* row_weights = input<T>(weights, "weights", count);
    Triplets<T> triplets(count);
    // slice_sums: for each slice the sum of its unit rows times their common score gradients.
    const Scratch<T> inverse(count), slice_sums(to_y ? slice_count * width : 0);
    // Column 0 for each row, for products with the one row columns.sum.
    const int64_t zeros[kBandSlices * kSliceRows] = {};
    // Computes the losses, the gradients and the slice_sums of the `row_count` rows from `first`
    // on. unit_rows (row_count, D): memory.
    const auto process_band = [&](int64_t first, int64_t row_count, T* unit_rows) {
      k.unit_rows(rows.from_row(first), width, unit_rows, inverse + first, 0, row_count);
      const Scratch<uint16_t> operand(split ? split->elements(row_count) : 0);
      if (split) split->pack(first, row_count, operand);
      const ComputeScores<T> score = [&](int64_t begin, int64_t end, T* to, int64_t stride) {
        if constexpr (std::is_same_v<T, float>) {
          if (split) return split->score(operand, first, row_count, begin, end, to, stride);
        }
        columns.score(unit_rows, row_count, begin, end, to, stride);
      };
      const PanelScores<T> scores(score, row_count, all.from_row(first));
      scores.positive_scores(triplets.positive_scores.data() + first);
      const ClosestNegative<T> closest{semi_hard, triplets.positive_scores.data() + first,
                                       triplets.closest_scores.data() + first,
                                       triplets.closest_columns.data() + first};
      scores.each_part([&](Block<T>& b) {
        b.row_metrics = metrics.row_metrics(first);
        k.closest(b, closest, 0, row_count);
      });
      k.chosen_rows({unit_rows, columns.sum.data(), row_count, width, 1, zeros, false},
                    triplets.sums.data() + first, 0, row_count);
      triplets.finish(all.positives, row_weights, weight, margin, columns.count - 1, first,
                      first + row_count);
      if (to_y) {
        for (int64_t at = 0; at < row_count; at += kSliceRows) {
          T* const out = slice_sums + (first + at) / kSliceRows * width;
          k.multiply_columns(triplets.common_score_grads.data() + first + at, 1,
                             std::min(kSliceRows, row_count - at), unit_rows + at * width, width,
                             out, false, {0, 1});
        }
      }
      if (!to_x) return;
      std::vector<int64_t> starts;
      std::vector<Share> shares;
      triplets.by_row(first, first + row_count, starts, shares);
      const Scratch<T> memory(2 * width);
      const Scratch<double> wide_sum(width);
      const SharedGradient<T> x_gradient{rows.from_row(first),
                                         inverse + first,
                                         columns.from,
                                         columns.inverse(),
                                         width,
                                         columns.sum.data(),
                                         triplets.common_score_grads.data() + first,
                                         starts.data(),
                                         shares.data()};
      k.shared_gradient(x_gradient, memory, wide_sum, to_x + first * width, 0, row_count);
    };
    share_out(slice_count, 1, [&](int64_t begin, int64_t end) {
      const Scratch<T> unit_rows(kBandSlices * kSliceRows * width);
      const int64_t band_slices = even_part(end - begin, kBandSlices, split ? kGroupSlices : 1);
      for (int64_t at = begin; at < end; at += band_slices) {
        const int64_t first = at * kSliceRows, last = std::min(end, at + band_slices) * kSliceRows;
        process_band(first, std::min(count, last) - first, unit_rows);
      }
    }, kLeastSlices);
    metrics.write();
    *loss = T(triplets.loss());
    if (!to_y) return;

    const std::vector<double> sums = sum_of_rows<T>(slice_sums, slice_count, width);
    const std::vector<T> common_row(sums.begin(), sums.end());
    std::vector<int64_t> starts;
    std::vector<Share> shares;
    triplets.by_column(columns.count, starts, shares);
    const SharedGradient<T> y_gradient{columns.from,
                                       columns.inverse(),
                                       rows,
                                       inverse,
                                       width,
                                       common_row.data(),
                                       nullptr,
                                       starts.data(),
                                       shares.data()};
    over(columns.count, 4 * width, [&](int64_t begin, int64_t end) {
      k.shared_gradient(y_gradient, Scratch<T>(2 * width), Scratch<double>(width), to_y, begin,
                        end);
    });
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(full_triplet,
                   "(Tensor x, Tensor y, Tensor positives, Tensor(row_metrics!)? row_metrics, "
                   "bool semi_hard, float margin, int parts, Tensor? weights, float weight, "
                   "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
                   "Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
