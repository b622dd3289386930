// The operators on the rows of a sweep over prefixes (fastsim/engine/prefixes.py).

#include <vector>

#include "arguments.h"
#include "operators.h"
#include "passes.h"

namespace fastsim {

namespace {

// x (N, d), columns of rows whose norms (N,) were those without them -> out, x over their norms.
void prefix_rows(Tensor x, Tensor norms, Tensor out) {
  with_type(out, [&](auto type) {
    using T = decltype(type);
    const Matrix from = matrix(x);
    double* norm = output<double>(norms);
    T* to = output<T>(out);
    over(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows(from, x.size(1), norm, to, begin, end);
    });
  });
}

// dots (N,) += inverse (x . grad_rows) of rows of x (N, d), columns of a matrix.
void prefix_rows_dots(Tensor grad_rows, Tensor x, Tensor inverse, Tensor dots) {
  with_type(grad_rows, [&](auto type) {
    using T = decltype(type);
    const Matrix from = matrix(x);
    const T* g = input<T>(grad_rows);
    const double* factor = input<double>(inverse);
    double* out = output<double>(dots);
    over(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_dots(g, from, x.size(1), factor, out, begin, end);
    });
  });
}

// grad (N, d), columns of a matrix = inverse (grad_rows - along x).
void prefix_rows_backward(Tensor grad_rows, Tensor x, Tensor along, Tensor inverse, Tensor grad) {
  with_type(grad_rows, [&](auto type) {
    using T = decltype(type);
    Block<T> to{};
    take_panel(grad, to);
    STD_TORCH_CHECK(grad.scalar_type() == kTypeOf<T> && to.columns == x.size(1),
                    "fastsim: gradients of x, of one dtype");
    const Matrix from = matrix(x);
    const T* g = input<T>(grad_rows);
    const double *of_norm = input<double>(along), *factor = input<double>(inverse);
    over(to.rows, to.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().prefix_rows_backward(g, from, to.columns, of_norm, factor, to.scores,
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
