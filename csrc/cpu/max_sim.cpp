// MaxSim (late interaction) as an operator: scores of queries and documents that are sets of
// tokens. A document's products with a share of the query tokens live in a panel of one thread;
// tokens that a mask leaves out are not multiplied. Every sum has one order, whatever the number of
// threads.
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

constexpr int64_t kPanelScores = 1 << 17;  // of a thread: 512 KB in float32, a second-level cache
constexpr int64_t kDocumentRows = 2048;    // tokens of a document in a panel
constexpr int64_t kFewest = 64, kMost = 512;  // query tokens of a panel; multiples of all tiles
constexpr int64_t kShares = 16;  // pieces of work, where there are fewer documents

template <class T>
class Memory {
 public:
  explicit Memory(int64_t count)
      : memory_(static_cast<T*>(std::aligned_alloc(64, tiles(count * sizeof(T) + 1, 64) * 64)),
                std::free) {
    STD_TORCH_CHECK(memory_, "fastsim: out of memory");
    std::memset(static_cast<void*>(memory_.get()), 0, count * sizeof(T));
  }
  T* data() const { return memory_.get(); }

 private:
  std::unique_ptr<T, void (*)(void*)> memory_;
};

// Rows `rows` of x as they are, side by side in `memory` unless they are so already.
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

// The query tokens that take part, as the right operand of every panel.
template <class T>
struct Queries {
  int64_t width, parts;
  bool cosine, finite = true;
  std::vector<int64_t> rows;   // their numbers
  std::vector<int64_t> first;  // by query: where its tokens begin among `rows`, and the end
  std::vector<float> rest;     // theirs (amx.h)
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
    Memory<T> taken(count * width);
    over(count, width, [&](int64_t begin, int64_t end) {
      k.token_rows(x.rows, rows.data() + begin, end - begin, width, cosine,
                   taken.data() + begin * width);
    });
    packed = Memory<T>(packed_rows<T>(count) * width);
    pack(taken.data(), count, width, packed.data());
  }

  void pack_tiles(const Sequences& x, int64_t count) {
    const AmxKernels& amx = *amx_kernels();
    std::vector<char> memory;
    const Matrix from = gathered(x.rows, rows, width, memory);
    const int64_t strips = 2 * tiles(count, kTileGroup);
    std::vector<float> powers(count), inverse(count);
    rest.assign(strips * kTileSide, 1);
    if (cosine) amx.norms(from, width, inverse.data(), powers.data(), rest.data(), {0, count});
    operand = Memory<uint16_t>(strips * parts * tiles(width, kTileDepth) * kTileElements);
    std::atomic<bool> all{true};
    over(strips, kTileSide * width * parts, [&](int64_t begin, int64_t end) {
      const Packed packed{from, cosine ? powers.data() : nullptr, nullptr};
      if (!amx.pack(Pack::rows_transposed, packed, count, 0, width, parts, operand.data(),
                    {begin, end})) {
        all = false;
      }
    });
    finite = cosine || all;  // a row that is not finite has NaN left
  }
};

// The memory of one thread.
template <class T>
struct DocumentPanel {
  int64_t wide, stride;
  Memory<T> panel{0}, rows{0}, values{0};
  Memory<uint16_t> operand{0};
  std::vector<T> factors;
  std::vector<float> powers, inverse;
  std::vector<int64_t> kept, places;
  std::vector<char> copy;

  DocumentPanel(const Queries<T>& q, int64_t longest) {
    const int64_t tall = std::min(longest, kDocumentRows);
    wide = std::min(kMost, std::max(kFewest, kPanelScores / tall / kFewest * kFewest));
    stride = wide + 16;  // off a power of two
    panel = Memory<T>(tall * stride);
    values = Memory<T>(wide);
    places.resize(wide);
    factors.assign(tall, T(1));
    if (q.parts) {
      operand = Memory<uint16_t>(2 * tiles(tall, kTileGroup) * q.parts *
                                 tiles(q.width, kTileDepth) * kTileElements);
      powers.resize(tall);
      inverse.resize(tall);
    } else {
      rows = Memory<T>(tall * q.width);
    }
  }
};

