// InfoNCE of a small batch with further candidates or label smoothing, and its gradient, in one
// operator. What a row is held against lies in one row of memory, section by section:
//
//   candidates | anchors (query_to_query) | anchors (doc_to_query) | candidates (doc_to_doc)
//       | references | own negatives
//
// so that one softmax over it is the loss (fastsim/losses/further_candidates.py has the formulas).

#include <numeric>
#include <optional>
#include <vector>

#include "arguments.h"
#include "observing.h"
#include "operators.h"
#include "side.h"
#include "block_losses.h"
#include "totals.h"

namespace fastsim {

namespace {

// Some of the columns of the scores; what decides roles is left to the block of all.
template <class T>
struct Section {
  bool there;
  int64_t at, columns;

  Block<T> of(const Block<T>& all) const {
    Block<T> own{};
    own.scores = all.scores + at;
    own.stride = all.stride;
    own.rows = all.rows;
    own.columns = columns;
    return own;
  }
};

template <class T>
void fill(const Block<T>& b, const T* rows, const Side<T>& columns) {
  Scratch<T> packed(packed_rows<T>(columns.count) * columns.width);
  pack<T>(columns, columns.count, columns.width, packed);
  fill_scores<T>(rows, columns.width, packed, b);
}

template <class T>
void leave_out_diagonal(const Block<T>& b) {
  for (int64_t i = 0; i < b.rows; ++i) b.scores[i * b.stride + i] = kLeftOut<T>;
}

// `to` (N, N or more) = or += the transpose of `from`, whose first N columns are meant.
template <class T>
void transpose_square(const Block<T>& from, const Block<T>& to, bool add) {
  over(to.rows, to.rows, [&](int64_t begin, int64_t end) {
    kernels().of<T>().transpose(from.scores, from.stride, to.scores, to.stride, to.rows, add, begin,
                                end);
  });
}

// Scores (N, K) of each row with the K rows of its own, and what their gradients add.
template <class T>
class Own {
 public:
  Own(const Side<T>& rows, const Side<T>& negatives, int64_t of_each)
      : rows_(rows), negatives_(negatives), count_(of_each) {}

  void fill(const Block<T>& b) const {
    std::vector<int64_t> columns(negatives_.count);
    for (int64_t i = 0; i < b.rows; ++i) {
      for (int64_t k = 0; k < count_; ++k) columns[k * b.rows + i] = i * count_ + k;
    }
    std::vector<T> values(negatives_.count);
    const Partners<T> p{rows_, negatives_, b.rows, rows_.width, count_, columns.data(), false};
    over(b.rows, count_ * rows_.width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(p, values.data(), begin, end);
    });
    for (int64_t i = 0; i < b.rows; ++i) {
      for (int64_t k = 0; k < count_; ++k) b.scores[i * b.stride + k] = values[k * b.rows + i];
    }
  }

  void add_to_rows(const Block<T>& b, T* grad) const {
    const int64_t width = rows_.width;
    over(b.rows, count_ * width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* own = negatives_ + i * count_ * width;
        kernels().of<T>().multiply_rows(b.scores + i * b.stride, b.stride, count_, own, width,
                                        grad + i * width, true, {0, 1});
      }
    });
  }

  void gradient(const Block<T>& b, T* grad) const {
    const int64_t width = rows_.width;
    over(b.rows, count_ * width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels().of<T>().multiply_columns(b.scores + i * b.stride, b.stride, 1, rows_ + i * width,
                                           width, grad + i * count_ * width, false, {0, count_});
      }
    });
    negatives_.finish(grad);
  }

 private:
  const Side<T>&rows_, &negatives_;
  const int64_t count_;
};

