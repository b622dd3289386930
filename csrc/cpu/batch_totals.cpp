// The operator that computes the totals of `fastsim.metrics` for a loss computed panel by panel.

#include <cmath>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "totals.h"

namespace fastsim {

namespace {

// `potential` in totals.h for the unit rows of x, which need not be in memory.
template <class T>
double potential(const Tensor& x, int64_t half) {
  const Matrix first_half = matrix(x), second_half = first_half.from_row(half);
  std::vector<T> cosines(half), inverse(2 * half);
  over(half, 2 * x.size(1), [&](int64_t begin, int64_t end) {
    kernels().of<T>().paired_cosines(first_half, second_half, x.size(1), cosines.data(),
                                     inverse.data(), inverse.data() + half, begin, end);
  });
  double sum = 0;
  for (const T cosine : cosines) sum += std::exp(2 * kSharpness * (double(cosine) - 1));
  return sum;
}

// Sets `sum` and `count` to those of the potentials of one side, if x is given.
void set_potential(const Optional& x, double& sum, double& count) {
  if (!x) return;
  const int64_t half = x->size(0) / 2;
  const bool is_double = x->scalar_type() == ScalarType::Double;
  sum = is_double ? potential<double>(*x, half) : potential<float>(*x, half);
  count = half;
}

// Writes the totals to `total` (kTotals,). row_metrics (N, kRowMetrics). x (N, D) and y (M, D): the
// embeddings, if the scores are their cosines. y is None if it is x.
void batch_totals(Tensor row_metrics, Optional x, Optional y, Tensor total) {
  const int64_t rows = row_metrics.size(0);
  Totals t{};
  add_rows(t, input<double>(row_metrics, "row_metrics", rows * kRowMetrics), rows, bool(x));
  set_potential(x, t.row_potential, t.row_potentials);
  set_potential(y, t.column_potential, t.column_potentials);
  write(t, total, "total");
}

int64_t totals() { return kTotals; }
double sharpness() { return kSharpness; }

std::vector<Operator> operators() {
  return {
      OPERATOR(batch_totals,
               "(Tensor row_metrics, Tensor? x, Tensor? y, Tensor(total!) total) -> ()"),
      OPERATOR(totals, "() -> int"),
      OPERATOR(sharpness, "() -> float"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
