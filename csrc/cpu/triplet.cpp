// The full triplet loss of a batch that is not small, and its gradient, in one operator. One product
// makes the scores and chooses the closest negatives; the mean negative is a product with the sum of
// all columns, and every gradient touches a few rows (fastsim/losses/full_triplet.py). A thread
// takes some rows from their norms to their gradient: it makes their scores with some panels of
// columns, looks at them while they are in its cache, and keeps no others.

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

// Rows whose part of a sum over all rows is made at once, whole register tiles: sums are the same
// however rows are shared out. A thread has the scores of several such units at once.
constexpr int64_t kUnit = 12, kUnits = 16;
constexpr int64_t kUnitsOfGroup = 8;  // units that fill whole blocks of products of operands
static_assert(kUnitsOfGroup * kUnit % kTileGroup == 0);
constexpr int64_t kLeastUnits = 4;  // of a thread's piece, for which all columns pass through its cache
constexpr int64_t kPanels = 8;  // of columns, whose scores are looked at while they are in cache

double hinge(double x) { return x <= 0 ? 0 : x; }  // keeps a NaN

// The losses of so many rows, and what the scores of each get of their gradients.
template <class T>
class Triplets {
 public:
  explicit Triplets(int64_t rows)
      : own(rows), sums(rows), closest(rows, kLeftOut<T>), columns(rows, -1), of_every(rows),
        losses_(rows), shares_(2 * rows) {}

  // Once the scores of the rows [begin, end) are known; `negatives` of each row.
  void finish(const int64_t* positives, const T* weights, double weight, double margin,
              int64_t negatives, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T of_row = weights ? weights[i] : T(weight);
      const double from_mean =
          negatives > 0 ? hinge((sums[i] - own[i]) / negatives - own[i] + margin) : 0;
      const double from_closest = columns[i] >= 0 ? hinge(double(closest[i]) - own[i] + margin) : 0;
      losses_[i] = of_row * (from_mean + from_closest);
      of_every[i] = from_mean == 0 ? T(0) : of_row / T(negatives);
      const double of_own = -of_row * ((from_mean != 0) + (from_closest != 0)) - of_every[i];
      shares_[2 * i] = {of_own == 0 ? -1 : positives[i], of_own};
      shares_[2 * i + 1] = {from_closest == 0 ? -1 : columns[i], of_row};
    }
  }

  double loss() const {
    Sum sum;
    for (double each : losses_) sum += each;
    return sum;
  }

  // What columns add to the gradients of the rows [begin, end): from first[i] on to row begin + i.
  void by_row(int64_t begin, int64_t end, std::vector<int64_t>& first,
              std::vector<Share>& shares) const {
    first.assign(1, 0);
    shares.clear();
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t at : {2 * i, 2 * i + 1}) {
        if (shares_[at].row >= 0) shares.push_back(shares_[at]);
      }
      first.push_back(int64_t(shares.size()));
    }
  }

  // What rows add to the gradients of the columns, in the same form.
  void by_column(int64_t columns, std::vector<int64_t>& first, std::vector<Share>& shares) const {
    first.assign(columns + 1, 0);
    for (const Share& share : shares_) {
      if (share.row >= 0) ++first[share.row + 1];
    }
    for (int64_t j = 0; j < columns; ++j) first[j + 1] += first[j];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    shares.resize(first[columns]);
    for (size_t at = 0; at < shares_.size(); ++at) {
      const auto [column, factor] = shares_[at];
      if (column >= 0) shares[next[column]++] = {int64_t(at / 2), factor};
    }
  }

  // By row: the positive's score; the sum of all; the closest negative's score, and its column; the
  // score gradient that all columns have.
  std::vector<T> own, sums, closest;
  std::vector<int64_t> columns;
  std::vector<T> of_every;

 private:
  std::vector<double> losses_;
  std::vector<Share> shares_;  // of row i, two: what columns add to it, -1 for none
};

