// MaxSim (late interaction) as an operator: the scores of queries with documents, both of which are
// sets of tokens. A thread has a panel for the products of one document with some of the query
// tokens. Tokens that a mask leaves out are not multiplied. Every sum has one order, whatever
// the number of threads.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "amx.h"
#include "amx_operands.h"
#include "arguments.h"
#include "operators.h"
#include "passes.h"
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

// Memory for `count` numbers, set to zero and aligned to 64 bytes.
template <class T>
class Memory {
 public:
  explicit Memory(int64_t count)
      : memory_(static_cast<T*>(std::aligned_alloc(64, ceil_div(count * sizeof(T) + 1, 64) * 64)),
                std::free) {
    STD_TORCH_CHECK(memory_, "fastsim: out of memory");
    std::memset(static_cast<void*>(memory_.get()), 0, count * sizeof(T));
  }
  T* data() const { return memory_.get(); }

 private:
  std::unique_ptr<T, void (*)(void*)> memory_;
};

// The rows of x whose ascending numbers `rows` lists, as one matrix in the dtype of x. If they do
// not follow one another in x, they are copied to `memory`.
Matrix gathered(const Matrix& x, const std::vector<int64_t>& rows, int64_t width,
                std::vector<char>& memory) {
  const int64_t bytes = bytes_of(x.dtype), count = rows.size();
  const char* data = static_cast<const char*>(x.data);
  if (rows.back() - rows.front() + 1 == count) {
    return {data + rows.front() * x.row_stride * bytes, x.dtype, x.row_stride, 1};
  }
  memory.resize(count * width * bytes);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(memory.data() + i * width * bytes, data + rows[i] * x.row_stride * bytes,
                width * bytes);
  }
  return {memory.data(), x.dtype, width, 1};
}

// The query tokens that the mask keeps, as the right operand of all panels.
template <class T>
struct Queries {
  int64_t width, parts;
  bool cosine, finite = true;
  std::vector<int64_t> rows;   // the row numbers of the tokens
  std::vector<int64_t> first;  // the index in `rows` of the first token of each query, and the end
  std::vector<float> rest;     // the rests of the tokens (amx.h)
  // One of these two holds the operand: `operand`, if it has bfloat16 parts.
  Memory<T> packed{0};
  Memory<uint16_t> operand{0};

  Queries(const Sequences& x, int64_t width, bool cosine, int64_t parts)
      : width(width), parts(parts), cosine(cosine) {
    for (int64_t query = 0; query < x.count; ++query) {
      first.push_back(rows.size());
      x.append(query, rows);
    }
    first.push_back(rows.size());
    const int64_t count = rows.size();
    if (count == 0) return;
    if constexpr (std::is_same_v<T, float>) {
      if (parts) {
        pack_tiles(x, count);
        return;
      }
    }
    const auto& k = kernels().of<T>();
    Memory<T> tokens(count * width);
    over(count, width, [&](int64_t begin, int64_t end) {
      k.token_rows(x.rows, rows.data() + begin, end - begin, width, cosine,
                   tokens.data() + begin * width);
    });
    packed = Memory<T>(packed_rows<T>(count) * width);
    pack(tokens.data(), count, width, packed.data());
  }

  // Packs the operand of bfloat16 parts.
  void pack_tiles(const Sequences& x, int64_t count) {
    const AmxKernels& amx = *amx_kernels();
    std::vector<char> memory;
    const Matrix from = gathered(x.rows, rows, width, memory);
    const int64_t strips = 2 * ceil_div(count, kTileGroup);
    std::vector<float> powers(count), inverse(count);
    rest.assign(strips * kTileSide, 1);
    if (cosine) amx.norms(from, width, inverse.data(), powers.data(), rest.data(), {0, count});
    operand = Memory<uint16_t>(strips * parts * ceil_div(width, kTileDepth) * kTileElements);
    std::atomic<bool> all{true};
    over(strips, kTileSide * width * parts, [&](int64_t begin, int64_t end) {
      const ScaledMatrix packed{from, cosine ? powers.data() : nullptr, nullptr};
      if (!amx.pack(TileLayout::rows_transposed, packed, count, 0, width, parts, operand.data(),
                    {begin, end})) {
        all = false;
      }
    });
    // A cosine takes NaN from the rest of a row that is not finite, so such rows need no refusal.
    finite = cosine || all;
  }
};

