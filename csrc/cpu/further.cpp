// InfoNCE with further candidates or label smoothing, and its gradient, in one operator. All scores
// of a row lie in one row of memory, section by section, so that one softmax over it is the loss.
// The sections are the scores with
//
//   candidates | anchors (query_to_query) | anchors (doc_to_query) | candidates (doc_to_doc)
//       | references | own negatives
//
// fastsim/losses/further_candidates.py has the formulas. A large batch is computed band by band. A
// loss with one of the three sections in the middle (`SquareSections`) is a single band, as their
// scores belong to two rows each.

#include <numeric>
#include <optional>
#include <vector>

#include "arguments.h"
#include "block_losses.h"
#include "metrics_recorder.h"
#include "operators.h"
#include "own_negatives.h"
#include "panel.h"
#include "side.h"
#include "totals.h"

namespace fastsim {

namespace {

// A section of the scores: the columns [first, first + columns) of the block of all scores, if it
// is present.
template <class T>
struct Section {
  bool present;
  int64_t first, columns;

  // The scores of the section, without what decides the roles of pairs: only `all` has that.
  Block<T> block(const Block<T>& all) const {
    Block<T> b{};
    b.scores = all.scores + first;
    b.stride = all.stride;
    b.rows = all.rows;
    b.columns = columns;
    return b;
  }
};

// Sets the scores of a block to the products of `rows` and `columns`.
template <class T>
void fill(const Block<T>& b, const T* rows, const Side<T>& columns) {
  PanelColumns<T>(columns, false).fill(rows, b);
}

// Leaves out the pairs of row i and column i.
template <class T>
void leave_out_diagonal(const Block<T>& b) {
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
           const SquareSections& squares, bool cosine, int64_t band_rows, bool reads_columns,
           const Gradients<T>& to)
      : own_(own), cosine_(cosine), to_(to),
        per_row_(own && x.size(0) ? own->size(0) / x.size(0) : 0),
        several_bands_(band_rows < x.size(0)),
        // The unit rows may lie where the gradient goes, as the gradient of a band is written over
        // its unit rows when nothing reads these any more.
        rows_(x, cosine, cosine && !squares.any() ? to.x : nullptr),
        columns_(y, y.size(1), cosine, nullptr,
                 !squares.any() && !reads_columns && is_lazy(y, references)) {
    const int64_t count = rows_.count;
    if (references) {
      references_.emplace(*references, rows_.width, cosine, nullptr, is_lazy(y, references));
      packed_references_.emplace(*references_, several_bands_);
    }
    packed_columns_.emplace(columns_, several_bands_);
    query_doc_ = add(true, columns_.count);
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
  // The block of all scores of `count` rows, in memory for stride() numbers for each row.
  // positives (count,): the columns of the rows' positives.
  Block<T> block(T* memory, int64_t count, const int64_t* positives) const {
    Block<T> b{};
    b.scores = memory;
    b.stride = stride();
    b.rows = count;
    b.columns = total_columns_;
    b.positives = positives;
    return b;
  }

  // The scores of the anchors with the candidates.
  Block<T> query_doc(const Block<T>& b) const { return query_doc_.block(b); }

  // Computes the scores of the anchors with the candidates, the section that the metrics are of.
  // first: the first row of the band, here and below.
  void fill_query_doc(const Block<T>& b, int64_t first) const {
    packed_columns_->fill(rows_ + first * rows_.width, query_doc_.block(b));
  }

  // The own negatives of the rows of a block, if there are any.
  std::optional<OwnNegatives<T>> own_negatives(const Block<T>& b, int64_t first) const {
    if (!own_) return std::nullopt;
    return std::optional<OwnNegatives<T>>(std::in_place, *own_, per_row_, cosine_, first,
                                          rows_ + first * rows_.width, b.rows);
  }

  // Computes the scores of all other sections.
  void fill_others(const Block<T>& b, int64_t first,
                   const std::optional<OwnNegatives<T>>& own) const {
    if (query_query_.present) {
      fill<T>(query_query_.block(b), rows_, rows_);
      leave_out_diagonal(query_query_.block(b));
    }
    if (doc_query_.present) transpose_square(query_doc_.block(b), doc_query_.block(b), false);
    if (doc_doc_.present) {
      fill<T>(doc_doc_.block(b), columns_, columns_);
      leave_out_diagonal(doc_doc_.block(b));
    }
    if (query_reference_.present) {
      packed_references_->fill(rows_ + first * rows_.width, query_reference_.block(b));
    }
    if (own) own->fill(query_own_.block(b));
  }

  // Writes or adds the products of the score gradients in b with the operands.
  void add_gradients(const Block<T>& b, int64_t first,
                     const std::optional<OwnNegatives<T>>& own) const {
    const int64_t width = rows_.width;
    const Block<T> query_doc = query_doc_.block(b);
    // The scores of doc_query are scores of query_doc, so their gradients add up.
    if (doc_query_.present) transpose_square(doc_query_.block(b), query_doc, true);
    // First the products with the unit rows of the band, which its gradient may be written over.
    if (to_.y) {
      multiply_panel<T>(query_doc, rows_ + first * width, width, to_.y, true, first > 0);
      if (doc_doc_.present) add_square(doc_doc_.block(b), columns_, to_.y);
    }
    if (to_.own) {
      own->negatives_gradient(query_own_.block(b), to_.own + first * per_row_ * width);
    }
    if (!to_.x) return;
    T* const to_band = to_.x + first * width;
    multiply_columns_of(query_doc, columns_, to_band, false);
    if (query_query_.present) add_square(query_query_.block(b), rows_, to_band);
    if (query_reference_.present) {
      multiply_columns_of(query_reference_.block(b), *references_, to_band, true);
    }
    if (own) own->add_to_rows(query_own_.block(b), to_band);
  }

  // Replaces the gradients of the operands, after those of all bands, by those of x and y.
  void finish() const {
    if (to_.x) rows_.finish(to_.x);
    if (to_.y) columns_.finish(to_.y);
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
  const bool cosine_;
  const Gradients<T> to_;
  const int64_t per_row_;
  const bool several_bands_;
  const Side<T> rows_, columns_;
  std::optional<Side<T>> references_;
  std::optional<PanelColumns<T>> packed_columns_, packed_references_;
  Section<T> query_doc_, query_query_, doc_query_, doc_doc_, query_reference_, query_own_;
  int64_t total_columns_ = 0;
};

// Records the row metrics of the scores of a band's anchors with the candidates.
template <class T>
void record_metrics(const Sections<T>& sections, const Block<T>& b, double* row_metrics) {
  Block<T> recorded = sections.query_doc(b);
  recorded.positives = b.positives;
  const MetricsRecorder<T> recorder(recorded, row_metrics);
  record_at_once(recorded);
}

// Makes every candidate a target, the positive with the largest share. The targets in the block are
// relative to the positive's; `normalise` of the loss divides them by their sum. indices
// (candidates,): 0, 1, ..., of which the block's positives are a part.
template <class T>
void smooth_labels(double label_smoothing, int64_t candidates, const int64_t* indices,
                   Block<T>& b) {
  const double share = label_smoothing / double(candidates);
  b.row_groups = b.positives;
  b.column_groups = indices;
  b.negative_target = T(share / (1 - label_smoothing + share));
}

// An error unless the sides fit together, and bands of `tall` rows are possible.
void check_sides(const Tensor& x, const Tensor& y, const Optional& own, const Optional& references,
                 const SquareSections& squares, int64_t tall) {
  const int64_t count = x.size(0), width = x.size(1);
  if (y.size(0) < count || y.size(1) != width) {
    refuse("y", y, "a positive of x's width for each of ", count, " rows");
  }
  if (own) check_matrix(*own, "own", count ? own->size(0) / count * count : 0, width);
  if (references) check_matrix(*references, "references", references->size(0), width);
  STD_TORCH_CHECK(tall > 0, "fastsim: tall: wanted rows of a band, got ", tall);
  STD_TORCH_CHECK(!squares.any() || tall >= count, "fastsim: tall: wanted all ", count,
                  " rows of a loss with these directions, got ", tall);
}

// InfoNCE of the anchors x (N, D) and the candidates y (M, D). Row i of y is the positive of x_i.
// own (N K, D): K own negatives of each anchor. references (R, D). query_to_query, doc_to_query,
// doc_to_doc: whether these sections are present. label_smoothing: must be 0 if there is any
// further candidate. weights (N,): the weights of the row losses; without them every row has
// `weight`. tall: the rows of a band, all rows for SquareSections. Gradients are written in the
// compute type, if they are given. loss: () the weighted sum of the row losses, or (N,) the row
// losses, not weighted.
void further(Tensor x, Tensor y, Optional own, Optional references, bool query_to_query,
             bool doc_to_query, bool doc_to_doc, double scale, double margin,
             double label_smoothing, bool cosine, Optional weights, double weight, int64_t tall,
             Optional grad_x, Optional grad_y, Optional grad_own, Tensor loss, Optional totals) {
  with_type(loss, "loss", [&](auto type) {
    using T = decltype(type);
    const SquareSections squares{query_to_query, doc_to_query, doc_to_doc};
    const int64_t count = x.size(0), width = x.size(1);
    check_sides(x, y, own, references, squares, tall);
    STD_TORCH_CHECK(own || !grad_own, "fastsim: grad_own: wanted own too");
    const Gradients<T> to{output<T>(grad_x, "grad_x", count * width),
                          output<T>(grad_y, "grad_y", y.size(0) * width),
                          output<T>(grad_own, "grad_own", own ? own->size(0) * width : 0)};
    const Sections<T> sections(x, y, own, references, squares, cosine, tall, bool(totals), to);
    const int64_t candidates = sections.columns().count;
    STD_TORCH_CHECK(label_smoothing == 0 || sections.total_columns() == candidates,
                    "fastsim: label_smoothing: wanted 0 beside further candidates, got ",
                    label_smoothing);
    T* const out = output<T>(loss, "loss", loss.dim() ? count : 1);
    BatchMetrics<T> metrics({}, totals, count, cosine);
    metrics.add_row_potentials(sections.rows());
    metrics.add_column_potentials(sections.columns());

    Loss softmax{};
    softmax.kind = Kind::softmax;
    softmax.scale = scale;
    softmax.margin = margin;
    softmax.score_grad = bool(to);
    softmax.normalise = label_smoothing != 0;
    const std::vector<T> equal_weights(weights ? 0 : count, T(weight));
    const T* row_weights = weights ? input<T>(*weights, "weights", count) : equal_weights.data();
    // Column i is the positive of row i.
    std::vector<int64_t> indices(std::max(count, candidates));
    std::iota(indices.begin(), indices.end(), 0);
    const Scratch<T> memory(std::min(tall, count) * sections.stride());
    Result result;
    for (int64_t first = 0; first < count; first += tall) {
      const int64_t rows = std::min(tall, count - first);
      Block<T> b = sections.block(memory, rows, indices.data() + first);
      const auto own_negatives = sections.own_negatives(b, first);
      sections.fill_query_doc(b, first);
      if (totals) record_metrics(sections, b, metrics.row_metrics(first));
      sections.fill_others(b, first, own_negatives);
      if (label_smoothing != 0) smooth_labels(label_smoothing, candidates, indices.data(), b);
      result += softmax_of_rows<T>(b, softmax, row_weights + first,
                                   loss.dim() ? out + first : nullptr);
      if (softmax.score_grad) sections.add_gradients(b, first, own_negatives);
    }
    sections.finish();
    metrics.write();
    if (!loss.dim()) *out = T(result.loss);
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(
      further, "(Tensor x, Tensor y, Tensor? own, Tensor? references, bool query_to_query, "
               "bool doc_to_query, bool doc_to_doc, float scale, float margin, "
               "float label_smoothing, bool cosine, Tensor? weights, float weight, int tall, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(grad_own!)? grad_own, "
               "Tensor(loss!) loss, Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
