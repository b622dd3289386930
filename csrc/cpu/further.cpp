// InfoNCE with further candidates or label smoothing, and its gradient, in one operator. All scores
// of a row lie in one row of memory, section by section, so that one softmax over it is the loss.
// The sections are the scores with
//
//   candidates | anchors (query_to_query) | anchors (doc_to_query) | candidates (doc_to_doc)
//       | references | own negatives
//
// fastsim/losses/further_candidates.py has the formulas. A large batch is computed band by band. A
// loss with one of the three sections in the middle (`SquareSections`) is a single band, as their
// scores belong to two rows each. Pairs of the first section may be left out, and biased.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "one_call_arguments.h"
#include "operators.h"
#include "other_panel.h"
#include "own_negatives.h"
#include "panel.h"
#include "row_losses.h"

namespace fastsim {

namespace {

// A section of the scores: the columns [first, first + columns) of the block of all scores, if it
// is present.
template <class T>
struct Section {
  bool present;
  int64_t first, columns;

  // The scores of the section, without what decides the roles of pairs. band: the first section.
  Block<T> block(const Block<T>& band) const {
    Block<T> b{};
    b.scores = band.scores + first;
    b.stride = band.stride;
    b.rows = band.rows;
    b.columns = columns;
    return b;
  }
};

// Sets the scores of a block to the products of the first rows of a side with all of its rows, and
// leaves out the pairs of a row with itself.
template <class T>
void fill_square(const Block<T>& b, const Side<T>& side) {
  PanelColumns<T>(side, false).fill(side, b);
  for (int64_t i = 0; i < b.rows; ++i) b.scores[i * b.stride + i] = kLeftOut<T>;
}

// Sets the first N columns of `to` to the transpose of the first N columns of `from`, or with `add`
// adds it to them. Both blocks have N rows.
template <class T>
void transpose_square(const Block<T>& from, const Block<T>& to, bool add) {
  over(to.rows, to.rows, [&](int64_t begin, int64_t end) {
    kernels().of<T>().transpose(from.scores, from.stride, to.scores, to.stride, to.rows, add, begin,
                                end);
  });
}

// Which sections of anchors and candidates are present beside that of the candidates.
struct SquareSections {
  bool query_to_query, doc_to_query, doc_to_doc;

  bool any() const { return query_to_query || doc_to_query || doc_to_doc; }
};

// Where the gradients of x, y and own go; null: not wanted.
template <class T>
struct Gradients {
  T *x, *y, *own;

  explicit operator bool() const { return x || y || own; }
};

// The scores of all sections, a band of rows at a time, and the gradients of their sides.
template <class T>
class Sections {
 public:
  // x (N, D), y (M, D), own (N K, D) and references (R, D): the sides, as for `further`. band_rows:
  // the rows of a band. reads_columns: whether the unit rows of y are read one by one.
  Sections(const Tensor& x, const Tensor& y, const Optional& own, const Optional& references,
           const SquareSections& squares, const LossOptions& options, int64_t band_rows,
           bool reads_columns, const Gradients<T>& to)
      : own_(own), squares_(squares), cosine_(options.cosine),
        wants_sum_(options.scale_grad), to_(to),
        per_row_(own && x.size(0) ? own->size(0) / x.size(0) : 0),
        several_bands_(band_rows < x.size(0)),
        // The unit rows may lie where the gradient goes, as the gradient of a band is written over
        // its unit rows when nothing reads these any more.
        rows_(x, cosine_, cosine_ && !squares.any() ? to.x : nullptr),
        columns_(y, y.size(1), cosine_, nullptr,
                 !squares.any() && !reads_columns && is_lazy(y, references)) {
    const int64_t count = rows_.count;
    if (references) {
      references_.emplace(*references, rows_.width, cosine_, nullptr, is_lazy(y, references));
      packed_references_.emplace(*references_, several_bands_);
    }
    packed_columns_.emplace(columns_, several_bands_);
    add(true, columns_.count);
    query_query_ = add(squares.query_to_query, count);
    doc_query_ = add(squares.doc_to_query, count);
    doc_doc_ = add(squares.doc_to_doc, columns_.count);
    query_reference_ = add(bool(references_), references_ ? references_->count : 0);
    query_own_ = add(bool(own), per_row_);
    // Without rows there is no band, and the gradient of y is written by the first band.
    if (to.y && count == 0) std::fill_n(to.y, columns_.count * columns_.width, T(0));
  }

  const Side<T>& rows() const { return rows_; }
  const Side<T>& columns() const { return columns_; }

