// What is added up over batches and ranks of what observe.h counted in each row, in one operator: a
// small batch's time is operator calls.

#include <cmath>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "passes.h"

namespace fastsim {

namespace {

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

Totals totals_of(const Seen* seen, int64_t rows) {
  Totals t{};
  t.rows = rows;
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
  return t;
}

// sum_i exp(-sharpness |u_i - u_{i + half}|^2) over the first half of the unit rows u of x.
template <class T>
double potential(const Tensor& x, int64_t half, double sharpness) {
  const Matrix one = matrix(x), other = one.from_row(half);
  std::vector<T> cosines(half), inverse(2 * half);
  over(half, 2 * x.size(1), [&](int64_t begin, int64_t end) {
    kernels().of<T>().paired_cosines(one, other, x.size(1), cosines.data(), inverse.data(),
                                     inverse.data() + half, begin, end);
  });
  double sum = 0;
  for (const T cosine : cosines) sum += std::exp(2 * sharpness * (double(cosine) - 1));
  return sum;
}

void add_potential(const Optional& x, double sharpness, double& sum, double& count) {
  if (!x) return;
  const int64_t half = x->size(0) / 2;
  const bool wide = x->scalar_type() == ScalarType::Double;
  sum = wide ? potential<double>(*x, half, sharpness) : potential<float>(*x, half, sharpness);
  count = half;
}

// seen (N, kObserved). x (N, D) and y (M, D), where scores are their cosines; y is left out where it
// is x. total (kTotals,) is written.
void batch_totals(Tensor seen, Optional x, Optional y, double sharpness, Tensor total) {
  STD_TORCH_CHECK(seen.size(1) == kObserved && total.numel() == kTotals,
                  "fastsim: batch_totals: wanted the numbers of rows and their totals");
  Totals t = totals_of(reinterpret_cast<const Seen*>(input<double>(seen)), seen.size(0));
  if (x) {
    t.squared_distances = 2 * (t.positives - t.positive_sum);
    t.distances = t.positives;
  }
  add_potential(x, sharpness, t.row_potential, t.row_potentials);
  add_potential(y, sharpness, t.column_potential, t.column_potentials);
  *reinterpret_cast<Totals*>(output<double>(total)) = t;
}

int64_t totals() { return kTotals; }

std::vector<Operator> operators() {
  return {
      OPERATOR(batch_totals, "(Tensor seen, Tensor? x, Tensor? y, float sharpness, "
                             "Tensor(total!) total) -> ()"),
      OPERATOR(totals, "() -> int"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
