// Operators on rows: unit rows, cosines and distances of paired rows, centred rows, the choice of a
// few columns for each row, and the values of the chosen pairs. Every sum has one order, whatever
// the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "arguments.h"
#include "naming.h"
#include "operators.h"
#include "panel.h"
#include "scratch.h"

namespace fastsim {

namespace {

// Checks x (N, D), y (M, D) and columns (K, N) and makes Partners of them. Without y the columns
// are rows of x.
template <class T>
Partners<T> take_chosen_rows(const Tensor& x, const Optional& y, const Tensor& columns,
                             bool distances) {
  const Tensor& other = y ? *y : x;
  const int64_t rows = x.size(0), width = x.size(1), per_row = columns.size(0);
  const Partners<T> p{input<T>(x, "x", rows * width), input<T>(other, "y", other.size(0) * width),
                      rows, width, per_row, input<int64_t>(columns, "columns", per_row * rows),
                      distances};
  for (int64_t at = 0; at < p.count * p.rows; ++at) {
    STD_TORCH_CHECK(p.columns[at] < other.size(0), "fastsim: columns: wanted rows of y, less than ",
                    other.size(0), ", got ", p.columns[at]);
  }
  return p;
}

// The factor of x_i - y_j in the gradient of x_i, from the gradient and the values of the
// distances. Without values, the factor of y_j for dot products. The gradient of a distance 0 is
// taken to be 0. In double, as the inverse of a subnormal float32 distance may exceed float32.
template <class T>
std::vector<double> score_grads_of(const T* grad, const T* values, int64_t count) {
  std::vector<double> score_grads(grad, grad + count);
  if (!values) return score_grads;
  for (int64_t at = 0; at < count; ++at) {
    score_grads[at] = values[at] == 0 ? 0 : score_grads[at] / values[at];
  }
  return score_grads;
}

// Computes the mean (width,) of the rows.
template <class T>
void centre_of(const T* x, int64_t rows, int64_t width, T* centre) {
  const std::vector<double> sums = sum_of_rows(x, rows, width);
  for (int64_t k = 0; k < width; ++k) centre[k] = T(sums[k] / rows);
}

// unit (N, D) = the unit rows of x (N, D); inverse (N,) = their inverse norms.
void unit_rows(Tensor x, Tensor unit, Tensor inverse) {
  with_type(unit, "unit", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    make_unit_rows(matrix(x), rows, width, output<T>(unit, "unit", rows * width),
                   output<T>(inverse, "inverse", rows));
  });
}

// grad (N, D) = `factor` times dL/dx, from grad_unit (N, D), dL/d(unit row). dots (N,) = the
// products of the unit rows and grad_unit.
void unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, double factor, Tensor grad,
                        Tensor dots) {
  with_type(grad_unit, "grad_unit", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const Gradient out = gradient<T>(grad, "grad", rows * width);
    through_unit_rows(input<T>(grad_unit, "grad_unit", rows * width), matrix(x), rows, width,
                      input<T>(inverse, "inverse", rows), T(factor), out.data, out.dtype,
                      output<T>(dots, "dots", rows));
  });
}

// Computes the cosines (N,) of row i of x with row i of y. inverse (2, N): the inverse norms of the
// rows of x and of y.
template <class T>
void cosines_of_pairs(const Tensor& x, const Tensor& y, T* cosines, T* inverse) {
  const int64_t rows = x.size(0), width = x.size(1);
  const Matrix a = matrix(x), b = matrix(y, "y", rows, width);
  over(rows, 2 * width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().paired_cosines(a, b, width, cosines, inverse, inverse + rows, begin, end);
  });
}

// `cosines_of_pairs` as an operator.
void paired_cosines(Tensor x, Tensor y, Tensor cosines, Tensor inverse) {
  with_type(cosines, "cosines", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0);
    cosines_of_pairs(x, y, output<T>(cosines, "cosines", rows),
                     output<T>(inverse, "inverse", 2 * rows));
  });
}

// total () = `factor` times the sum of the squared differences of the cosines and the targets (N,).
void paired_squared_errors(Tensor x, Tensor y, Tensor targets, double factor, Tensor total) {
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0);
    const Scratch<T> cosines(rows), inverse(2 * rows);
    cosines_of_pairs<T>(x, y, cosines, inverse);
    const T* target = input<T>(targets, "targets", rows);
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double error = double(cosines[i]) - target[i];
      sum += error * error;
    }
    *output<T>(total, "total", 1) = T(factor * sum);
  });
}

