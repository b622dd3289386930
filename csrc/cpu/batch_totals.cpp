// The totals of a loss that is made panel by panel, in one operator.

#include <cmath>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "totals.h"

namespace fastsim {

namespace {

// `potential` of the unit rows of x, without these.
template <class T>
double potential(const Tensor& x, int64_t half) {
  const Matrix one = matrix(x), other = one.from_row(half);
  std::vector<T> cosines(half), inverse(2 * half);
  over(half, 2 * x.size(1), [&](int64_t begin, int64_t end) {
    kernels().of<T>().paired_cosines(one, other, x.size(1), cosines.data(), inverse.data(),
                                     inverse.data() + half, begin, end);
  });
  double sum = 0;
  for (const T cosine : cosines) sum += std::exp(2 * kSharpness * (double(cosine) - 1));
  return sum;
}

void add_potential(const Optional& x, double& sum, double& count) {
  if (!x) return;
  const int64_t half = x->size(0) / 2;
  const bool wide = x->scalar_type() == ScalarType::Double;
  sum = wide ? potential<double>(*x, half) : potential<float>(*x, half);
  count = half;
}

// seen (N, kObserved). x (N, D) and y (M, D), where scores are their cosines; y is left out where it
// is x. total (kTotals,) is written.
void batch_totals(Tensor seen, Optional x, Optional y, Tensor total) {
  const int64_t rows = seen.size(0);
  Totals t{};
  add_rows(t, input<double>(seen, "seen", rows * kObserved), rows, bool(x));
  add_potential(x, t.row_potential, t.row_potentials);
  add_potential(y, t.column_potential, t.column_potentials);
  write(t, total, "total");
}

int64_t totals() { return kTotals; }
double sharpness() { return kSharpness; }

std::vector<Operator> operators() {
  return {
      OPERATOR(batch_totals, "(Tensor seen, Tensor? x, Tensor? y, Tensor(total!) total) -> ()"),
      OPERATOR(totals, "() -> int"),
      OPERATOR(sharpness, "() -> float"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
