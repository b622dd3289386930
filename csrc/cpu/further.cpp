// InfoNCE of a small batch with further candidates or label smoothing, and its gradient, in one
// operator. All scores of a row lie in one row of memory, section by section, so that one softmax
// over it is the loss. The sections are the scores with
//
//   candidates | anchors (query_to_query) | anchors (doc_to_query) | candidates (doc_to_doc)
//       | references | own negatives
//
// fastsim/losses/further_candidates.py has the formulas.

#include <numeric>
#include <optional>
#include <vector>

#include "arguments.h"
#include "block_losses.h"
#include "metrics_recorder.h"
#include "operators.h"
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
  Scratch<T> packed(packed_rows<T>(columns.count) * columns.width);
  pack<T>(columns, columns.count, columns.width, packed);
  fill_scores<T>(rows, columns.width, packed, b);
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

// The section of own negatives: the scores (N, K) of each of the N rows with its own K negatives,
// and their gradients. `negatives` (N K, D) has those of row 0 first, then those of row 1.
template <class T>
class OwnNegatives {
 public:
  OwnNegatives(const Side<T>& rows, const Side<T>& negatives, int64_t per_row)
      : rows_(rows), negatives_(negatives), per_row_(per_row) {}

  // Computes the scores.
  void fill(const Block<T>& b) const {
    std::vector<int64_t> columns(negatives_.count);
    for (int64_t i = 0; i < b.rows; ++i) {
      for (int64_t k = 0; k < per_row_; ++k) columns[k * b.rows + i] = i * per_row_ + k;
    }
    std::vector<T> values(negatives_.count);
    const Partners<T> pairs{rows_, negatives_, b.rows, rows_.width, per_row_, columns.data(),
                            false};
    over(b.rows, per_row_ * rows_.width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(pairs, values.data(), begin, end);
    });
    for (int64_t i = 0; i < b.rows; ++i) {
      for (int64_t k = 0; k < per_row_; ++k) b.scores[i * b.stride + k] = values[k * b.rows + i];
    }
  }

  // Adds the products of the score gradients and the negatives to the gradient of the rows, (N, D).
  void add_to_rows(const Block<T>& b, T* grad) const {
    const int64_t width = rows_.width;
    over(b.rows, per_row_ * width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Matrix row_negatives = row_major<T>(negatives_ + i * per_row_ * width, width);
        kernels().of<T>().multiply_rows(b.scores + i * b.stride, b.stride, per_row_,
                                        row_negatives, nullptr, width, grad + i * width, true,
                                        {0, 1});
      }
    });
  }

  // Sets `grad` (N K, D) to the gradient of the caller's negatives.
  void negatives_gradient(const Block<T>& b, T* grad) const {
    const int64_t width = rows_.width;
    over(b.rows, per_row_ * width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels().of<T>().multiply_columns(b.scores + i * b.stride, b.stride, 1, rows_ + i * width,
                                           width, grad + i * per_row_ * width, false,
                                           {0, per_row_});
      }
    });
    negatives_.finish(grad);
  }

 private:
  const Side<T>&rows_, &negatives_;
  const int64_t per_row_;
};

// Which sections of anchors and candidates are present beside that of the candidates.
struct SectionFlags {
  bool query_to_query, doc_to_query, doc_to_doc;
};

// The scores of all sections, in one block of memory, and the gradients of their sides.
template <class T>
class Sections {
 public:
  // x (N, D), y (M, D), own (N K, D) and references (R, D): the sides, as for `further`.
  Sections(const Tensor& x, const Tensor& y, const Optional& own, const Optional& references,
           const SectionFlags& flags, bool cosine)
      : rows_(x, cosine), columns_(y, cosine) {
    const int64_t count = rows_.count, width = rows_.width;
    if (columns_.count < count || columns_.width != width) {
      refuse("y", y, "a positive of x's width for each of ", count, " rows");
    }
    const int64_t per_row = own && count ? own->size(0) / count : 0;
    if (own) check_matrix(*own, "own", per_row * count, width);
    if (references) check_matrix(*references, "references", references->size(0), width);
    if (own) negatives_.emplace(*own, cosine);
    if (references) references_.emplace(*references, cosine);
    if (negatives_) own_negatives_.emplace(rows_, *negatives_, per_row);
    query_doc_ = add(true, columns_.count);
    query_query_ = add(flags.query_to_query, count);
    doc_query_ = add(flags.doc_to_query, count);
    doc_doc_ = add(flags.doc_to_doc, columns_.count);
    query_reference_ = add(bool(references_), references_ ? references_->count : 0);
    query_own_ = add(bool(negatives_), per_row);
  }

