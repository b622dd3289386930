// What the operators over a loss of two sides are given (whole.cpp, amx_loss.cpp).
#pragma once

#include <iterator>
#include <string>
#include <vector>

#include "arguments.h"
#include "loss.h"

namespace fastsim {
namespace {

// The numbers and flags of a loss, by the names of fastsim/tile_loss.py and fastsim/pairs. They come as one
// list in this order, which takes a fifth of the time that an argument for each does.
// exclude_above: infinity for none. factor_cosine: whether targets are the cosines of the factors.
// scale_grad: whether the derivative by scale is wanted; without, it is 0.
// prefixes: what follows, of each a width and a factor; none for the rows as they are.
struct Numbers {
  struct Prefix {
    int64_t width;
    double factor;
  };
  std::vector<Prefix> prefixes;
  double negative_target, scale, bias, margin, positive_scale, base, exclude_above, guide_margin,
      weight;
  bool normalise, symmetric, cosine, guide_relative, factor_cosine, scale_grad;

  explicit Numbers(const std::vector<double>& from) {
    double* const numbers[] = {&negative_target, &scale, &bias,          &margin,
                               &positive_scale,  &base,  &exclude_above, &guide_margin,
                               &weight};
    bool* const flags[] = {&normalise,      &symmetric,     &cosine,
                           &guide_relative, &factor_cosine, &scale_grad};
    const size_t fixed = std::size(numbers) + std::size(flags);
    STD_TORCH_CHECK(from.size() >= fixed && (from.size() - fixed) % 2 == 0,
                    "fastsim: whole: wanted ", fixed, " numbers and two for each prefix");
    auto next = from.begin();
    for (double* number : numbers) *number = *next++;
    for (bool* flag : flags) *flag = *next++ != 0;
    for (; next != from.end(); next += 2) prefixes.push_back({int64_t(next[0]), next[1]});
  }
};

// Without y, x is held against itself. guide_rows (N, E), guide_columns (M, E): the same rows by a guide.
// factor_rows (N, E), factor_columns (M, E): the targets are their products. weights (N,) weigh the
// losses of the rows; without, the number `weight` all of them. seen: the numbers of the rows, added
// to; `totals`: what those of this batch come to, written.
struct Given {
  const Tensor& x;
  const Optional& y;
  const PairArguments pairs;
  const Kind kind;
  const Numbers& of;
  const Optional &guide_rows, &guide_columns, &column_bias, &row_shift, &factor_rows, &factor_columns,
      &prior, &positive_weights, &weights;
  const Optional &seen, &totals;
};

// How they come, after x and y.
#define GIVEN_SCHEMA                                                                               \
  "Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "                   \
  "Tensor? column_groups, Tensor? dense, str skip, Tensor(seen!)? seen, str kind, "                \
  "float[] numbers, Tensor? guide_rows, Tensor? guide_columns, Tensor? column_bias, "              \
  "Tensor? row_shift, Tensor? factor_rows, Tensor? factor_columns, Tensor? prior, "                \
  "Tensor? positive_weights, Tensor? weights"
// What is written.
#define RESULTS_SCHEMA                                                                             \
  "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "                       \
  "Tensor(parameters!)? parameters, Tensor(totals!)? totals"

// Refuses what is of other sizes than the two sides of so many rows and columns.
void check_sides(const Given& given, int64_t rows, int64_t columns) {
  const auto check_pair = [&](const Optional& of_rows, const Optional& of_columns,
                              const char* names, const char* name_of_rows,
                              const char* name_of_columns) {
    STD_TORCH_CHECK(bool(of_rows) == bool(of_columns), "fastsim: ", names,
                    ": wanted both or neither");
    if (!of_rows) return;
    const int64_t width = of_rows->size(1);
    check_matrix(*of_rows, name_of_rows, rows, width);
    check_matrix(*of_columns, name_of_columns, columns, width);
  };
  check_pair(given.guide_rows, given.guide_columns, "guide_rows, guide_columns", "guide_rows",
             "guide_columns");
  check_pair(given.factor_rows, given.factor_columns, "factor_rows, factor_columns",
             "factor_rows", "factor_columns");
  int64_t before = 0;
  for (const auto& prefix : given.of.prefixes) {
    STD_TORCH_CHECK(prefix.width > before, "fastsim: numbers: wanted ascending prefixes, got ",
                    prefix.width, " after ", before);
    before = prefix.width;
  }
}

}  // namespace
}  // namespace fastsim
