// MaxSim (late interaction) as an operator: the scores of queries with documents, both of which are
// sets of tokens. A thread has a panel for the products of one document with some of the query
// tokens. Tokens that a mask leaves out are not multiplied. Every sum has one order, whatever
// the number of threads.
#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "max_sim_operands.h"
#include "operators.h"
#include "sequences.h"

namespace fastsim {

namespace {

// The products in a thread's panel: 512 KB in float32, which fit into L2.
constexpr int64_t kPanelScores = 1 << 17;
// The most document tokens in a panel.
constexpr int64_t kPanelRows = 2048;
// The least and the most query tokens in a panel, multiples of the columns of all tiles.
constexpr int64_t kLeastColumns = 64, kMostColumns = 512;
// The least number of pieces of work, if there are fewer documents.
constexpr int64_t kLeastPieces = 16;

// The query tokens that the mask keeps, one query after another.
struct QueryTokens {
  explicit QueryTokens(const Sequences& x) {
    for (int64_t query = 0; query < x.count; ++query) {
      first.push_back(rows.size());
      x.append(query, rows);
    }
    first.push_back(rows.size());
  }

  bool has_tokens(int64_t query) const { return first[query] < first[query + 1]; }

  std::vector<int64_t> rows;   // their row numbers
  std::vector<int64_t> first;  // the index in `rows` of the first token of each query, and the end
};

// The largest products of query tokens with one document. A thread has one of these, with a panel
// in which a long document is multiplied kPanelRows tokens at a time.
template <class Queries>
class LargestProducts {
  using T = typename Queries::Number;

 public:
  // longest: the number of tokens of the longest document.
  LargestProducts(const Queries& queries, int64_t longest)
      : panel_rows_(std::min(longest, kPanelRows)), columns_(columns_of(panel_rows_)),
        stride_(panel_stride<T>(columns_)), document_(queries, panel_rows_),
        panel_(panel_rows_ * stride_), values_(columns_), places_(columns_) {}

  // Finds them for the query tokens [begin, end) and a document of y, given the row numbers of its
  // tokens. Calls take(first, values, places, count) for some query tokens at a time, from `first`
  // on, with their largest products and the indices in `tokens` of the document tokens. Returns
  // false if the operand cannot hold a number of the document.
  template <class Take>
  bool find(int64_t begin, int64_t end, const Matrix& y, const std::vector<int64_t>& tokens,
            const Take& take) {
    const int64_t count = tokens.size();
    const bool one_panel = count <= kPanelRows;
    if (one_panel && !document_.take(y, tokens.data(), count)) return false;
    for (int64_t first = begin / Queries::group() * Queries::group(); first < end;
         first += columns_) {
      const int64_t columns = std::min(columns_, end - first);
      std::fill_n(values_.data(), columns_, -std::numeric_limits<T>::infinity());
      std::fill(places_.begin(), places_.end(), 0);
      for (int64_t row = 0; row < count; row += kPanelRows) {
        const int64_t rows = std::min(kPanelRows, count - row);
        if (!one_panel && !document_.take(y, tokens.data() + row, rows)) return false;
        document_.multiply(first, columns, panel_.data(), stride_);
        kernels().of<T>().largest_of_columns(panel_.data(), stride_, rows, columns,
                                             document_.factors(), row, values_.data(),
                                             places_.data());
      }
      const int64_t skipped = std::max<int64_t>(0, begin - first);
      take(first + skipped, values_.data() + skipped, places_.data() + skipped, columns - skipped);
    }
    return true;
  }

 private:
  // The columns of a panel with so many rows.
  static int64_t columns_of(int64_t rows) {
    const int64_t fitting = kPanelScores / rows / kLeastColumns * kLeastColumns;
    return std::min(kMostColumns, std::max(kLeastColumns, fitting));
  }

  const int64_t panel_rows_, columns_, stride_;
  typename Queries::Document document_;
  const Memory<T> panel_, values_;
  std::vector<int64_t> places_;
};

// What `max_sim` writes: scores (B, documents), and winners (documents, P) unless they are null.
template <class T, class Place>
struct MaxSimOutputs {
  T* scores;
  int64_t documents;
  Place* winners;
};

// The scores of queries x with documents y.
template <class Queries, class Place>
class MaxSim {
  using T = typename Queries::Number;

