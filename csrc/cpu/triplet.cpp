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
constexpr int64_t kLeastSlices = 8;
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
        stride_(panel_stride<T>(part_columns_)),
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

// The losses and gradients of one call. x (N, D), y (M, D), `positives` and `parts` are those of
// `full_triplet`; to_x and to_y are its gradients or null.
template <class T>
class TripletLoss {
 public:
  struct Options {
    bool semi_hard;
    double margin;
    const T* row_weights;  // (N,), or null: every row has `weight`
    double weight;
  };

  TripletLoss(const Tensor& x, const Tensor& y, const Tensor& positives, int64_t parts,
              const Options& options, const BatchMetrics<T>& metrics, T* to_x, T* to_y)
      : options_(options), metrics_(metrics), rows_(matrix(x)), count_(x.size(0)),
        width_(x.size(1)), slice_count_(ceil_div(count_, kSliceRows)), to_x_(to_x), to_y_(to_y),
        columns_(y, parts == 0), triplets_(count_), inverse_(count_),
        slice_sums_(to_y ? slice_count_ * width_ : 0) {
    all_.rows = count_;
    all_.columns = y.size(0);
    all_.positives = input<int64_t>(positives, "positives", count_);
    check_positives(all_);
    if (parts != 0) split_.emplace(x, y, check_parts(parts), true);
  }

  // Computes the losses and the gradient of the rows, band by band.
  void process_rows() {
    share_out(slice_count_, 1, [&](int64_t begin, int64_t end) {
      const Scratch<T> unit_rows(kBandSlices * kSliceRows * width_);
      const int64_t band_slices = even_part(end - begin, kBandSlices, split_ ? kGroupSlices : 1);
      for (int64_t at = begin; at < end; at += band_slices) {
        const int64_t first = at * kSliceRows, last = std::min(end, at + band_slices) * kSliceRows;
        process_band(first, std::min(count_, last) - first, unit_rows);
      }
    }, kLeastSlices);
  }

  double loss() const { return triplets_.loss(); }

  // Computes the gradient of the columns, after `process_rows`.
  void process_columns() const {
    const std::vector<double> sums = sum_of_rows<T>(slice_sums_, slice_count_, width_);
    const std::vector<T> common_row(sums.begin(), sums.end());
    std::vector<int64_t> starts;
    std::vector<Share> shares;
    triplets_.by_column(columns_.count, starts, shares);
    const SharedGradient<T> y_gradient{columns_.from,
                                       columns_.inverse(),
                                       rows_,
                                       inverse_,
                                       width_,
                                       common_row.data(),
                                       nullptr,
                                       starts.data(),
                                       shares.data()};
    over(columns_.count, 4 * width_, [&](int64_t begin, int64_t end) {
      kernels().of<T>().shared_gradient(y_gradient, Scratch<T>(2 * width_),
                                        Scratch<double>(width_), to_y_, begin, end);
    });
  }

 private:
  // Computes the losses, the gradients and the slice sums of the `row_count` rows from `first` on.
  // unit_rows (row_count, D): memory.
  void process_band(int64_t first, int64_t row_count, T* unit_rows) {
    const auto& k = kernels().of<T>();
    k.unit_rows(rows_.from_row(first), width_, unit_rows, inverse_ + first, 0, row_count);
    choose_negatives(first, row_count, unit_rows);
    // Column 0 for each row, for products with the one row columns_.sum.
    static constexpr int64_t zeros[kBandSlices * kSliceRows] = {};
    k.chosen_rows({unit_rows, columns_.sum.data(), row_count, width_, 1, zeros, false},
                  triplets_.sums.data() + first, 0, row_count);
    triplets_.finish(all_.positives, options_.row_weights, options_.weight, options_.margin,
                     columns_.count - 1, first, first + row_count);
    if (to_y_) {
      for (int64_t at = 0; at < row_count; at += kSliceRows) {
        T* const out = slice_sums_ + (first + at) / kSliceRows * width_;
        k.multiply_columns(triplets_.common_score_grads.data() + first + at, 1,
                           std::min(kSliceRows, row_count - at), unit_rows + at * width_, width_,
                           out, false, {0, 1});
      }
    }
    if (to_x_) row_gradient(first, row_count);
  }