// Makes the scores of some rows with the columns [begin, end), of which `begin` is the first of a panel.
template <class T>
using Score = std::function<void(int64_t begin, int64_t end, T* scores, int64_t stride)>;

// The scores of some rows, some panels of columns at a time.
template <class T>
class PanelScores {
 public:
  // all: what decides the roles of their pairs.
  PanelScores(const Score<T>& score, int64_t rows, const Block<T>& all)
      : score_(score), rows_(rows), all_(all), wide_(kPanels * kernels().of<T>().panel_columns),
        stride_(wide_ + kAligned / int64_t(sizeof(T))),  // off a power of two, for the cache's sets
        places_(tiles(all.columns, wide_)), memory_((1 + keep()) * rows * stride_) {}

  // The scores of the positives, by row: what the others are compared with.
  void of_positives(T* own) const {
    for (size_t part = 0; part < places_.size(); ++part) {
      if (places_[part] > 0) fill(part);
    }
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t column = all_.positives[i], part = column / wide_;
      own[i] = at(part)[i * stride_ + column % wide_];
    }
  }

  // f(block) for all parts, in the order of the columns; after `of_positives`.
  template <class F>
  void each(const F& f) const {
    for (size_t part = 0; part < places_.size(); ++part) {
      if (places_[part] == 0) fill(part);
      Block<T> b = all_;
      b.scores = at(part);
      b.stride = stride_;
      b.rows = rows_;
      b.column0 = part * wide_;
      b.columns = std::min(wide_, all_.columns - b.column0);
      f(b);
    }
  }

 private:
  // Gives those parts that hold a positive places of their own, and says how many there are.
  int64_t keep() {
    int64_t kept = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      int64_t& place = places_[all_.positives[i] / wide_];
      if (place == 0) place = ++kept;
    }
    return kept;
  }

  T* at(int64_t part) const { return memory_ + places_[part] * rows_ * stride_; }

  void fill(int64_t part) const {
    const int64_t begin = part * wide_;
    score_(begin, std::min(all_.columns, begin + wide_), at(part), stride_);
  }

  const Score<T>& score_;
  const int64_t rows_;
  const Block<T> all_;
  const int64_t wide_, stride_;
  std::vector<int64_t> places_;  // in memory, of each part; 0: that of those which are not kept
  const Scratch<T> memory_;
};