 public:
  // queries: the tokens as an operand. own: as for `max_sim`.
  MaxSim(const Sequences& x, const Sequences& y, const QueryTokens& tokens, const Queries& queries,
         bool own, const MaxSimOutputs<T, Place>& outputs)
      : x_(x), y_(y), tokens_(tokens), queries_(queries), own_(own), outputs_(outputs),
        shares_(std::min(own ? 1 : x.count,
                         ceil_div(kLeastPieces, std::max<int64_t>(1, y.count)))) {}

  // Writes the outputs. Returns false if an operand cannot hold a number.
  bool run() const {
    if (!queries_.holds_all()) return false;
    const int64_t longest = longest_of(y_);
    std::atomic<bool> holds_all{true};
    share_out(y_.count * shares_, 1, [&](int64_t begin, int64_t end) {
      LargestProducts<Queries> products(queries_, longest);
      std::vector<int64_t> document_tokens;
      for (int64_t at = begin; at < end && holds_all; ++at) {
        if (!run_piece(piece_at(at), products, document_tokens)) holds_all = false;
      }
    });
    return holds_all;
  }

 private:
  // A piece of work: the document that is sequence `sequence` of y, and a share of the queries that
  // are compared with it. column: of the document in the scores.
  struct Piece {
    int64_t sequence, column;
    Range queries;
  };

  // Piece number `at`.
  Piece piece_at(int64_t at) const {
    const int64_t sequence = at / shares_, share = at % shares_;
    if (own_) {
      const int64_t query = sequence / outputs_.documents;
      return {sequence, sequence % outputs_.documents, {query, query + 1}};
    }
    return {sequence, sequence,
            {x_.count * share / shares_, x_.count * (share + 1) / shares_}};
  }

  // document_tokens: memory. Returns false if an operand cannot hold a number.
  bool run_piece(const Piece& piece, LargestProducts<Queries>& products,
                 std::vector<int64_t>& document_tokens) const {
    const auto [first_query, end_query] = piece.queries;
    Place* const places =
        outputs_.winners ? outputs_.winners + piece.column * x_.tokens : nullptr;
    if (places) {
      std::fill(places + x_.starts[first_query], places + x_.starts[end_query], Place(-1));
    }
    document_tokens.clear();
    y_.append(piece.sequence, document_tokens);
    const int64_t begin = tokens_.first[first_query], end = tokens_.first[end_query];
    if (document_tokens.empty() || begin == end) {
      write_scores_without_products(piece);
      return true;
    }
    const int64_t start = y_.starts[piece.sequence];
    QuerySums sums(*this, piece);
    const auto take = [&](int64_t first, const T* values, const int64_t* indices, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = first + i;
        sums.add(token, double(values[i]) * queries_.factor(token));
        if (places) places[tokens_.rows[token]] = Place(document_tokens[indices[i]] - start);
      }
    };
    const bool holds_all = products.find(begin, end, y_.rows, document_tokens, take);
    sums.write_before(end);
    return holds_all;
  }

  // Writes the scores of a piece whose document or whose queries have no tokens.
  void write_scores_without_products(const Piece& piece) const {
    for (int64_t query = piece.queries.begin; query < piece.queries.end; ++query) {
      score(query, piece) =
          tokens_.has_tokens(query) ? -std::numeric_limits<T>::infinity() : T(0);
    }
  }

  T& score(int64_t query, const Piece& piece) const {
    return outputs_.scores[query * outputs_.documents + piece.column];
  }

  // Adds up the products of each query of a piece, whose tokens come in ascending order.
  class QuerySums {
   public:
    QuerySums(const MaxSim& max_sim, const Piece& piece)
        : max_sim_(max_sim), piece_(piece), query_(piece.queries.begin) {}

    void add(int64_t token, double product) {
      write_before(token);
      sum_ += product;
    }

