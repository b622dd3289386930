// The gradient of MaxSim as an operator. It follows only the products of each query token with the
// document tokens that it chose. Every sum has one order, whatever the number of threads.
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "passes.h"
#include "scratch.h"
#include "sequences.h"

namespace fastsim {

namespace {

// An error unless every winner is a token of its document, or -1. Gradients are added at these
// places, so a wrong place would be written outside the memory.
template <class Place>
void check_places(const Place* places, const Sequences& x, const Sequences& y, int64_t documents,
                  bool own) {
  // The last token of a document.
  const auto last_of = [&](int64_t at) { return y.starts[at + 1] - y.starts[at] - 1; };
  // The least and the largest of the winners of a document.
  const auto extremes = [&](int64_t at) {
    const int64_t query = own ? at / documents : 0, end = x.starts[own ? query + 1 : x.count];
    const Place* document_places = places + (own ? at % documents : at) * x.tokens;
    Place least = 0, most = -1;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t token = x.starts[query]; token < end; ++token) {
      const Place place = document_places[token];
      least = place < least ? place : least;
      most = place > most ? place : most;
    }
    return std::pair<int64_t, int64_t>(least, most);
  };
  // The error is thrown after the loop: one that is thrown in a thread loses its message.
  std::atomic<int64_t> wrong_document{-1};
  over(y.count, own ? ceil_div(x.tokens, std::max<int64_t>(1, x.count)) : x.tokens,
       [&](int64_t begin, int64_t end) {
         for (int64_t at = begin; at < end; ++at) {
           const auto [least, most] = extremes(at);
           if (least < -1 || most > last_of(at)) wrong_document = at;
         }
       });
  const int64_t at = wrong_document;
  if (at < 0) return;
  const auto [least, most] = extremes(at);
  STD_TORCH_CHECK(false, "fastsim: winners: wanted tokens of document ", at, " from -1 to ",
                  last_of(at), ", got ", least, " to ", most);
}

// The inverse norms of the rows of x.
template <class T>
std::vector<T> inverse_norms(const Matrix& x, int64_t rows, int64_t width) {
  std::vector<T> inverse(rows);
  over(rows, width, [&](int64_t begin, int64_t end) {
    std::vector<T> unit(width), inverse_norm(1);
    for (int64_t row = begin; row < end; ++row) {
      kernels().of<T>().unit_rows(x.from_row(row), width, unit.data(), inverse_norm.data(), 0, 1);
      inverse[row] = inverse_norm[0];
    }
  });
  return inverse;
}

// The query of each query token.
std::vector<int64_t> queries_of_tokens(const Sequences& x) {
  std::vector<int64_t> query_of(x.tokens);
  for (int64_t query = 0; query < x.count; ++query) {
    std::fill(query_of.begin() + x.starts[query], query_of.begin() + x.starts[query + 1], query);
  }
  return query_of;
}

template <class T>
void write_query_gradients(const Winners<T>& w, const Gradient& grad) {
  over(w.tokens, w.documents * w.width, [&](int64_t begin, int64_t end) {
    const Scratch<T> memory(2 * w.width);
    kernels().of<T>().max_sim_queries(w, grad.data, grad.dtype, memory, begin, end);
  });
}

template <class T>
void write_document_gradients(const Winners<T>& w, const Sequences& y, const Gradient& grad) {
  const int64_t longest = longest_of(y);
  over(y.count, w.tokens * w.width, [&](int64_t begin, int64_t end) {
    const Scratch<T> memory((longest + 1) * w.width);
    kernels().of<T>().max_sim_documents(w, grad.data, grad.dtype, memory, begin, end);
  });
}

// Writes dL/dx (P, D) and dL/dy (T, D), in the dtypes of grad_x and grad_y, if they are given.
// grad: dL/dscores (B, K). The other arguments are those of `max_sim`.
void max_sim_backward(Tensor grad, Tensor winners, Tensor x, Tensor y, Tensor x_starts,
                      Tensor y_starts, Optional x_mask, Optional y_mask, bool cosine, bool own,
                      Optional grad_x, Optional grad_y) {
  with_type(grad, "grad", [&](auto type) {
    using T = decltype(type);
    const Sequences a = sequences(x, x_starts, "x_starts", x_mask, "x_mask");
    const Sequences b = sequences(y, y_starts, "y_starts", y_mask, "y_mask");
    const int64_t width = x.size(1), documents = documents_of(grad, "grad", a, b, own);
    check_matrix(y, "y", b.tokens, width);
    const bool wide = check_winners(winners, documents, a.tokens, b);
    const void* const places = winners.const_data_ptr();
    wide ? check_places(static_cast<const int32_t*>(places), a, b, documents, own)
         : check_places(static_cast<const int16_t*>(places), a, b, documents, own);
    const Gradient to_x = gradient<T>(grad_x, "grad_x", a.tokens * width);
    const Gradient to_y = gradient<T>(grad_y, "grad_y", b.tokens * width);
    const std::vector<int64_t> query_of = queries_of_tokens(a);
    std::vector<T> inverse_x, inverse_y;
    if (cosine) {
      inverse_x = inverse_norms<T>(a.rows, a.tokens, width);
      inverse_y = inverse_norms<T>(b.rows, b.tokens, width);
    }
    const Winners<T> w{places, wide, own, documents, a.tokens, width,
                       query_of.data(), a.starts, b.starts,
                       input<T>(grad, "grad", a.count * documents), a.rows, b.rows, a.mask, b.mask,
                       cosine ? inverse_x.data() : nullptr, cosine ? inverse_y.data() : nullptr};
    if (to_x.data) write_query_gradients(w, to_x);
    if (to_y.data) write_document_gradients(w, b, to_y);
  });
}

std::vector<Operator> operators() {
  return {OPERATOR(max_sim_backward,
                   "(Tensor grad, Tensor winners, Tensor x, Tensor y, Tensor x_starts, "
                   "Tensor y_starts, Tensor? x_mask, Tensor? y_mask, bool cosine, bool own, "
                   "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