// positives (N,): columns. parts: of bfloat16, of the products that make the scores; 0 for products of
// unit rows. The rest as of `whole`; all columns but the positive are negatives.
void full_triplet(Tensor x, Tensor y, Tensor positives, Optional seen, bool semi_hard,
                  double margin, int64_t parts, Optional weights, double weight, Optional grad_x,
                  Optional grad_y, Tensor total, Optional totals) {
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    const auto& k = kernels().of<T>();
    STD_TORCH_CHECK(parts == 0 || (std::is_same_v<T, float>),
                    "fastsim: parts: wanted 0 for a total of float64, got ", parts);
    const Matrix rows = matrix(x);
    const int64_t count = x.size(0), width = x.size(1), units = tiles(count, kUnit);
    check_matrix(y, "y", y.size(0), width);
    T* const to_x = output<T>(grad_x, "grad_x", count * width);
    T* const to_y = output<T>(grad_y, "grad_y", y.size(0) * width);
    T* const loss = output<T>(total, "total", 1);
    Block<T> all{};
    all.rows = count;
    all.columns = y.size(0);
    all.positives = input<int64_t>(positives, "positives", count);
    check_positives(all);

    Watching<T> watching(seen, totals, count, true);
    if (totals) {
      watching.look_at_rows(Side<T>(x, true));
      watching.look_at_columns(Side<T>(y, true));
    }
    const UnitColumns<T> columns(y, parts == 0);
    std::optional<SplitSides> split;
    if (parts != 0) split.emplace(x, y, check_parts(parts), true);
    const T* of_rows = input<T>(weights, "weights", count);
    Triplets<T> triplets(count);
    const Scratch<T> inverse(count), of_units(to_y ? units * width : 0);
    const int64_t the_sum[kUnits * kUnit] = {};  // the one row that each is multiplied with
    const auto finish = [&](int64_t first, int64_t high, T* unit) {
      k.unit_rows(rows.from_row(first), width, unit, inverse + first, 0, high);
      const Scratch<uint16_t> operand(split ? split->elements(high) : 0);
      if (split) split->pack(first, high, operand);
      const Score<T> score = [&](int64_t begin, int64_t end, T* to, int64_t stride) {
        if constexpr (std::is_same_v<T, float>) {
          if (split) return split->score(operand, first, high, begin, end, to, stride);
        }
        columns.score(unit, high, begin, end, to, stride);
      };
      const PanelScores<T> scores(score, high, all.from_row(first));
      scores.of_positives(triplets.own.data() + first);
      const ClosestNegative<T> closest{semi_hard, triplets.own.data() + first,
                                       triplets.closest.data() + first,
                                       triplets.columns.data() + first};
      scores.each([&](Block<T>& b) {
        b.seen = watching.numbers(first);
        k.closest(b, closest, 0, high);
      });
      k.chosen_rows({unit, columns.sum.data(), high, width, 1, the_sum, false},
                    triplets.sums.data() + first, 0, high);
      triplets.finish(all.positives, of_rows, weight, margin, columns.count - 1, first,
                      first + high);
      if (to_y) {
        for (int64_t at = 0; at < high; at += kUnit) {
          T* const out = of_units + (first + at) / kUnit * width;
          k.multiply_columns(triplets.of_every.data() + first + at, 1, std::min(kUnit, high - at),
                             unit + at * width, width, out, false, {0, 1});
        }
      }
      if (!to_x) return;
      std::vector<int64_t> starts;
      std::vector<Share> shares;
      triplets.by_row(first, first + high, starts, shares);
      const Scratch<T> memory(2 * width);
      const Scratch<double> wide(width);
      const SharedGradient<T> of_x{rows.from_row(first),
                                   inverse + first,
                                   columns.from,
                                   columns.inverse(),
                                   width,
                                   columns.sum.data(),
                                   triplets.of_every.data() + first,
                                   starts.data(),
                                   shares.data()};
      k.shared_gradient(of_x, memory, wide, to_x + first * width, 0, high);
    };
    share_out(units, 1, [&](int64_t begin, int64_t end) {
      const Scratch<T> unit(kUnits * kUnit * width);
      const int64_t together = even_part(end - begin, kUnits, split ? kUnitsOfGroup : 1);
      for (int64_t at = begin; at < end; at += together) {
        const int64_t first = at * kUnit, last = std::min(end, at + together) * kUnit;
        finish(first, std::min(count, last) - first, unit);
      }
    }, kLeastUnits);
    watching.write();
    *loss = T(triplets.loss());
    if (!to_y) return;

    const std::vector<double> sums = sum_of_rows<T>(of_units, units, width);
    const std::vector<T> all_rows(sums.begin(), sums.end());
    std::vector<int64_t> starts;
    std::vector<Share> shares;
    triplets.by_column(columns.count, starts, shares);
    const SharedGradient<T> of_y{columns.from,    columns.inverse(), rows,          inverse, width,
                                 all_rows.data(), nullptr,           starts.data(), shares.data()};
    over(columns.count, 4 * width, [&](int64_t begin, int64_t end) {
      k.shared_gradient(of_y, Scratch<T>(2 * width), Scratch<double>(width), to_y, begin, end);
    });
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(full_triplet,
                   "(Tensor x, Tensor y, Tensor positives, Tensor(seen!)? seen, bool semi_hard, "
                   "float margin, int parts, Tensor? weights, float weight, "
                   "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
                   "Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
