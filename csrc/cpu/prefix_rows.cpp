// The operators on the rows of prefixes in a sweep (fastsim/engine/prefixes.py). x (N, d) is always
// the own columns of one prefix, a slice of a matrix.

#include <vector>

#include "arguments.h"
#include "operators.h"
#include "passes.h"

namespace fastsim {

namespace {

// norms (N,) are those of the next shorter prefix; they become the norms of this one. out = x
// divided by them.
void prefix_rows(Tensor x, Tensor norms, Tensor out) {
  with_type(out, "out", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const Matrix from = matrix(x);
    double* norm = output<double>(norms, "norms", rows);
    T* to = output<T>(out, "out", rows * width);
    over(rows, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows(from, width, norm, to, begin, end);
    });
  });
}

// dots (N,) += inverse (x . grad_rows), row by row.
void prefix_rows_dots(Tensor grad_rows, Tensor x, Tensor inverse, Tensor dots) {
  with_type(grad_rows, "grad_rows", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const Matrix from = matrix(x);
    const T* g = input<T>(grad_rows, "grad_rows", rows * width);
    const double* factor = input<double>(inverse, "inverse", rows);
    double* out = output<double>(dots, "dots", rows);
    over(rows, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_dots(g, from, width, factor, out, begin, end);
    });
  });
}

// grad (N, d) = inverse (grad_rows - along x), a slice of a matrix.
void prefix_rows_backward(Tensor grad_rows, Tensor x, Tensor along, Tensor inverse, Tensor grad) {
  with_type(grad_rows, "grad_rows", [&](auto type) {
    using T = decltype(type);
    Block<T> to{};
    take_panel(grad, to, "grad");
    const Matrix from = matrix(x, "x", to.rows, to.columns);
    const T* g = input<T>(grad_rows, "grad_rows", to.rows * to.columns);
    const double* coefficient = input<double>(along, "along", to.rows);
    const double* factor = input<double>(inverse, "inverse", to.rows);
    over(to.rows, to.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_backward(g, from, to.columns, coefficient, factor, to.scores,
                                             to.stride, begin, end);
    });
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(prefix_rows, "(Tensor x, Tensor(norms!) norms, Tensor(out!) out) -> ()"),
      OPERATOR(prefix_rows_dots, "(Tensor grad_rows, Tensor x, Tensor inverse, "
                                 "Tensor(dots!) dots) -> ()"),
      OPERATOR(prefix_rows_backward, "(Tensor grad_rows, Tensor x, Tensor along, Tensor inverse, "
                                     "Tensor(grad!) grad) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