  // The number of columns of all sections together.
  int64_t total_columns() const { return total_columns_; }

  // The distance of two rows of scores.
  int64_t stride() const { return panel_stride<T>(total_columns_); }

  // Below, b is the band of the first section, the anchors with the candidates, whose first row is
  // row `first` of the batch. The scores of the other sections lie beside its columns.

  // The own negatives of the rows of a band, if there are any.
  std::optional<OwnNegatives<T>> own_negatives(const Block<T>& b, int64_t first) const {
    if (!own_) return std::nullopt;
    return std::optional<OwnNegatives<T>>(std::in_place, *own_, per_row_, cosine_, first,
                                          rows_ + first * rows_.width, b.rows);
  }

  // Computes the scores of all sections.
  void fill(const Block<T>& b, int64_t first, const std::optional<OwnNegatives<T>>& own) const {
    packed_columns_->fill(rows_ + first * rows_.width, b);
    if (query_query_.present) fill_square<T>(query_query_.block(b), rows_);
    if (doc_query_.present) transpose_square(b, doc_query_.block(b), false);
    if (doc_doc_.present) fill_square<T>(doc_doc_.block(b), columns_);
    if (query_reference_.present) {
      packed_references_->fill(rows_ + first * rows_.width, query_reference_.block(b));
    }
    if (own) own->fill(query_own_.block(b));
  }

  // Leaves out the own negatives whose score is more than `margin` above that of the positive. Both
  // scores are summed in one order, so a copy of the positive stays. Scores that differ by rounding
  // count as equal (fastsim/ties.py).
  void leave_out_own(const Block<T>& b, int64_t first, double margin) const {
    constexpr T kSlack = 8 * std::numeric_limits<T>::epsilon();  // SLACK of ties.py
    const Block<T> own = query_own_.block(b);
    const int64_t width = rows_.width;
    std::vector<T> thresholds(own.rows);
    const T* const band = rows_ + first * width;
    const Partners<T> pairs{band, columns_, own.rows, width, 1, b.positives, false};
    over(own.rows, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(pairs, thresholds.data(), begin, end);
    });
    for (int64_t i = 0; i < own.rows; ++i) {
      T size = 1;
      for (int64_t k = 0; k < own.columns; ++k) {
        size = std::max(size, std::abs(own.scores[i * own.stride + k]));
      }
      thresholds[i] += T(margin) + kSlack * size;
    }
    leave_out_above(own, own.scores, own.stride, thresholds.data());
  }

  // The scores of all sections as those of one softmax. column_ids: of all columns, or null.
  Block<T> all_sections(Block<T> b, const int64_t* column_ids) const {
    b.columns = total_columns_;
    b.column_ids = column_ids;
    b.row_metrics = nullptr;
    b.akin = {};
    return b;
  }

  // Writes or adds the products of the score gradients with the operands.
  void add_gradients(const Block<T>& b, int64_t first, const std::optional<OwnNegatives<T>>& own) {
    const int64_t width = rows_.width;
    // The scores of doc_query are scores of b, so their gradients add up.
    if (doc_query_.present) transpose_square(doc_query_.block(b), b, true);
    // First the products with the unit rows of the band, which its gradient may be written over.
    if (to_.y) {
      multiply_panel<T>(b, rows_ + first * width, width, to_.y, true, first > 0);
      if (doc_doc_.present) add_square(doc_doc_.block(b), columns_, to_.y);
    }
    if (to_.own) {
      own->negatives_gradient(query_own_.block(b), to_.own + first * per_row_ * width);
    }
    if (!to_.x) return;
    T* const to_band = to_.x + first * width;
    multiply_columns_of(b, columns_, to_band, false);
    if (query_query_.present) add_square(query_query_.block(b), rows_, to_band);
    if (wants_sum_ && squares_.any()) squares_dot_ = rows_.dot(to_band);
    if (query_reference_.present) {
      multiply_columns_of(query_reference_.block(b), *references_, to_band, true);
    }
    if (own) own->add_to_rows(query_own_.block(b), to_band);
  }

  // Replaces the gradients of the operands, after those of all bands, by those of x and y. Returns
  // the sum over all pairs of score times score gradient if that is wanted, otherwise 0.
  double finish() const {
    const double of_rows = to_.x ? rows_.finish(to_.x, wants_sum_) : 0;
    const double of_columns = to_.y ? columns_.finish(to_.y, wants_sum_ && squares_.any()) : 0;
    // The rows are one side of every pair. With squares, which are computed before any other
    // section adds to the gradient of the rows, each pair until then belongs to two rows or columns
    // of both gradients.
    return squares_.any() ? of_rows + (of_columns - squares_dot_) / 2 : of_rows;
  }