// The panel of one thread, and the document tokens as its left operand. A long document is
// multiplied kPanelRows tokens at a time.
template <class T>
struct DocumentPanel {
  int64_t columns, stride;
  Memory<T> panel{0}, rows{0}, values{0};
  Memory<uint16_t> operand{0};
  std::vector<T> factors;
  std::vector<float> powers, inverse;
  // The row numbers of the document tokens that the mask keeps.
  std::vector<int64_t> document_rows;
  // For each query token of the panel, the index in `document_rows` of the token that it chose.
  std::vector<int64_t> places;
  std::vector<char> copy;

  DocumentPanel(const Queries<T>& q, int64_t longest) {
    const int64_t panel_rows = std::min(longest, kPanelRows);
    columns = std::min(
        kMostColumns,
        std::max(kLeastColumns, kPanelScores / panel_rows / kLeastColumns * kLeastColumns));
    stride = columns + 16;  // no power of two: such rows would share few cache sets
    panel = Memory<T>(panel_rows * stride);
    values = Memory<T>(columns);
    places.resize(columns);
    factors.assign(panel_rows, T(1));
    if (q.parts) {
      operand = Memory<uint16_t>(2 * ceil_div(panel_rows, kTileGroup) * q.parts *
                                 ceil_div(q.width, kTileDepth) * kTileElements);
      powers.resize(panel_rows);
      inverse.resize(panel_rows);
    } else {
      rows = Memory<T>(panel_rows * q.width);
    }
  }
};

// Finds the largest products of the query tokens [begin, end), indices in q.rows, with one
// document, whose tokens p.document_rows lists. Calls take(first, count, values, places) for each
// panel, with the largest products of the query tokens [first, first + count) and the indices in
// p.document_rows of the document tokens. Returns false if bfloat16 parts cannot hold a number of
// the document.
template <class T, class F>
bool largest_products(const Queries<T>& q, const Matrix& documents, DocumentPanel<T>& p,
                      int64_t begin, int64_t end, const F& take) {
  const auto& k = kernels().of<T>();
  const int64_t count = p.document_rows.size(), depth_tiles = ceil_div(q.width, kTileDepth);
  const bool one_panel = count <= kPanelRows;
  // A panel begins where a micro-panel or a group of operand rows does.
  const int64_t group = q.parts ? kTileGroup : k.panel_columns;
  // Prepares the left operand: the document tokens [row, row + panel_rows).
  const auto prepare = [&](int64_t row, int64_t panel_rows) {
    if constexpr (std::is_same_v<T, float>) {
      if (q.parts) {
        const AmxKernels& amx = *amx_kernels();
        const std::vector<int64_t> row_numbers(p.document_rows.begin() + row,
                                               p.document_rows.begin() + row + panel_rows);
        const Matrix from = gathered(documents, row_numbers, q.width, p.copy);
        const float* powers = q.cosine ? p.powers.data() : nullptr;
        if (q.cosine) {
          amx.norms(from, q.width, p.inverse.data(), p.powers.data(), p.factors.data(),
                    {0, panel_rows});
        }
        return amx.pack(TileLayout::rows, {from, powers, nullptr}, panel_rows, 0, q.width, q.parts,
                        p.operand.data(), {0, 2 * ceil_div(panel_rows, kTileGroup)}) ||
               q.cosine;
      }
    }
    k.token_rows(documents, p.document_rows.data() + row, panel_rows, q.width, q.cosine,
                 p.rows.data());
    return true;
  };
  // Fills the panel with the products of these tokens with `columns` query tokens from `first` on.
  const auto multiply = [&](int64_t first, int64_t columns, int64_t panel_rows) {
    if constexpr (std::is_same_v<T, float>) {
      if (q.parts) {
        const Operand left{p.operand.data(), q.parts, depth_tiles};
        const Operand right{q.operand.data() + first / kTileSide * left.strip_size(), q.parts,
                            depth_tiles};
        amx_kernels()->scores(left, panel_rows, right, columns, true, {}, p.panel.data(), p.stride,
                              false, {0, ceil_div(columns, kTileGroup)});
        return;
      }
    }
    k.score_panels(p.rows.data(), q.width, q.packed.data() + first * q.width, columns,
                   p.panel.data(), p.stride, false, {0, panel_rows},
                   {0, ceil_div(columns, k.panel_columns)}, static_cast<const T*>(nullptr));
  };
  if (one_panel && !prepare(0, count)) return false;
  for (int64_t first = begin / group * group; first < end; first += p.columns) {
    const int64_t columns = std::min(p.columns, end - first);
    std::fill_n(p.values.data(), p.columns, -std::numeric_limits<T>::infinity());
    std::fill(p.places.begin(), p.places.end(), 0);
    for (int64_t row = 0; row < count; row += kPanelRows) {
      const int64_t panel_rows = std::min(kPanelRows, count - row);
      if (!one_panel && !prepare(row, panel_rows)) return false;
      multiply(first, columns, panel_rows);
      k.largest_of_columns(p.panel.data(), p.stride, panel_rows, columns, p.factors.data(), row,
                           p.values.data(), p.places.data());
    }
    const int64_t skipped = std::max<int64_t>(0, begin - first);
    take(first + skipped, columns - skipped, p.values.data() + skipped, p.places.data() + skipped);
  }
  return true;
}

