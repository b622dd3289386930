// The arguments that the operators for a loss of two sides share (one_call.cpp, amx_loss.cpp).
#pragma once

#include <iterator>
#include <string>
#include <vector>

#include "arguments.h"
#include "loss.h"

namespace fastsim {
namespace {

// The numbers and flags of a loss, with the names of fastsim/tile_loss.py and fastsim/pairs. The
// caller passes them as one list in this order, which takes a fifth of the time of one argument for
// each.
//
// exclude_above: infinity leaves out no pair. factor_cosine: whether the targets are the cosines of
// the factors. scale_grad: whether to compute the derivative by scale; without it, 0 is written.
// prefixes: at the end of the list, a width and a factor for each; without any, the loss is that of
// the whole rows.
struct LossOptions {
  struct Prefix {
    int64_t width;
    double factor;
  };
  std::vector<Prefix> prefixes;
  double negative_target, scale, bias, margin, positive_scale, base, exclude_above, guide_margin,
      weight;
  bool normalise, symmetric, cosine, guide_relative, factor_cosine, scale_grad;

  explicit LossOptions(const std::vector<double>& list) {
    double* const numbers[] = {&negative_target, &scale, &bias,          &margin,
                               &positive_scale,  &base,  &exclude_above, &guide_margin,
                               &weight};
    bool* const flags[] = {&normalise,      &symmetric,     &cosine,
                           &guide_relative, &factor_cosine, &scale_grad};
    const size_t fixed = std::size(numbers) + std::size(flags);
    STD_TORCH_CHECK(list.size() >= fixed && (list.size() - fixed) % 2 == 0,
                    "fastsim: in_one_call: wanted ", fixed, " numbers and two for each prefix");
    auto next = list.begin();
    for (double* number : numbers) *number = *next++;
    for (bool* flag : flags) *flag = *next++ != 0;
    for (; next != list.end(); next += 2) prefixes.push_back({int64_t(next[0]), next[1]});
  }
};

// The inputs of a loss of the rows x (N, D) and the columns y (M, D). Without y the columns are x.
//
// guide_rows (N, E), guide_columns (M, E): a guide's embeddings of the same rows and columns.
// factor_rows (N, E), factor_columns (M, E): their products are the targets. column_bias (M,) is
// added to the logits of a column, row_shift (N,) is subtracted from the scores of a row.
// prior, positive_weights: as in RowInputs. weights (N,): the weights of the row losses; without
// them every row has options.weight. totals: overwritten with the totals of this batch.
// row_metrics (N, kRowMetrics): without totals, the metrics of this batch are merged into them.
struct LossArguments {
  const Tensor& x;
  const Optional& y;
  const PairArguments pairs;
  const Kind kind;
  const LossOptions& options;
  const Optional &guide_rows, &guide_columns, &column_bias, &row_shift, &factor_rows,
      &factor_columns, &prior, &positive_weights, &weights;
  const Optional &row_metrics, &totals;
};

// The parameters of an operator for these arguments, except x and y; their schema; and the
// LossArguments made of them.
#define LOSS_PARAMETERS                                                                           \
  Optional positives, Optional row_ids, Optional column_ids, Optional row_groups,                 \
      Optional column_groups, Optional dense, std::string skip, Optional row_metrics,             \
      std::string kind, std::vector<double> numbers, Optional guide_rows, Optional guide_columns, \
      Optional column_bias, Optional row_shift, Optional factor_rows, Optional factor_columns,    \
      Optional prior, Optional positive_weights, Optional weights
#define LOSS_SCHEMA                                                                               \
  "Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "                  \
  "Tensor? column_groups, Tensor? dense, str skip, Tensor(row_metrics!)? row_metrics, str kind, " \
  "float[] numbers, Tensor? guide_rows, Tensor? guide_columns, Tensor? column_bias, "             \
  "Tensor? row_shift, Tensor? factor_rows, Tensor? factor_columns, Tensor? prior, "               \
  "Tensor? positive_weights, Tensor? weights"
#define LOSS_ARGUMENTS(x, y, options)                                                             \
  {x, y,                                                                                          \
   {positives, row_ids, column_ids, row_groups, column_groups, dense, options.negative_target,    \
    skip, row_metrics},                                                                           \
   kind_of(kind), options, guide_rows, guide_columns, column_bias, row_shift, factor_rows,        \
   factor_columns, prior, positive_weights, weights, row_metrics, totals}
// The tensors that an operator writes, and their schema.
#define RESULTS_PARAMETERS                                                                        \
  Optional grad_x, Optional grad_y, Tensor total, Optional parameters, Optional totals
#define RESULTS_SCHEMA                                                                            \
  "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(total!) total, "                      \
  "Tensor(parameters!)? parameters, Tensor(totals!)? totals"

// An error unless the guide and the factors have this number of rows and columns, and the prefixes
// ascend.
void check_sides(const LossArguments& arguments, int64_t rows, int64_t columns) {
  const auto check_pair = [&](const Optional& row_side, const Optional& column_side,
                              const char* names, const char* row_name, const char* column_name) {
    STD_TORCH_CHECK(bool(row_side) == bool(column_side), "fastsim: ", names,
                    ": wanted both or neither");
    if (!row_side) return;
    const int64_t width = row_side->size(1);
    check_matrix(*row_side, row_name, rows, width);
    check_matrix(*column_side, column_name, columns, width);
  };
  check_pair(arguments.guide_rows, arguments.guide_columns, "guide_rows, guide_columns",
             "guide_rows", "guide_columns");
  check_pair(arguments.factor_rows, arguments.factor_columns, "factor_rows, factor_columns",
             "factor_rows", "factor_columns");
  int64_t before = 0;
  for (const auto& prefix : arguments.options.prefixes) {
    STD_TORCH_CHECK(prefix.width > before, "fastsim: numbers: wanted ascending prefixes, got ",
                    prefix.width, " after ", before);
    before = prefix.width;
  }
}

}  // namespace
}  // namespace fastsim