  // Finds the scores of the rows' positives and closest negatives, and records their metrics.
  void choose_negatives(int64_t first, int64_t row_count, const T* unit_rows) {
    const Scratch<uint16_t> operand(split_ ? split_->elements(row_count) : 0);
    if (split_) split_->pack(first, row_count, operand);
    const ComputeScores<T> score = [&](int64_t begin, int64_t end, T* to, int64_t stride) {
      if constexpr (std::is_same_v<T, float>) {
        if (split_) return split_->score(operand, first, row_count, begin, end, to, stride);
      }
      columns_.score(unit_rows, row_count, begin, end, to, stride);
    };
    const PanelScores<T> scores(score, row_count, all_.from_row(first));
    scores.positive_scores(triplets_.positive_scores.data() + first);
    const ClosestNegative<T> closest{options_.semi_hard, triplets_.positive_scores.data() + first,
                                     triplets_.closest_scores.data() + first,
                                     triplets_.closest_columns.data() + first};
    scores.each_part([&](Block<T>& b) {
      b.row_metrics = metrics_.row_metrics(first);
      kernels().of<T>().closest(b, closest, 0, row_count);
    });
  }

  // Computes the gradient of the rows of a band.
  void row_gradient(int64_t first, int64_t row_count) const {
    std::vector<int64_t> starts;
    std::vector<Share> shares;
    triplets_.by_row(first, first + row_count, starts, shares);
    const SharedGradient<T> x_gradient{rows_.from_row(first),
                                       inverse_ + first,
                                       columns_.from,
                                       columns_.inverse(),
                                       width_,
                                       columns_.sum.data(),
                                       triplets_.common_score_grads.data() + first,
                                       starts.data(),
                                       shares.data()};
    kernels().of<T>().shared_gradient(x_gradient, Scratch<T>(2 * width_), Scratch<double>(width_),
                                      to_x_ + first * width_, 0, row_count);
  }

  const Options options_;
  const BatchMetrics<T>& metrics_;
  const Matrix rows_;
  const int64_t count_, width_, slice_count_;
  T *const to_x_, *const to_y_;
  const UnitColumns<T> columns_;
  std::optional<SplitSides> split_;
  Block<T> all_{};
  Triplets<T> triplets_;
  // The inverse norms of the rows, (N,); for each slice of rows the sum of its unit rows times
  // their common score gradients, (slices, D).
  const Scratch<T> inverse_, slice_sums_;
};

// The loss of the anchors x (N, D) and the columns y (M, D). positives (N,): the column of each
// row's positive; all other columns are its negatives. parts: the number of bfloat16 parts of the
// operands of the scores; 0: products of unit rows. The other arguments are those of `in_one_call`.
void full_triplet(Tensor x, Tensor y, Tensor positives, Optional row_metrics, bool semi_hard,
                  double margin, int64_t parts, Optional weights, double weight, Optional grad_x,
                  Optional grad_y, Tensor total, Optional totals) {
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    STD_TORCH_CHECK(parts == 0 || (std::is_same_v<T, float>),
                    "fastsim: parts: wanted 0 for a total of float64, got ", parts);
    const int64_t count = x.size(0), width = x.size(1);
    check_matrix(y, "y", y.size(0), width);
    T* const to_x = output<T>(grad_x, "grad_x", count * width);
    T* const to_y = output<T>(grad_y, "grad_y", y.size(0) * width);
    T* const loss = output<T>(total, "total", 1);
    const T* row_weights = input<T>(weights, "weights", count);
    BatchMetrics<T> metrics(row_metrics, totals, count, true);
    TripletLoss<T> triplet_loss(x, y, positives, parts, {semi_hard, margin, row_weights, weight},
                                metrics, to_x, to_y);
    if (totals) {
      metrics.add_row_potentials(Side<T>(x, true));
      metrics.add_column_potentials(Side<T>(y, true));
    }
    triplet_loss.process_rows();
    metrics.write();
    *loss = T(triplet_loss.loss());
    if (to_y) triplet_loss.process_columns();
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
