// Operators on rows: unit rows, cosines and distances of paired rows, centred rows, rows against the
// few columns chosen for each, and these columns. Every sum has one order, whatever the number of
// threads.

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

template <class T>
Partners<T> take_chosen_rows(const Tensor& x, const Optional& y, const Tensor& columns,
                          bool distances) {
  const Tensor& other = y ? *y : x;
  const int64_t rows = x.size(0), width = x.size(1), of_each = columns.size(0);
  const Partners<T> p{input<T>(x, "x", rows * width), input<T>(other, "y", other.size(0) * width),
                      rows, width, of_each, input<int64_t>(columns, "columns", of_each * rows),
                      distances};
  for (int64_t at = 0; at < p.count * p.rows; ++at) {
    STD_TORCH_CHECK(p.columns[at] < other.size(0), "fastsim: columns: wanted rows of y, of which ",
                    other.size(0), ", got ", p.columns[at]);
  }
  return p;
}

// What multiplies x_i - y_j or y_j; a distance 0 has gradient 0. In double: one over a subnormal
// distance is no float32.
template <class T>
std::vector<double> score_grads_of(const T* grad, const T* values, int64_t count) {
  std::vector<double> score_grads(grad, grad + count);
  if (!values) return score_grads;
  for (int64_t at = 0; at < count; ++at) {
    score_grads[at] = values[at] == 0 ? 0 : score_grads[at] / values[at];
  }
  return score_grads;
}

// The mean of the rows.
template <class T>
void centre_of(const T* x, int64_t rows, int64_t width, T* centre) {
  const std::vector<double> sums = sum_of_rows(x, rows, width);
  for (int64_t k = 0; k < width; ++k) centre[k] = T(sums[k] / rows);
}

void unit_rows(Tensor x, Tensor unit, Tensor inverse) {
  with_type(unit, "unit", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    make_unit_rows(matrix(x), rows, width, output<T>(unit, "unit", rows * width),
                   output<T>(inverse, "inverse", rows));
  });
}

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

// cosines (N,) of row i of x with row i of y; inverse (2, N): 1 / |x_i| and 1 / |y_i|, or 0.
template <class T>
void cosines_of_pairs(const Tensor& x, const Tensor& y, T* cosines, T* inverse) {
  const int64_t rows = x.size(0), width = x.size(1);
  const Matrix a = matrix(x), b = matrix(y, "y", rows, width);
  over(rows, 2 * width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().paired_cosines(a, b, width, cosines, inverse, inverse + rows, begin, end);
  });
}

void paired_cosines(Tensor x, Tensor y, Tensor cosines, Tensor inverse) {
  with_type(cosines, "cosines", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0);
    cosines_of_pairs(x, y, output<T>(cosines, "cosines", rows),
                     output<T>(inverse, "inverse", 2 * rows));
  });
}

// total (): `factor` times the sum of the squared differences of cosines and targets (N,).
void paired_squared_errors(Tensor x, Tensor y, Tensor targets, double factor, Tensor total) {
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0);
    const Scratch<T> cosines(rows), inverse(2 * rows);
    cosines_of_pairs<T>(x, y, cosines, inverse);
    const T* wanted = input<T>(targets, "targets", rows);
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double error = double(cosines[i]) - wanted[i];
      sum += error * error;
    }
    *output<T>(total, "total", 1) = T(factor * sum);
  });
}

void paired_cosines_backward(Tensor grad, Tensor x, Tensor y, Tensor cosines, Tensor inverse,
                             Optional grad_x, Optional grad_y) {
  with_type(cosines, "cosines", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const Matrix a = matrix(x), b = matrix(y, "y", rows, width);
    const T* score_grads = input<T>(grad, "grad", rows);
    const T* c = input<T>(cosines, "cosines", rows);
    const T* norms = input<T>(inverse, "inverse", 2 * rows);
    const Gradient of_x = gradient<T>(grad_x, "grad_x", rows * width);
    const Gradient of_y = gradient<T>(grad_y, "grad_y", rows * width);
    over(rows, 2 * width, [=](int64_t begin, int64_t end) {
      kernels().of<T>().paired_cosines_backward(score_grads, a, b, width, c, norms, norms + rows,
                                                of_x.data, of_x.dtype, of_y.data, of_y.dtype,
                                                begin, end);
    });
  });
}

// x (rows, width) and y (columns, width), without y x itself: both less the mean of y, in units of
// the largest norm of all, which is returned. offsets: half the squared norms of the columns.
template <class T>
T centre(const T* x, int64_t rows, const T* y, int64_t columns, int64_t width, T* out_x, T* out_y,
         T* offsets) {
  std::vector<T> mean(width);
  centre_of(y ? y : x, columns, width, mean.data());
  double most = 0;
  const auto centre_side = [&](const T* from, int64_t count, T* to) {
    std::vector<double> norms(count);
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().centred_rows(from, mean.data(), width, to, norms.data(), begin, end);
    });
    for (double norm : norms) most = norm <= most || most != most ? most : norm;  // keeps a NaN
    return norms;
  };
  std::vector<double> norms = centre_side(x, rows, out_x);
  if (y) norms = centre_side(y, columns, out_y);
  const double unit = most == 0 ? 1 : most;
  const auto scale_side = [&](T* to, int64_t count) {
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().scale(to + begin * width, (end - begin) * width, 1 / std::sqrt(unit));
    });
  };
  scale_side(out_x, rows);
  if (y) scale_side(out_y, columns);
  for (int64_t j = 0; j < columns; ++j) offsets[j] = T(0.5 * (norms[j] / unit) * (norms[j] / unit));
  return T(most);
}