  const Side<T>& rows() const { return rows_; }
  const Side<T>& columns() const { return columns_; }

  // The number of columns of all sections together.
  int64_t total_columns() const { return total_columns_; }

  // The distance of two rows of scores.
  int64_t stride() const { return panel_stride<T>(total_columns_); }
  // The block of all scores, in memory for stride() numbers for each row. indices: 0, 1, ..., since
  // column i is the positive of row i.
  Block<T> block(T* memory, const std::vector<int64_t>& indices) const {
    Block<T> b{};
    b.scores = memory;
    b.stride = stride();
    b.rows = rows_.count;
    b.columns = total_columns_;
    b.positives = indices.data();
    return b;
  }

  // The scores of the anchors with the candidates.
  Block<T> query_doc(const Block<T>& b) const { return query_doc_.block(b); }

  // Computes the scores of the anchors with the candidates, the section that the metrics are of.
  void fill_query_doc(const Block<T>& b) const { fill<T>(query_doc_.block(b), rows_, columns_); }

  // Computes the scores of all other sections.
  void fill_others(const Block<T>& b) const {
    if (query_query_.present) {
      fill<T>(query_query_.block(b), rows_, rows_);
      leave_out_diagonal(query_query_.block(b));
    }
    if (doc_query_.present) transpose_square(query_doc_.block(b), doc_query_.block(b), false);
    if (doc_doc_.present) {
      fill<T>(doc_doc_.block(b), columns_, columns_);
      leave_out_diagonal(doc_doc_.block(b));
    }
    if (query_reference_.present) fill<T>(query_reference_.block(b), rows_, *references_);
    if (own_negatives_) own_negatives_->fill(query_own_.block(b));
  }

  // Sets the gradients of x, y and own from the score gradients in b; null: not wanted.
  void gradients(const Block<T>& b, T* to_x, T* to_y, T* to_own) const {
    const int64_t width = rows_.width;
    const Block<T> query_doc = query_doc_.block(b);
    // The scores of doc_query are scores of query_doc, so their gradients add up.
    if (doc_query_.present) transpose_square(doc_query_.block(b), query_doc, true);
    if (to_x) {
      multiply_panel<T>(query_doc, columns_, width, to_x, false, false);
      if (query_query_.present) add_square(query_query_.block(b), rows_, to_x);
      if (query_reference_.present) {
        multiply_panel<T>(query_reference_.block(b), *references_, width, to_x, false, true);
      }
      if (own_negatives_) own_negatives_->add_to_rows(query_own_.block(b), to_x);
      rows_.finish(to_x);
    }
    if (to_y) {
      multiply_panel<T>(query_doc, rows_, width, to_y, true, false);
      if (doc_doc_.present) add_square(doc_doc_.block(b), columns_, to_y);
      columns_.finish(to_y);
    }
    if (to_own) own_negatives_->negatives_gradient(query_own_.block(b), to_own);
  }

 private:
  // Lays out the next section.
  Section<T> add(bool present, int64_t columns) {
    const Section<T> section{present, total_columns_, columns};
    total_columns_ += present ? columns : 0;
    return section;
  }

  // Adds to `grad` the gradient from a section of which `side` is both sides.
  static void add_square(const Block<T>& b, const Side<T>& side, T* grad) {
    multiply_panel<T>(b, side, side.width, grad, false, true);
    multiply_panel<T>(b, side, side.width, grad, true, true);
  }

  const Side<T> rows_, columns_;
  std::optional<Side<T>> references_, negatives_;
  std::optional<OwnNegatives<T>> own_negatives_;
  Section<T> query_doc_, query_query_, doc_query_, doc_doc_, query_reference_, query_own_;
  int64_t total_columns_ = 0;
};

