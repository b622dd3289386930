// A loss of the scores of two sides, with its gradient, in one operator. A small batch's time is
// operator calls; here there is one.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "operators.h"
#include "panel.h"
#include "side.h"
#include "whole_rows.h"

namespace fastsim {

namespace {

// The scores of other rows, a band at a time.
template <class T>
class OtherPanel {
 public:
  OtherPanel(const Tensor& rows, const Tensor& columns, bool cosine, int64_t tall)
      : rows_(rows, cosine), columns_(columns, cosine),
        panel_(rows_, rows_.count, columns_, columns_.count, rows_.width, tall) {}

  OtherScores<T> band(int64_t first) const {
    const Block<T> b = panel_.band(first, {});
    return {b.scores, b.stride};
  }

 private:
  const Side<T> rows_, columns_;
  const Panel<T> panel_;
};

// The loss of the first `width` numbers of all rows, times `factor`, and its derivatives by scale,
// right where a gradient is given, and by bias. The gradients to_x (N, width) and to_y (M, width) are
// written where they are not null; without y, to_x holds both shares. tall: of how many rows scores
// are in memory at a time; symmetric losses need those of all.
template <class T>
Result loss_of_width(const Given& given, int64_t tall, int64_t width, double factor, T* to_x,
                     T* to_y) {
  const Optional& y = given.y;
  const Numbers& of = given.of;
  // The gradient of a band takes the place of its unit rows, when nothing reads them any more.
  const Side<T> rows(given.x, width, of.cosine, of.cosine && y ? to_x : nullptr);
  Watching<T> watching(given.seen, given.totals, rows.count, of.cosine);
  watching.look_at_rows(rows);
  std::optional<Side<T>> others;
  if (y) others.emplace(*y, width, of.cosine, nullptr);
  if (y) watching.look_at_columns(*others);
  const Side<T>& columns = y ? *others : rows;
  const Panel<T> panel(rows, rows.count, columns, columns.count, width, tall);
  const int64_t count = rows.count, wide = columns.count;
  std::optional<OtherPanel<T>> targets, guide;
  if (given.factor_rows) {
    targets.emplace(*given.factor_rows, *given.factor_columns, of.factor_cosine, tall);
  }
  if (given.guide_rows) guide.emplace(*given.guide_rows, *given.guide_columns, true, tall);

  Block<T> all{};
  all.rows = count;
  all.columns = wide;
  take_pairs(given.pairs, all);
  check_positives(all);
  STD_TORCH_CHECK(!of.symmetric || tall >= count, "fastsim: whole: wanted all rows in a band");
  const RowLosses<T> losses(given, all, factor, to_x || to_y);
  Result result;
  if (to_y && count == 0) std::fill_n(to_y, wide * width, T(0));  // which the first band writes
  for (int64_t first = 0; first < count; first += tall) {
    const Block<T> b = panel.band(first, all);
    result += losses(b, first, watching.numbers(first),
                     targets ? targets->band(first) : OtherScores<T>{},
                     guide ? guide->band(first) : OtherScores<T>{});
    // The products with the unit rows of the band come before its gradient.
    const T* band = rows + first * width;
    if (to_y) multiply_panel<T>(b, band, width, to_y, true, first > 0);
    if (to_x && !y) multiply_panel<T>(b, band, width, to_x, true, first > 0);
    if (to_x) multiply_panel<T>(b, columns, width, to_x + first * width, false, !y);
  }
  double along = 0;  // of one side; without y, to_x is of both
  if (to_x) along = rows.finish(to_x, of.scale_grad && !to_y) / (y ? 1 : 2);
  if (to_y) along = columns.finish(to_y, of.scale_grad);
  watching.write();
  result.scale_score_grad += along / of.scale;
  return result;
}

// Adds (count, width) to the first columns of `to` (count, wide).
template <class T>
void add_columns(const T* from, int64_t count, int64_t width, T* to, int64_t wide) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < width; ++k) to[i * wide + k] += from[i * width + k];
  }
}

// `total` gets the loss, or the sum of those of ascending prefixes, the last of which is all of the
// rows; with it grad_x (N, D) and grad_y (M, D), where they are given, in the compute type, and
// `parameters` (2,), the derivatives by scale and bias.
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, std::string skip,
           Optional seen, std::string kind, std::vector<double> numbers, Optional guide_rows,
           Optional guide_columns, Optional column_bias, Optional row_shift, Optional factor_rows,
           Optional factor_columns, Optional prior, Optional positive_weights, Optional weights,
           int64_t tall, Optional grad_x, Optional grad_y, Tensor total, Optional parameters,
           Optional totals) {
  const Numbers of(numbers);
  const Given given{x, y,
                    {positives, row_ids, column_ids, row_groups, column_groups, dense,
                     of.negative_target, skip, seen},
                    kind_of(kind), of, guide_rows, guide_columns, column_bias, row_shift,
                    factor_rows, factor_columns, prior, positive_weights, weights, seen, totals};
  STD_TORCH_CHECK(tall > 0, "fastsim: tall: wanted rows of a band, got ", tall);
  const int64_t full = x.size(1), prefixes = of.prefixes.size();
  STD_TORCH_CHECK(!prefixes || (of.prefixes.back().width == full && !seen && !totals),
                  "fastsim: whole: wanted prefixes up to all of the rows, whose scores nobody sees");
  STD_TORCH_CHECK(y || !grad_y, "fastsim: grad_y: wanted y too");
  const int64_t rows = x.size(0), columns = y ? y->size(0) : 0;
  if (y) check_matrix(*y, "y", columns, full);
  check_sides(given, rows, y ? columns : rows);
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    T* const to_x = output<T>(grad_x, "grad_x", rows * full);
    T* const to_y = output<T>(grad_y, "grad_y", columns * full);
    T* const loss = output<T>(total, "total", 1);
    double* const score_grads = output<double>(parameters, "parameters", 2);
    // The widest first: its gradients are written where those of the others are added.
    const double factor = prefixes ? of.prefixes.back().factor : 1;
    Result result = loss_of_width<T>(given, tall, full, factor, to_x, to_y);
    for (int64_t k = prefixes - 2; k >= 0; --k) {
      const auto [width, factor] = of.prefixes[k];
      const Scratch<T> memory((rows + columns) * width);
      T* const of_x = to_x ? static_cast<T*>(memory) : nullptr;
      T* const of_y = to_y ? memory + rows * width : nullptr;
      result += loss_of_width<T>(given, tall, width, factor, of_x, of_y);
      if (to_x) add_columns<T>(of_x, rows, width, to_x, full);
      if (to_y) add_columns<T>(of_y, columns, width, to_y, full);
    }
    *loss = T(result.loss);
    if (!score_grads) return;
    score_grads[0] = of.scale_grad ? double(result.scale_score_grad) : 0;
    score_grads[1] = double(result.bias_score_grad);
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(whole, "(Tensor x, Tensor? y, " GIVEN_SCHEMA ", int tall, " RESULTS_SCHEMA ") -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