// Computes the scores of all queries x with their documents y, and, if it is not null, `winners`.
// Returns false if bfloat16 parts cannot hold a number.
template <class T, class Place>
bool scores_of(const Sequences& x, const Sequences& y, int64_t width, bool cosine, bool own,
               int64_t parts, T* scores, int64_t documents, Place* winners) {
  const Queries<T> q(x, width, cosine, parts);
  if (!q.finite) return false;
  const int64_t longest = longest_of(y);
  // A piece of work is one document with a share of the queries.
  const int64_t queries = own ? 1 : x.count;
  const int64_t shares = std::min(queries, ceil_div(kLeastPieces, std::max<int64_t>(1, y.count)));
  std::atomic<bool> finite{true};
  share_out(y.count * shares, 1, [&](int64_t begin, int64_t end) {
    DocumentPanel<T> p(q, longest);
    for (int64_t piece = begin; piece < end && finite; ++piece) {
      const int64_t at = piece / shares, share = piece % shares;
      const int64_t document = own ? at % documents : at;
      const int64_t first_query = own ? at / documents : queries * share / shares;
      const int64_t end_query = own ? first_query + 1 : queries * (share + 1) / shares;
      if (first_query == end_query) continue;
      p.document_rows.clear();
      y.append(at, p.document_rows);
      const bool empty = p.document_rows.empty();
      Place* places = winners ? winners + document * x.tokens : nullptr;
      if (places) {
        std::fill(places + x.starts[first_query], places + x.starts[end_query], Place(-1));
      }
      if (empty || q.first[first_query] == q.first[end_query]) {
        for (int64_t query = first_query; query < end_query; ++query) {
          const bool no_tokens = q.first[query] == q.first[query + 1];
          scores[query * documents + document] =
              no_tokens ? T(0) : -std::numeric_limits<T>::infinity();
        }
        continue;
      }
      int64_t query = first_query;
      double sum = 0;
      // Writes the scores of the queries that end before this query token.
      const auto close = [&](int64_t token) {
        for (; query < end_query && q.first[query + 1] <= token; ++query) {
          scores[query * documents + document] = T(sum);
          sum = 0;
        }
      };
      const auto take = [&](int64_t first, int64_t count, const T* values, const int64_t* indices) {
        for (int64_t i = 0; i < count; ++i) {
          close(first + i);
          const double value = values[i];
          sum += q.rest.empty() ? value : value * double(q.rest[first + i]);
          if (places) places[q.rows[first + i]] = Place(p.document_rows[indices[i]] - y.starts[at]);
        }
      };
      if (!largest_products(q, y.rows, p, q.first[first_query], q.first[end_query], take)) {
        finite = false;
      }
      close(q.first[end_query]);
    }
  });
  return finite;
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
    finite = wide ? scores_of<T>(a, b, width, cosine, own, parts, out, documents,
                                 static_cast<int32_t*>(places))
                  : scores_of<T>(a, b, width, cosine, own, parts, out, documents,
                                 static_cast<int16_t*>(places));
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