// The largest products of the query tokens [begin, end) with one document, panel after panel;
// take(first, count, values, places): those of `count` tokens, as places among document.kept.
template <class T, class F>
bool largest_products(const Queries<T>& q, const Matrix& documents, DocumentPanel<T>& p,
                      int64_t begin, int64_t end, const F& take) {
  const auto& k = kernels().of<T>();
  const int64_t count = p.kept.size(), steps = tiles(q.width, kTileDepth);
  const bool whole = count <= kDocumentRows;
  // Operands begin at whole tiles.
  const int64_t group = q.parts ? kTileGroup : k.panel_columns;
  const auto prepare = [&](int64_t row, int64_t tall) {
    if constexpr (std::is_same_v<T, float>) {
      if (q.parts) {
        const AmxKernels& amx = *amx_kernels();
        const std::vector<int64_t> some(p.kept.begin() + row, p.kept.begin() + row + tall);
        const Matrix from = gathered(documents, some, q.width, p.copy);
        const float* powers = q.cosine ? p.powers.data() : nullptr;
        if (q.cosine) {
          amx.norms(from, q.width, p.inverse.data(), p.powers.data(), p.factors.data(), {0, tall});
        }
        return amx.pack(Pack::rows, {from, powers, nullptr}, tall, 0, q.width, q.parts,
                        p.operand.data(), {0, 2 * tiles(tall, kTileGroup)}) ||
               q.cosine;
      }
    }
    k.token_rows(documents, p.kept.data() + row, tall, q.width, q.cosine, p.rows.data());
    return true;
  };
  const auto multiply = [&](int64_t first, int64_t columns, int64_t tall) {
    if constexpr (std::is_same_v<T, float>) {
      if (q.parts) {
        const Operand left{p.operand.data(), q.parts, steps};
        const Operand right{q.operand.data() + first / kTileSide * left.strip(), q.parts, steps};
        amx_kernels()->scores(left, tall, right, columns, true, {}, p.panel.data(), p.stride,
                              false, {0, tiles(columns, kTileGroup)});
        return;
      }
    }
    k.score_panels(p.rows.data(), q.width, q.packed.data() + first * q.width, columns,
                   p.panel.data(), p.stride, false, {0, tall},
                   {0, tiles(columns, k.panel_columns)}, static_cast<const T*>(nullptr));
  };
  if (whole && !prepare(0, count)) return false;
  for (int64_t first = begin / group * group; first < end; first += p.wide) {
    const int64_t columns = std::min(p.wide, end - first);
    std::fill_n(p.values.data(), p.wide, -std::numeric_limits<T>::infinity());
    std::fill(p.places.begin(), p.places.end(), 0);
    for (int64_t row = 0; row < count; row += kDocumentRows) {
      const int64_t tall = std::min(kDocumentRows, count - row);
      if (!whole && !prepare(row, tall)) return false;
      multiply(first, columns, tall);
      k.largest_of_columns(p.panel.data(), p.stride, tall, columns, p.factors.data(), row,
                           p.values.data(), p.places.data());
    }
    const int64_t skipped = std::max<int64_t>(0, begin - first);
    take(first + skipped, columns - skipped, p.values.data() + skipped, p.places.data() + skipped);
  }
  return true;
}

template <class T, class Place>
bool scores_of(const Sequences& x, const Sequences& y, int64_t width, bool cosine, bool own,
               int64_t parts, T* scores, int64_t documents, Place* winners) {
  const Queries<T> q(x, width, cosine, parts);
  if (!q.finite) return false;
  const int64_t longest = longest_of(y);
  // A piece of work is a document and a share of the queries, a whole number of them.
  const int64_t queries = own ? 1 : x.count;
  const int64_t shares = std::min(queries, tiles(kShares, std::max<int64_t>(1, y.count)));
  std::atomic<bool> finite{true};
  share_out(y.count * shares, 1, [&](int64_t begin, int64_t end) {
    DocumentPanel<T> p(q, longest);
    for (int64_t piece = begin; piece < end && finite; ++piece) {
      const int64_t at = piece / shares, share = piece % shares;
      const int64_t document = own ? at % documents : at;
      const int64_t from = own ? at / documents : queries * share / shares;
      const int64_t to = own ? from + 1 : queries * (share + 1) / shares;
      if (from == to) continue;
      p.kept.clear();
      y.append(at, p.kept);
      const bool empty = p.kept.empty();
      Place* places = winners ? winners + document * x.tokens : nullptr;
      if (places) std::fill(places + x.starts[from], places + x.starts[to], Place(-1));
      if (empty || q.first[from] == q.first[to]) {
        for (int64_t query = from; query < to; ++query) {
          const bool none = q.first[query] == q.first[query + 1];
          scores[query * documents + document] =
              none ? T(0) : -std::numeric_limits<T>::infinity();
        }
        continue;
      }
      int64_t query = from;
      double sum = 0;
      const auto close = [&](int64_t token) {  // every query that ends before the token
        for (; query < to && q.first[query + 1] <= token; ++query) {
          scores[query * documents + document] = T(sum);
          sum = 0;
        }
      };
      const auto take = [&](int64_t first, int64_t count, const T* values, const int64_t* chosen) {
        for (int64_t i = 0; i < count; ++i) {
          close(first + i);
          const double value = values[i];
          sum += q.rest.empty() ? value : value * double(q.rest[first + i]);
          if (places) places[q.rows[first + i]] = Place(p.kept[chosen[i]] - y.starts[at]);
        }
      };
      if (!largest_products(q, y.rows, p, q.first[from], q.first[to], take)) finite = false;
      close(q.first[to]);
    }
  });
  return finite;
}

// scores (B, K) of queries x (P, D) and documents y (T, D), whose sequences begin at `starts` with
// their end behind; K: all documents, or with `own` those of each query. winners (K, P), if given:
// the token of the document, -1 for none. parts: of bfloat16 on a matrix unit, 0 without one; false,
// and nothing to be read, if these cannot hold a number.
bool max_sim(Tensor x, Tensor y, Tensor x_starts, Tensor y_starts, Optional x_mask, Optional y_mask,
             bool cosine, bool own, int64_t parts, Tensor scores, Optional winners) {
  bool held = true;
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
    if (parts) {  // refuses the dtypes that are not packed
      packed_matrix(x);
      packed_matrix(y);
    }
    T* out = output<T>(scores, "scores", a.count * documents);
    const bool wide = winners && check_winners(*winners, documents, a.tokens, b);
    void* places = winners ? winners->mutable_data_ptr() : nullptr;
    held = wide ? scores_of<T>(a, b, width, cosine, own, parts, out, documents,
                               static_cast<int32_t*>(places))
                : scores_of<T>(a, b, width, cosine, own, parts, out, documents,
                               static_cast<int16_t*>(places));
  });
  return held;
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