// Writes dL/dx and dL/dy, if they are given, from grad = dL/dcosines (N,) and the outputs of
// `paired_cosines`.
void paired_cosines_backward(Tensor grad, Tensor x, Tensor y, Tensor cosines, Tensor inverse,
                             Optional grad_x, Optional grad_y) {
  with_type(cosines, "cosines", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const Matrix a = matrix(x), b = matrix(y, "y", rows, width);
    const T* score_grads = input<T>(grad, "grad", rows);
    const T* c = input<T>(cosines, "cosines", rows);
    const T* norms = input<T>(inverse, "inverse", 2 * rows);
    const Gradient x_gradient = gradient<T>(grad_x, "grad_x", rows * width);
    const Gradient y_gradient = gradient<T>(grad_y, "grad_y", rows * width);
    over(rows, 2 * width, [=](int64_t begin, int64_t end) {
      kernels().of<T>().paired_cosines_backward(score_grads, a, b, width, c, norms, norms + rows,
                                                x_gradient.data, x_gradient.dtype,
                                                y_gradient.data, y_gradient.dtype, begin, end);
    });
  });
}

// Subtracts the mean of y from the rows of x (rows, width) and of y (columns, width), and divides
// them by the largest norm of all of these differences, which is returned. If y is null, the
// columns are the rows of x. offsets (columns,): half the squared norms of the resulting columns.
template <class T>
T centre(const T* x, int64_t rows, const T* y, int64_t columns, int64_t width, T* out_x, T* out_y,
         T* offsets) {
  std::vector<T> mean(width);
  centre_of(y ? y : x, columns, width, mean.data());
  double largest_norm = 0;
  const auto centre_side = [&](const T* from, int64_t count, T* to) {
    std::vector<double> norms(count);
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().centred_rows(from, mean.data(), width, to, norms.data(), begin, end);
    });
    for (double norm : norms) {  // a NaN stays
      largest_norm = norm <= largest_norm || largest_norm != largest_norm ? largest_norm : norm;
    }
    return norms;
  };
  std::vector<double> norms = centre_side(x, rows, out_x);
  if (y) norms = centre_side(y, columns, out_y);
  const double divisor = largest_norm == 0 ? 1 : largest_norm;
  const auto scale_side = [&](T* to, int64_t count) {
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().scale(to + begin * width, (end - begin) * width, 1 / std::sqrt(divisor));
    });
  };
  scale_side(out_x, rows);
  if (y) scale_side(out_y, columns);
  for (int64_t j = 0; j < columns; ++j) {
    offsets[j] = T(0.5 * (norms[j] / divisor) * (norms[j] / divisor));
  }
  return T(largest_norm);
}

// `centre` as an operator: sets rows (N, D), columns (M, D), offsets (M,) and largest (), the
// largest norm. Without y there are no columns, and M is N.
void centred(Tensor x, Optional y, Tensor rows, Optional columns, Tensor offsets, Tensor largest) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    STD_TORCH_CHECK(bool(y) == bool(columns), "fastsim: y, columns: wanted both or neither");
    const int64_t width = x.size(1), x_size = x.size(0) * width;
    const int64_t count = (y ? *y : x).size(0), y_size = count * width;
    *output<T>(largest, "largest", 1) =
        centre(input<T>(x, "x", x_size), x.size(0), input<T>(y, "y", y_size), count, width,
               output<T>(rows, "rows", x_size), output<T>(columns, "columns", y_size),
               output<T>(offsets, "offsets", count));
  });
}