// Sets `totals` to the metrics of the scores of the anchors with the candidates.
template <class T>
void write_metrics(const Sections<T>& sections, const Block<T>& b, const Optional& totals,
                   bool cosine) {
  Block<T> recorded = sections.query_doc(b);
  recorded.positives = b.positives;
  BatchMetrics<T> metrics({}, totals, b.rows, cosine);
  const MetricsRecorder<T> recorder(recorded, metrics.row_metrics(0));
  over(b.rows, recorded.columns, [&](int64_t begin, int64_t end) {
    kernels().of<T>().record_metrics(recorded, {}, begin, end);
  });
  metrics.add_row_potentials(sections.rows());
  metrics.add_column_potentials(sections.columns());
  metrics.write();
}

// Makes every candidate a target, the positive with the largest share. The targets in the block are
// relative to the positive's; `normalise` divides them by their sum. indices: as in the block.
template <class T>
void smooth_labels(double label_smoothing, int64_t candidates, const std::vector<int64_t>& indices,
                   Block<T>& b, Loss& softmax) {
  const double share = label_smoothing / double(candidates);
  b.row_groups = b.column_groups = indices.data();
  b.negative_target = T(share / (1 - label_smoothing + share));
  softmax.normalise = true;
}

// InfoNCE of the anchors x (N, D) and the candidates y (M, D). Row i of y is the positive of x_i.
// own (N K, D): K own negatives of each anchor. references (R, D). query_to_query, doc_to_query,
// doc_to_doc: whether these sections are present. label_smoothing: must be 0 if there is any
// further candidate. weights (N,): the weights of the row losses; without them every row has
// `weight`. Gradients are written in the compute type, if they are given. loss: () the weighted sum
// of the row losses, or (N,) the row losses, not weighted.
void further(Tensor x, Tensor y, Optional own, Optional references, bool query_to_query,
             bool doc_to_query, bool doc_to_doc, double scale, double margin,
             double label_smoothing, bool cosine, Optional weights, double weight, Optional grad_x,
             Optional grad_y, Optional grad_own, Tensor loss, Optional totals) {
  with_type(loss, "loss", [&](auto type) {
    using T = decltype(type);
    const SectionFlags flags{query_to_query, doc_to_query, doc_to_doc};
    const Sections<T> sections(x, y, own, references, flags, cosine);
    const Side<T>&rows = sections.rows(), &columns = sections.columns();
    const int64_t count = rows.count, width = rows.width;
    STD_TORCH_CHECK(label_smoothing == 0 || sections.total_columns() == columns.count,
                    "fastsim: label_smoothing: wanted 0 beside further candidates, got ",
                    label_smoothing);
    STD_TORCH_CHECK(own || !grad_own, "fastsim: grad_own: wanted own too");
    T* const to_x = output<T>(grad_x, "grad_x", count * width);
    T* const to_y = output<T>(grad_y, "grad_y", columns.count * width);
    T* const to_own = output<T>(grad_own, "grad_own", own ? own->size(0) * width : 0);
    T* const out = output<T>(loss, "loss", loss.dim() ? count : 1);

    const Scratch<T> memory(count * sections.stride());
    std::vector<int64_t> indices(std::max(count, columns.count));
    std::iota(indices.begin(), indices.end(), 0);
    Block<T> b = sections.block(memory, indices);
    sections.fill_query_doc(b);
    if (totals) write_metrics(sections, b, totals, cosine);
    sections.fill_others(b);

    Loss softmax{};
    softmax.kind = Kind::softmax;
    softmax.scale = scale;
    softmax.margin = margin;
    softmax.score_grad = to_x || to_y || to_own;
    if (label_smoothing != 0) smooth_labels(label_smoothing, columns.count, indices, b, softmax);
    const std::vector<T> equal_weights(weights ? 0 : count, T(weight));
    const T* row_weights = weights ? input<T>(*weights, "weights", count) : equal_weights.data();
    const Result result = softmax_of_rows<T>(b, softmax, row_weights, loss.dim() ? out : nullptr);
    if (!loss.dim()) *out = T(result.loss);
    if (softmax.score_grad) sections.gradients(b, to_x, to_y, to_own);
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(
      further, "(Tensor x, Tensor y, Tensor? own, Tensor? references, bool query_to_query, "
               "bool doc_to_query, bool doc_to_doc, float scale, float margin, "
               "float label_smoothing, bool cosine, Tensor? weights, float weight, "
               "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, Tensor(grad_own!)? grad_own, "
               "Tensor(loss!) loss, Tensor(totals!)? totals) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
