// Counts how often each value is among other values.

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "operators.h"

namespace fastsim {

namespace {

// counts (N,): how many numbers of `among` (M,) equal values[i].
void equal_counts(Tensor values, Tensor among, Tensor counts) {
  const int64_t count = values.numel();
  const int64_t* value = input<int64_t>(values, "values", count);
  const int64_t* from = input<int64_t>(among, "among", among.numel());
  int64_t* out = output<int64_t>(counts, "counts", count);
  std::vector<int64_t> sorted(from, from + among.numel());
  std::sort(sorted.begin(), sorted.end());
  for (int64_t i = 0; i < count; ++i) {
    const auto [first, last] = std::equal_range(sorted.begin(), sorted.end(), value[i]);
    out[i] = last - first;
  }
}

std::vector<Operator> operators() {
  return {OPERATOR(equal_counts, "(Tensor values, Tensor among, Tensor(counts!) counts) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