 private:
  // Lays out the next section.
  Section<T> add(bool present, int64_t columns) {
    const Section<T> section{present, total_columns_, columns};
    total_columns_ += present ? columns : 0;
    return section;
  }

  // Whether products read y and the references without their unit rows (PanelColumns).
  bool is_lazy(const Tensor& y, const Optional& references) const {
    const int64_t count = y.size(0) + (references ? references->size(0) : 0);
    return PanelColumns<T>::is_lazy(count, y.size(1), several_bands_, bool(to_));
  }

  // to (+)= block columns, for the columns of the section.
  static void multiply_columns_of(const Block<T>& b, const Side<T>& columns, T* to, bool add) {
    multiply_panel<T>(b, columns.operand(), columns.inverse(), columns.width, to, add);
  }

  // Adds to `grad` the gradient from a section of which `side` is both sides.
  static void add_square(const Block<T>& b, const Side<T>& side, T* grad) {
    multiply_panel<T>(b, side, side.width, grad, false, true);
    multiply_panel<T>(b, side, side.width, grad, true, true);
  }

  const Optional& own_;
  const SquareSections squares_;
  const bool cosine_, wants_sum_;
  const Gradients<T> to_;
  const int64_t per_row_;
  const bool several_bands_;
  const Side<T> rows_, columns_;
  std::optional<Side<T>> references_;
  std::optional<PanelColumns<T>> packed_columns_, packed_references_;
  Section<T> query_query_, doc_query_, doc_doc_, query_reference_, query_own_;
  int64_t total_columns_ = 0;
  double squares_dot_ = 0;
};

// The ids of `total` columns: those of the candidates, and for all other columns an id that no row
// has. Empty without ids.
template <class T>
std::vector<int64_t> ids_of_columns(const Block<T>& candidates, int64_t total) {
  if (!candidates.column_ids) return {};
  std::vector<bool> used(candidates.rows + 1);  // so one of 0 to N is unused
  for (int64_t i = 0; i < candidates.rows; ++i) {
    const int64_t id = candidates.row_ids[i];
    if (id >= 0 && id <= candidates.rows) used[id] = true;
  }
  const int64_t unused = std::find(used.begin(), used.end(), false) - used.begin();
  std::vector<int64_t> ids(candidates.column_ids, candidates.column_ids + candidates.columns);
  ids.resize(total, unused);
  return ids;
}

// An error unless the sides fit together, and the loss is one that the operator computes.
template <class T>
void check_further(const LossArguments& arguments, const Optional& own, const Optional& references,
                   const SquareSections& squares, const Block<T>& candidates, int64_t tall) {
  const int64_t count = candidates.rows, width = arguments.x.size(1);
  const LossOptions& options = arguments.options;
  if (own) check_matrix(*own, "own", count ? own->size(0) / count * count : 0, width);
  if (references) check_matrix(*references, "references", references->size(0), width);
  STD_TORCH_CHECK(arguments.kind == Kind::softmax && !options.symmetric && options.prefixes.empty(),
                  "fastsim: kind: wanted a softmax of rows, without prefixes");
  STD_TORCH_CHECK(arguments.pairs.positives,
                  "fastsim: positives: wanted those of all rows, got None");
  STD_TORCH_CHECK(!arguments.factor_rows && !candidates.dense.data,
                  "fastsim: factor_rows, dense: wanted neither");
  STD_TORCH_CHECK(!candidates.row_groups || !(squares.any() || own || references),
                  "fastsim: row_groups: wanted None beside further candidates");
  STD_TORCH_CHECK(tall > 0, "fastsim: tall: wanted rows of a band, got ", tall);
  if (!squares.any()) return;
  STD_TORCH_CHECK(tall >= count, "fastsim: tall: wanted all ", count,
                  " rows of a loss with these directions, got ", tall);
  const bool changed = candidates.row_ids || arguments.guide_rows || arguments.column_bias ||
                       arguments.row_shift || std::isfinite(options.exclude_above);
  STD_TORCH_CHECK(!changed, "fastsim: row_ids, guide_rows, column_bias, row_shift, exclude_above: "
                            "wanted none of them with these directions");
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(candidates.positives[i] == i, "fastsim: positives: wanted column ", i,
                    " of row ", i, " with these directions, got ", candidates.positives[i]);
  }
}