// x (N, D), y (M, D), of which row i is the positive of x_i; own (N K, D); references (R, D).
// label_smoothing: of the candidates, beside which there is nothing then. weights (N,) weigh the
// losses of the rows; without, `weight` all of them. Gradients are written in the compute type where
// given. loss: () their weighted sum, or (N,).
void further(Tensor x, Tensor y, Optional own, Optional references, bool query_to_query,
             bool doc_to_query, bool doc_to_doc, double scale, double margin,
             double label_smoothing, bool cosine, Optional weights, double weight, Optional grad_x,
             Optional grad_y, Optional grad_own, Tensor loss, Optional totals) {
  with_type(loss, "loss", [&](auto type) {
    using T = decltype(type);
    const Side<T> rows(x, cosine), columns(y, cosine);
    const int64_t count = rows.count, width = rows.width;
    if (columns.count < count || columns.width != width) {
      refuse("y", y, "a positive of x's width for each of ", count, " rows");
    }
    const int64_t own_rows = own ? own->size(0) : 0, of_each = count ? own_rows / count : 0;
    if (own) check_matrix(*own, "own", of_each * count, width);
    if (references) check_matrix(*references, "references", references->size(0), width);
    std::optional<Side<T>> negatives, queue;
    if (own) negatives.emplace(*own, cosine);
    if (references) queue.emplace(*references, cosine);

    int64_t end = 0;
    const auto section = [&](bool there, int64_t wide) {
      const Section<T> found{there, end, wide};
      end += there ? wide : 0;
      return found;
    };
    const Section<T> candidates = section(true, columns.count);
    const Section<T> of_queries = section(query_to_query, count);
    const Section<T> of_documents = section(doc_to_query, count);
    const Section<T> documents = section(doc_to_doc, columns.count);
    const Section<T> of_queue = section(bool(queue), queue ? queue->count : 0);
    const Section<T> of_own = section(bool(negatives), of_each);

    STD_TORCH_CHECK(label_smoothing == 0 || end == columns.count,
                    "fastsim: label_smoothing: wanted 0 beside further candidates, got ",
                    label_smoothing);

    Block<T> b{};
    b.rows = count;
    b.columns = end;
    b.stride = end + kAligned / int64_t(sizeof(T));
    Scratch<T> memory(count * b.stride);
    b.scores = memory;
    std::vector<int64_t> places(std::max(count, columns.count));
    std::iota(places.begin(), places.end(), 0);
    b.positives = places.data();

    const Block<T> first = candidates.of(b);
    fill<T>(first, rows, columns);
    if (totals) {
      Block<T> looked_at = first;
      looked_at.positives = b.positives;
      Watching<T> watching({}, totals, count, cosine);
      const Observing<T> observing(looked_at, watching.numbers(0));
      over(count, first.columns, [&](int64_t begin, int64_t stop) {
        kernels().of<T>().observe(looked_at, {}, begin, stop);
      });
      watching.look_at_rows(rows);
      watching.look_at_columns(columns);
      watching.write();
    }
    if (of_queries.there) {
      fill<T>(of_queries.of(b), rows, rows);
      leave_out_diagonal(of_queries.of(b));
    }
    if (of_documents.there) transpose_square(first, of_documents.of(b), false);
    if (documents.there) {
      fill<T>(documents.of(b), columns, columns);
      leave_out_diagonal(documents.of(b));
    }
    if (of_queue.there) fill<T>(of_queue.of(b), rows, *queue);
    std::optional<Own<T>> each;
    if (negatives) each.emplace(rows, *negatives, of_each);
    if (each) each->fill(of_own.of(b));

    T* const to_x = output<T>(grad_x, "grad_x", count * width);
    T* const to_y = output<T>(grad_y, "grad_y", columns.count * width);
    T* const to_own = output<T>(grad_own, "grad_own", own_rows * width);
    STD_TORCH_CHECK(own || !grad_own, "fastsim: grad_own: wanted own too");
    const bool score_grad = to_x || to_y || to_own;
    Loss softmax{};
    softmax.kind = Kind::softmax;
    softmax.scale = scale;
    softmax.margin = margin;
    softmax.score_grad = score_grad;
    if (label_smoothing != 0) {  // every candidate is a target, the positive more than the others
      const double share = label_smoothing / double(columns.count);
      b.row_groups = b.column_groups = places.data();
      b.negative_target = T(share / (1 - label_smoothing + share));
      softmax.normalise = true;
    }
    const std::vector<T> alike(weights ? 0 : count, T(weight));
    const T* of_rows = weights ? input<T>(*weights, "weights", count) : alike.data();
    T* out = output<T>(loss, "loss", loss.dim() ? count : 1);
    const Result result = softmax_of_rows<T>(b, softmax, of_rows, loss.dim() ? out : nullptr);
    if (!loss.dim()) *out = T(result.loss);

    if (of_documents.there && score_grad) {  // the same scores: their gradients add up
      transpose_square(of_documents.of(b), first, true);
    }
    if (to_x) {
      multiply_panel<T>(first, columns, width, to_x, false, false);
      if (of_queries.there) {
        multiply_panel<T>(of_queries.of(b), rows, width, to_x, false, true);
        multiply_panel<T>(of_queries.of(b), rows, width, to_x, true, true);
      }
      if (of_queue.there) multiply_panel<T>(of_queue.of(b), *queue, width, to_x, false, true);
      if (each) each->add_to_rows(of_own.of(b), to_x);
      rows.finish(to_x);
    }
    if (to_y) {
      multiply_panel<T>(first, rows, width, to_y, true, false);
      if (documents.there) {
        multiply_panel<T>(documents.of(b), columns, width, to_y, false, true);
        multiply_panel<T>(documents.of(b), columns, width, to_y, true, true);
      }
      columns.finish(to_y);
    }
    if (to_own) each->gradient(of_own.of(b), to_own);
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