    // Writes the scores of the queries that end before this query token.
    void write_before(int64_t token) {
      const std::vector<int64_t>& first = max_sim_.tokens_.first;
      for (; query_ < piece_.queries.end && first[query_ + 1] <= token; ++query_) {
        max_sim_.score(query_, piece_) = T(sum_);
        sum_ = 0;
      }
    }

   private:
    const MaxSim& max_sim_;
    const Piece& piece_;
    int64_t query_;
    double sum_ = 0;
  };

  const Sequences &x_, &y_;
  const QueryTokens& tokens_;
  const Queries& queries_;
  const bool own_;
  const MaxSimOutputs<T, Place> outputs_;
  const int64_t shares_;  // of the queries, for each document
};

// How `max_sim` computes products.
struct ProductOptions {
  int64_t width, parts;
  bool cosine, own;
};

// Writes the outputs. Returns false if bfloat16 parts cannot hold a number.
template <class T, class Place>
bool write_max_sim(const Sequences& x, const Sequences& y, const ProductOptions& options,
                   const MaxSimOutputs<T, Place>& outputs) {
  const QueryTokens tokens(x);
  const auto run = [&](const auto& queries) {
    return MaxSim<std::decay_t<decltype(queries)>, Place>(x, y, tokens, queries, options.own,
                                                          outputs)
        .run();
  };
  if constexpr (std::is_same_v<T, float>) {
    if (options.parts) {
      return run(SplitQueries(x.rows, tokens.rows, options.width, options.cosine, options.parts));
    }
  }
  return run(WholeQueries<T>(x.rows, tokens.rows, options.width, options.cosine));
}

// Computes the scores (B, K) of B queries x (P, D) with documents y (T, D). x_starts (B + 1,) and
// y_starts give the first row of each sequence, and the end of the last. K is the number of all
// documents, or with `own` the number of documents that each query has for itself. winners (K, P),
// if it is given, gets the document token that each query token chose, counted from the start of
// the document, or -1 for none. parts: the number of bfloat16 parts for products on a matrix unit;
// 0: products without one. Returns false if the parts cannot hold a number; the outputs are then
// undefined.
bool max_sim(Tensor x, Tensor y, Tensor x_starts, Tensor y_starts, Optional x_mask, Optional y_mask,
             bool cosine, bool own, int64_t parts, Tensor scores, Optional winners) {
  bool finite = true;
  with_type(scores, "scores", [&](auto type) {
    using T = decltype(type);
    const Sequences a = sequences(x, x_starts, "x_starts", x_mask, "x_mask");
    const Sequences b = sequences(y, y_starts, "y_starts", y_mask, "y_mask");
    const int64_t width = x.size(1), documents = documents_of(scores, "scores", a, b, own);
    check_matrix(y, "y", b.tokens, width);
    const bool has_parts = std::is_same_v<T, float> && amx_kernels();
    STD_TORCH_CHECK(parts == 0 || (parts > 0 && parts <= 3 && has_parts),
                    "fastsim: parts: wanted 0, or up to 3 for float32 scores on a matrix unit,"
                    " got ", parts);
    if (parts) {  // an error for dtypes that cannot be packed
      scaled_matrix(x);
      scaled_matrix(y);
    }
    T* out = output<T>(scores, "scores", a.count * documents);
    const bool wide = winners && check_winners(*winners, documents, a.tokens, b);
    void* places = winners ? winners->mutable_data_ptr() : nullptr;
    const ProductOptions options{width, parts, cosine, own};
    const auto write = [&](auto place) {
      using Place = decltype(place);
      return write_max_sim<T, Place>(a, b, options,
                                     {out, documents, static_cast<Place*>(places)});
    };
    finite = wide ? write(int32_t{}) : write(int16_t{});
  });
  return finite;
}

std::vector<Operator> operators() {
  return {OPERATOR(max_sim,
                   "(Tensor x, Tensor y, Tensor x_starts, Tensor y_starts, Tensor? x_mask, "
                   "Tensor? y_mask, bool cosine, bool own, int parts, Tensor(scores!) scores, "
                   "Tensor(winners!)? winners) -> bool")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