// InfoNCE of the anchors x (N, D) and the candidates y (M, D), by the arguments of `in_one_call`.
// own (N K, D): K own negatives of each anchor. references (R, D). query_to_query, doc_to_query,
// doc_to_doc: whether these sections are present; row i of y is then the positive of x_i, and no
// pair is left out or biased. tall: the rows of a band, all rows for SquareSections. Gradients are
// written in the compute type, if they are given; the derivative by scale needs that of x, and with
// SquareSections that of y. total: () the weighted sum of the row losses, or (N,) the row losses,
// not weighted.
void further(Tensor x, Tensor y, Optional own, Optional references, bool query_to_query,
             bool doc_to_query, bool doc_to_doc, LOSS_PARAMETERS, int64_t tall, Optional grad_own,
             RESULTS_PARAMETERS) {
  const LossOptions options(numbers);
  const Optional candidates_of_x = y;
  const LossArguments arguments LOSS_ARGUMENTS(x, candidates_of_x, options);
  const SquareSections squares{query_to_query, doc_to_query, doc_to_doc};
  const int64_t count = x.size(0), width = x.size(1);
  check_matrix(y, "y", y.size(0), width);
  check_sides(arguments, count, y.size(0));
  STD_TORCH_CHECK(own || !grad_own, "fastsim: grad_own: wanted own too");
  with_type(total, "total", [&](auto type) {
    using T = decltype(type);
    const Block<T> candidates = all_pairs<T>(arguments.pairs, count, y.size(0));
    check_further(arguments, own, references, squares, candidates, tall);
    const Gradients<T> to{output<T>(grad_x, "grad_x", count * width),
                          output<T>(grad_y, "grad_y", y.size(0) * width),
                          output<T>(grad_own, "grad_own", own ? own->size(0) * width : 0)};
    T* const out = output<T>(total, "total", total.dim() ? count : 1);
    double* const parameter_grads = output<double>(parameters, "parameters", 2);
    STD_TORCH_CHECK(!options.scale_grad || (grad_x && (grad_y || !squares.any())),
                    "fastsim: grad_x, grad_y: wanted both for the derivative by scale");
    const bool excludes_own = own && std::isfinite(options.exclude_above);
    Sections<T> sections(x, y, own, references, squares, options, tall, totals || excludes_own, to);
    const RowLosses<T> losses(arguments, candidates, 1, bool(to));
    std::optional<OtherPanel<T>> guide;
    if (guide_rows) guide.emplace(*guide_rows, *guide_columns, true, tall);
    BatchMetrics<T> metrics(row_metrics, totals, count, options.cosine);
    metrics.add_row_potentials(sections.rows());
    metrics.add_column_potentials(sections.columns());
    const std::vector<int64_t> ids = ids_of_columns(candidates, sections.total_columns());
    const Scratch<T> memory(std::min(tall, count) * sections.stride());
    Result result;
    for (int64_t first = 0; first < count; first += tall) {
      const Block<T> targets = candidates.from_row(first);
      Block<T> b = targets;
      // With label smoothing every candidate is a target. Metrics are those of the positive.
      b.row_groups = b.column_groups = nullptr;
      b.scores = memory;
      b.stride = sections.stride();
      b.rows = std::min(tall, count - first);
      const auto own_negatives = sections.own_negatives(b, first);
      sections.fill(b, first, own_negatives);
      if (excludes_own) sections.leave_out_own(b, first, options.exclude_above);
      const OtherScores<T> guide_scores = guide ? guide->band(first) : OtherScores<T>{};
      const auto run = [&](const Block<T>& prepared) {
        if (prepared.row_metrics) record_at_once(prepared);
        Block<T> all = sections.all_sections(prepared, ids.empty() ? nullptr : ids.data());
        all.row_groups = targets.row_groups;
        all.column_groups = targets.column_groups;
        result += softmax_of_rows<T>(all, losses.loss, losses.row_inputs.weights + first,
                                     total.dim() ? out + first : nullptr);
      };
      losses.prepare(b, first, metrics.row_metrics(first), {}, guide_scores, run);
      if (to) sections.add_gradients(b, first, own_negatives);
    }
    result.scale_score_grad += sections.finish() / options.scale;
    metrics.write();
    if (!total.dim()) *out = T(result.loss);
    if (!parameter_grads) return;
    parameter_grads[0] = options.scale_grad ? double(result.scale_score_grad) : 0;
    parameter_grads[1] = 0;
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(further,
                   "(Tensor x, Tensor y, Tensor? own, Tensor? references, bool query_to_query, "
                   "bool doc_to_query, bool doc_to_doc, " LOSS_SCHEMA
                   ", int tall, Tensor(grad_own!)? grad_own, " RESULTS_SCHEMA ") -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