// Finds, for each row of x (N, D), the farthest other row of its group and the nearest row of any
// other group. indices (2, N): these rows, -1 for none. distances (2, N): their distances, for none
// -inf and inf. largest (): as in `centred`. This is one operator because calls of operators take
// most of a small batch's time.
void hardest_pairs(Tensor x, Tensor groups, Tensor indices, Tensor distances, Tensor largest) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const T* points = input<T>(x, "x", rows * width);
    Scratch<T> centred_points(rows * width), offsets(rows);
    *output<T>(largest, "largest", 1) =
        centre<T>(points, rows, nullptr, rows, width, centred_points, nullptr, offsets);

    Block<T> all{};
    all.row_groups = all.column_groups = input<int64_t>(groups, "groups", rows);
    all.skip = Skip::diagonal;
    const Panel<T> panel(centred_points, rows, row_major<T>(centred_points, width), nullptr, rows,
                         width, rows);
    const Block<T> b = panel.band(0, all);

    int64_t* columns = output<int64_t>(indices, "indices", 2 * rows);
    std::fill(columns, columns + 2 * rows, -1);
    std::vector<T> low(rows, -kLeftOut<T>), high(rows, kLeftOut<T>);
    over(rows, rows, [&](int64_t begin, int64_t end) {
      kernels().of<T>().hardest(b,
                                {.offsets = offsets,
                                 .low = low.data(),
                                 .low_index = columns,
                                 .high = high.data(),
                                 .high_index = columns + rows},
                                begin, end);
    });
    const Partners<T> pairs{points, points, rows, width, 2, columns, true};
    T* out = output<T>(distances, "distances", 2 * rows);
    std::fill(out, out + rows, -std::numeric_limits<T>::infinity());
    std::fill(out + rows, out + 2 * rows, std::numeric_limits<T>::infinity());
    over(rows, pairs.count * width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(pairs, out, begin, end);
    });
  });
}

// relu(near - far + margin). NaN if an argument is NaN or `far` is infinite.
template <class T>
T triplet_loss(T near, T far, double margin) {
  if (std::isinf(far)) return std::numeric_limits<T>::quiet_NaN();
  const T above = (near - far) + T(margin);
  return above <= 0 ? T(0) : above;
}

// Computes near and far (N,): the distances |a_i - p_i| and |a_i - n_i| of the rows of anchors,
// positives and negatives (N, D). losses, if they are given: `factor` times the `triplet_loss` of
// each row (N,), or the sum of these ().
void triplet_distances(Tensor anchors, Tensor positives, Tensor negatives, double margin,
                       double factor, Tensor near, Tensor far, Optional losses) {
  with_type(near, "near", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = anchors.size(0), width = anchors.size(1);
    const Matrix a = matrix(anchors), p = matrix(positives, "positives", rows, width);
    const Matrix n = matrix(negatives, "negatives", rows, width);
    T *to_positive = output<T>(near, "near", rows), *to_negative = output<T>(far, "far", rows);
    over(rows, 3 * width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().triplet_distances(a, p, n, width, to_positive, to_negative, begin, end);
    });
    T* out = output<T>(losses, "losses", losses && losses->dim() ? rows : 1);
    if (!losses) return;
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const T loss = triplet_loss(to_positive[i], to_negative[i], margin);
      sum += loss;
      if (losses->dim()) out[i] = T(factor * loss);
    }
    if (!losses->dim()) *out = T(factor * sum);
  });
}

// Writes the gradients of the three inputs of `triplet_distances`, if they are given. Without a
// margin, grad (N,) is dL/d(near - far). With a margin, grad (N,) or () is dL/dlosses. In both
// cases it is multiplied by `factor`.
void triplet_distances_backward(Tensor grad, Tensor anchors, Tensor positives, Tensor negatives,
                                Tensor near, Tensor far, std::optional<double> margin,
                                double factor, Optional grad_anchors, Optional grad_positives,
                                Optional grad_negatives) {
  with_type(near, "near", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = anchors.size(0), width = anchors.size(1);
    const Matrix a = matrix(anchors), p = matrix(positives, "positives", rows, width);
    const Matrix n = matrix(negatives, "negatives", rows, width);
    const T* loss_grads = input<T>(grad, "grad", grad.dim() ? rows : 1);
    const T* to_positive = input<T>(near, "near", rows);
    const T* to_negative = input<T>(far, "far", rows);
    std::vector<T> pair_grads(rows);
    for (int64_t i = 0; i < rows; ++i) {
      const bool is_zero = margin && triplet_loss(to_positive[i], to_negative[i], *margin) == 0;
      pair_grads[i] = is_zero ? T(0) : T(factor * loss_grads[grad.dim() ? i : 0]);
    }
    const Gradient a_gradient = gradient<T>(grad_anchors, "grad_anchors", rows * width);
    const Gradient p_gradient = gradient<T>(grad_positives, "grad_positives", rows * width);
    const Gradient n_gradient = gradient<T>(grad_negatives, "grad_negatives", rows * width);
    over(rows, 3 * width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().triplet_distances_backward(
          pair_grads.data(), a, p, n, width, to_positive, to_negative, a_gradient.data,
          a_gradient.dtype, p_gradient.data, p_gradient.dtype, n_gradient.data, n_gradient.dtype,
          begin, end);
    });
  });
}

