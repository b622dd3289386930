// The full triplet loss of a batch that is not small, and its gradient, in one operator. One product
// makes the scores and chooses the closest negatives; the mean negative is a product with the sum of
// all columns, and every gradient touches a few rows (fastsim/losses/full_triplet.py).

#include <algorithm>
#include <optional>
#include <vector>

#include "arguments.h"
#include "naming.h"
#include "observing.h"
#include "operators.h"
#include "panel.h"
#include "side.h"
#include "totals.h"

namespace fastsim {

namespace {

constexpr int64_t kTogether = 8;  // rows whose gradient stays near the processor until it is finished

double hinge(double x) { return x <= 0 ? 0 : x; }  // keeps a NaN

// What the losses are made of, and what the scores of each row get of their gradients.
template <class T>
class Triplets {
 public:
  explicit Triplets(int64_t rows)
      : own(rows), mean(rows), closest(rows, kLeftOut<T>), of_mean(rows), columns(2 * rows, -1),
        of_chosen(2 * rows) {}

  // The weighted sum of the losses; the sums of scores in `mean` have become means.
  double finish(const T* weights, double margin, int64_t negatives) {
    const int64_t rows = own.size();
    Sum loss;
    for (int64_t i = 0; i < rows; ++i) {
      const double from_mean = negatives > 0 ? hinge((mean[i] - own[i]) / negatives - own[i] + margin) : 0;
      const double from_closest =
          columns[rows + i] >= 0 ? hinge(double(closest[i]) - own[i] + margin) : 0;
      loss += weights[i] * (from_mean + from_closest);
      of_mean[i] = from_mean == 0 ? T(0) : weights[i] / T(negatives);
      of_chosen[i] = -weights[i] * ((from_mean != 0) + (from_closest != 0)) - of_mean[i];
      of_chosen[rows + i] = from_closest == 0 ? 0 : weights[i];
    }
    return loss;
  }

  // own: the positives' scores; mean: of each row with the sum of all columns; of_mean: the score
  // gradient of every column. columns (2, N): the positive's and the closest negative's, -1 for none;
  // of_chosen: their score gradients beyond of_mean.
  std::vector<T> own, mean, closest, of_mean;
  std::vector<int64_t> columns;
  std::vector<double> of_chosen;
};

// grad[i] = base(i) + what `chosen` adds to the rows [begin, end), through the unit rows.
template <class T, class Base, class Chosen>
void finish_rows(const Side<T>& side, T* grad, const Base& base, const Chosen& chosen) {
  std::vector<T> dots(side.count);
  over(side.count, 4 * side.width, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kTogether) {
      const int64_t last = std::min(end, first + kTogether);
      for (int64_t i = first; i < last; ++i) base(i, grad + i * side.width);
      chosen(first, last);
      side.finish(grad, dots.data(), first, last);
    }
  });
}

// positives (N,): columns. The rest as of `whole`; all columns but the positive are negatives.
void full_triplet(Tensor x, Tensor y, Tensor positives, Optional seen, bool semi_hard,
                  double margin, Optional weights, double weight, int64_t tall, Optional grad_x,
                  Optional grad_y, Tensor total, Optional totals) {
  with_type(total, [&](auto type) {
    using T = decltype(type);
    const auto& k = kernels().of<T>();
    T* const to_x = grad_x ? output<T>(*grad_x) : nullptr;
    T* const to_y = grad_y ? output<T>(*grad_y) : nullptr;
    const Side<T> rows(x, true, to_x), columns(y, true);
    const int64_t count = rows.count, width = rows.width;

    Triplets<T> triplets(count);
    Block<T> all{};
    all.positives = input<int64_t>(positives);
    std::copy(all.positives, all.positives + count, triplets.columns.begin());
    Watching<T> watching(seen, totals, count, true);
    watching.look_at_rows(rows);
    watching.look_at_columns(columns);
    {
      const Panel<T> panel(rows, count, columns, columns.count, width, tall);
      for (int64_t first = 0; first < count; first += tall) {
        Block<T> b = panel.band(first, all);
        for (int64_t i = 0; i < b.rows; ++i) {
          triplets.own[first + i] = b.scores[i * b.stride + b.positives[i]];
        }
        std::optional<Observing<T>> observing;
        if (double* const numbers = watching.numbers(first)) observing.emplace(b, numbers);
        const ClosestNegative<T> closest{semi_hard, triplets.own.data() + first,
                                         triplets.closest.data() + first,
                                         triplets.columns.data() + count + first};
        over(b.rows, b.columns,
             [&](int64_t begin, int64_t end) { k.closest(b, closest, begin, end); });
      }
    }
    watching.write();
    const auto in_type = [](const std::vector<double>& sums) {
      return std::vector<T>(sums.begin(), sums.end());
    };
    const std::vector<T> sum = in_type(sum_of_rows<T>(columns, columns.count, width));
    const std::vector<int64_t> the_sum(count, 0);
    const Partners<T> with_sum{rows, sum.data(), count, width, 1, the_sum.data(), false};
    over(count, width, [&](int64_t begin, int64_t end) {
      k.chosen_rows(with_sum, triplets.mean.data(), begin, end);
    });
    const std::vector<T> alike(weights ? 0 : count, T(weight));
    const T* of_rows = weights ? input<T>(*weights) : alike.data();
    *output<T>(total) = T(triplets.finish(of_rows, margin, columns.count - 1));

    const Partners<T> chosen{rows, columns, count, width, 2, triplets.columns.data(), false};
    const T* of_mean = triplets.of_mean.data();
    const double* of_chosen = triplets.of_chosen.data();
    if (to_y) {  // first: the gradient of x takes the place of its unit rows
      std::vector<T> all_rows(width);
      k.multiply_columns(of_mean, 1, count, rows, width, all_rows.data(), false, {0, 1});
      const std::vector<int64_t> sorted = sorted_by_column(chosen, columns.count);
      const Naming naming{sorted.data(), sorted.data() + columns.count + 1};
      finish_rows<T>(
          columns, to_y,
          [&](int64_t, T* grad) { std::copy(all_rows.begin(), all_rows.end(), grad); },
          [&](int64_t begin, int64_t end) {
            k.chosen_rows_of_columns(chosen, of_chosen, naming, to_y, begin, end);
          });
    }
    if (to_x) {
      finish_rows<T>(
          rows, to_x,
          [&](int64_t i, T* grad) {
            for (int64_t at = 0; at < width; ++at) grad[at] = of_mean[i] * sum[at];
          },
          [&](int64_t begin, int64_t end) {
            k.chosen_rows_of_rows(chosen, of_chosen, to_x, begin, end);
          });
    }
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(full_triplet,
                   "(Tensor x, Tensor y, Tensor positives, Tensor(seen!)? seen, bool semi_hard, "
                   "float margin, Tensor? weights, float weight, int tall, "
                   "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "
                   "Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