// rows (N, D) and columns (M, D), without y one and the same: `centre` of x and y; offsets (M,).
void centred(Tensor x, Optional y, Tensor rows, Optional columns, Tensor offsets, Tensor largest) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    STD_TORCH_CHECK(bool(y) == bool(columns), "fastsim: y, columns: wanted both or neither");
    const int64_t width = x.size(1), of_x = x.size(0) * width;
    const int64_t count = (y ? *y : x).size(0), of_y = count * width;
    *output<T>(largest, "largest", 1) =
        centre(input<T>(x, "x", of_x), x.size(0), input<T>(y, "y", of_y), count, width,
               output<T>(rows, "rows", of_x), output<T>(columns, "columns", of_y),
               output<T>(offsets, "offsets", count));
  });
}

// Of each row x (N, D) the farthest other row of its group and the nearest of any other: indices
// (2, N), -1 for none, and their distances (2, N), -inf and inf for none. largest (): as of
// `centred`. One operator for a small batch, whose time is operator calls.
void hardest_pairs(Tensor x, Tensor groups, Tensor indices, Tensor distances, Tensor largest) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = x.size(0), width = x.size(1);
    const T* points = input<T>(x, "x", rows * width);
    Scratch<T> moved(rows * width), offsets(rows);
    *output<T>(largest, "largest", 1) =
        centre<T>(points, rows, nullptr, rows, width, moved, nullptr, offsets);

    Block<T> all{};
    all.row_groups = all.column_groups = input<int64_t>(groups, "groups", rows);
    all.skip = Skip::diagonal;
    const Panel<T> panel(moved, rows, moved, rows, width, rows);
    const Block<T> b = panel.band(0, all);

    int64_t* found = output<int64_t>(indices, "indices", 2 * rows);
    std::fill(found, found + 2 * rows, -1);
    std::vector<T> low(rows, -kLeftOut<T>), high(rows, kLeftOut<T>);
    over(rows, rows, [&](int64_t begin, int64_t end) {
      kernels().of<T>().hardest(b,
                                {.offsets = offsets,
                                 .low = low.data(),
                                 .low_index = found,
                                 .high = high.data(),
                                 .high_index = found + rows},
                                begin, end);
    });
    const Partners<T> p{points, points, rows, width, 2, found, true};
    T* out = output<T>(distances, "distances", 2 * rows);
    std::fill(out, out + rows, -std::numeric_limits<T>::infinity());
    std::fill(out + rows, out + 2 * rows, std::numeric_limits<T>::infinity());
    over(rows, p.count * width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(p, out, begin, end);
    });
  });
}

// relu(near - far + margin); a NaN stays one, and an infinite far makes one.
template <class T>
T triplet_loss(T near, T far, double margin) {
  if (std::isinf(far)) return std::numeric_limits<T>::quiet_NaN();
  const T above = (near - far) + T(margin);
  return above <= 0 ? T(0) : above;
}

// near and far (N,): |a_i - p_i| and |a_i - n_i| of the rows of three (N, D). losses: `factor` times
// their `triplet_loss` (N,), or the sum of these ().
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

// The gradients of near - far, where they are wanted, from its own (N,); with a margin from that of
// what `triplet_distances` made of the losses, (N,) or ().
void triplet_distances_backward(Tensor grad, Tensor anchors, Tensor positives, Tensor negatives,
                                Tensor near, Tensor far, std::optional<double> margin,
                                double factor, Optional grad_anchors, Optional grad_positives,
                                Optional grad_negatives) {
  with_type(near, "near", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = anchors.size(0), width = anchors.size(1);
    const Matrix a = matrix(anchors), p = matrix(positives, "positives", rows, width);
    const Matrix n = matrix(negatives, "negatives", rows, width);
    const T* given = input<T>(grad, "grad", grad.dim() ? rows : 1);
    const T* to_positive = input<T>(near, "near", rows);
    const T* to_negative = input<T>(far, "far", rows);
    std::vector<T> above(rows);
    for (int64_t i = 0; i < rows; ++i) {
      const bool none = margin && triplet_loss(to_positive[i], to_negative[i], *margin) == 0;
      above[i] = none ? T(0) : T(factor * given[grad.dim() ? i : 0]);
    }
    const Gradient of_a = gradient<T>(grad_anchors, "grad_anchors", rows * width);
    const Gradient of_p = gradient<T>(grad_positives, "grad_positives", rows * width);
    const Gradient of_n = gradient<T>(grad_negatives, "grad_negatives", rows * width);
    over(rows, 3 * width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().triplet_distances_backward(
          above.data(), a, p, n, width, to_positive, to_negative, of_a.data, of_a.dtype, of_p.data,
          of_p.dtype, of_n.data, of_n.dtype, begin, end);
    });
  });
}

// values (K, N): |x_i - y_j| or x_i . y_j for j = columns[k, i]; where that is negative they stay.
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

// Adds dL/dx and dL/dy from dL/dvalues (K, N); without y, both to grad_x. values: of distances.
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
    over(others, tiles(pairs, others) * p.width, [&](int64_t begin, int64_t end) {
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