// values (K, N) = |x_i - y_j| or x_i . y_j for j = columns[k, i]. A value with a negative column
// stays as it is. Without y, y_j is a row of x.
void chosen_rows(Tensor x, Optional y, Tensor columns, bool distances, Tensor values) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    const auto p = take_chosen_rows<T>(x, y, columns, distances);
    T* out = output<T>(values, "values", p.count * p.rows);
    over(p.rows, p.count * p.width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(p, out, begin, end);
    });
  });
}

// Adds dL/dx to grad_x and dL/dy to grad_y, from grad = dL/dvalues (K, N). Without y, adds both to
// grad_x. values (K, N): those of `chosen_rows` if they are distances; None for dot products.
void chosen_rows_backward(Tensor grad, Optional values, Tensor x, Optional y, Tensor columns,
                          Optional grad_x, Optional grad_y) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    const auto p = take_chosen_rows<T>(x, y, columns, values.has_value());
    const int64_t pairs = p.count * p.rows, others = (y ? *y : x).size(0);
    const std::vector<double> score_grads = score_grads_of(
        input<T>(grad, "grad", pairs), input<T>(values, "values", pairs), pairs);
    T* const to_x = output<T>(grad_x, "grad_x", p.rows * p.width);
    T* const to_y = output<T>(grad_y, "grad_y", others * p.width);
    if (to_x) {
      over(p.rows, p.count * p.width, [&](int64_t begin, int64_t end) {
        kernels().of<T>().chosen_rows_of_rows(p, score_grads.data(), to_x, begin, end);
      });
    }
    T* const to_columns = y ? to_y : to_x;
    if (!to_columns || others == 0) return;
    const std::vector<int64_t> sorted = sorted_by_column(p, others);
    const Naming naming{sorted.data(), sorted.data() + others + 1};
    over(others, ceil_div(pairs, others) * p.width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows_of_columns(p, score_grads.data(), naming, to_columns, begin,
                                               end);
    });
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(unit_rows, "(Tensor x, Tensor(unit!) unit, Tensor(inverse!) inverse) -> ()"),
      OPERATOR(unit_rows_backward,
               "(Tensor grad_unit, Tensor x, Tensor inverse, float factor, Tensor(grad!) grad, "
               "Tensor(dots!) dots) -> ()"),
      OPERATOR(paired_cosines,
               "(Tensor x, Tensor y, Tensor(cosines!) cosines, Tensor(inverse!) inverse) -> ()"),
      OPERATOR(paired_squared_errors, "(Tensor x, Tensor y, Tensor targets, float factor, "
                                      "Tensor(total!) total) -> ()"),
      OPERATOR(paired_cosines_backward,
               "(Tensor grad, Tensor x, Tensor y, Tensor cosines, Tensor inverse, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y) -> ()"),
      OPERATOR(centred, "(Tensor x, Tensor? y, Tensor(rows!) rows, Tensor(columns!)? columns, "
                        "Tensor(offsets!) offsets, Tensor(largest!) largest) -> ()"),
      OPERATOR(hardest_pairs, "(Tensor x, Tensor groups, Tensor(indices!) indices, "
                              "Tensor(distances!) distances, Tensor(largest!) largest) -> ()"),
      OPERATOR(triplet_distances, "(Tensor anchors, Tensor positives, Tensor negatives, "
                                  "float margin, float factor, Tensor(near!) near, "
                                  "Tensor(far!) far, Tensor(losses!)? losses) -> ()"),
      OPERATOR(triplet_distances_backward,
               "(Tensor grad, Tensor anchors, Tensor positives, Tensor negatives, Tensor near, "
               "Tensor far, float? margin, float factor, Tensor(grad_anchors!)? grad_anchors, "
               "Tensor(grad_positives!)? grad_positives, "
               "Tensor(grad_negatives!)? grad_negatives) -> ()"),
      OPERATOR(chosen_rows, "(Tensor x, Tensor? y, Tensor columns, bool distances, "
                            "Tensor(values!) values) -> ()"),
      OPERATOR(chosen_rows_backward,
               "(Tensor grad, Tensor? values, Tensor x, Tensor? y, Tensor columns, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
