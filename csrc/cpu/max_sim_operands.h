// The operands of the products of MaxSim, in two forms: whole numbers of the compute type, and
// bfloat16 parts (amx.h). The classes of both forms have the same members. The query tokens are the
// right operand of all products. The tokens of a document are the left operand, some at a time.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "amx_operands.h"
#include "passes.h"

namespace fastsim {
namespace {

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

// The tokens of a document, in the compute type. They are unit rows if the queries' tokens are.
template <class T>
class WholeDocument;

// The query tokens, packed in the compute type. With `cosine` they are unit rows.
template <class T>
class WholeQueries {
 public:
  using Number = T;
  using Document = WholeDocument<T>;

  // tokens: their row numbers in x.
  WholeQueries(const Matrix& x, const std::vector<int64_t>& tokens, int64_t width, bool cosine)
      : width(width), cosine(cosine), packed_(packed_rows<T>(tokens.size()) * width) {
    const int64_t count = tokens.size();
    const Memory<T> rows(count * width);
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().token_rows(x, tokens.data() + begin, end - begin, width, cosine,
                                   rows.data() + begin * width);
    });
    pack(rows.data(), count, width, packed_.data());
  }

  // Products may begin at a token whose index is a multiple of this.
  static int64_t group() { return kernels().of<T>().panel_columns; }
  // Whether the operand can hold all numbers of the tokens.
  bool holds_all() const { return true; }
  // What the products of a token have to be multiplied by.
  double factor(int64_t) const { return 1; }

  const T* packed(int64_t token) const { return packed_.data() + token * width; }

  const int64_t width;
  const bool cosine;

 private:
  const Memory<T> packed_;
};

template <class T>
class WholeDocument {
 public:
  // The memory of one thread, for up to `most` tokens.
  WholeDocument(const WholeQueries<T>& queries, int64_t most)
      : queries_(queries), rows_(most * queries.width), factors_(most, T(1)) {}

  // Takes `count` tokens, given their row numbers in y. Returns whether the operand can hold all of
  // their numbers.
  bool take(const Matrix& y, const int64_t* tokens, int64_t count) {
    kernels().of<T>().token_rows(y, tokens, count, queries_.width, queries_.cosine, rows_.data());
    count_ = count;
    return true;
  }

  // panel (document tokens, columns) = the products with the query tokens [first, first + columns).
  void multiply(int64_t first, int64_t columns, T* panel, int64_t stride) const {
    const auto& k = kernels().of<T>();
    k.score_panels(rows_.data(), queries_.width, queries_.packed(first), columns, panel, stride,
                   false, {0, count_}, {0, ceil_div(columns, k.panel_columns)}, {});
  }

  // What the rows of a panel have to be multiplied by, (document tokens,).
  const T* factors() const { return factors_.data(); }

 private:
  const WholeQueries<T>& queries_;
  const Memory<T> rows_;
  const std::vector<T> factors_;
  int64_t count_ = 0;
};

// The `count` rows of x whose ascending numbers `rows` lists, as one matrix in the dtype of x. If
// they do not follow one another in x, they are copied to `memory`.
Matrix gathered(const Matrix& x, const int64_t* rows, int64_t count, int64_t width,
                std::vector<char>& memory) {
  const int64_t bytes = bytes_of(x.dtype);
  if (rows[count - 1] - rows[0] + 1 == count) return x.from_row(rows[0]);
  memory.resize(count * width * bytes);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(memory.data() + i * width * bytes, x.from_row(rows[i]).data, width * bytes);
  }
  return {memory.data(), x.dtype, width, 1};
}

class SplitDocument;

// The query tokens, packed in bfloat16 parts. With `cosine` they are packed times their powers; the
// rests (amx.h) are the factors of their products.
class SplitQueries {
 public:
  using Number = float;
  using Document = SplitDocument;

  // tokens: their row numbers in x.
  SplitQueries(const Matrix& x, const std::vector<int64_t>& tokens, int64_t width, bool cosine,
               int64_t parts)
      : width(width), parts(parts), cosine(cosine), rest_(padded(tokens.size()), 1.0f),
        tiles_(operand_elements(tokens.size(), width, parts)) {
    const int64_t count = tokens.size();
    if (count == 0) return;
    std::vector<char> memory;
    const Matrix rows = gathered(x, tokens.data(), count, width, memory);
    std::vector<float> powers(cosine ? count : 0), inverse(powers);
    if (cosine) {
      amx_in_use().norms(rows, width, inverse.data(), powers.data(), rest_.data(), {0, count});
    }
    const ScaledMatrix scaled{rows, cosine ? powers.data() : nullptr, nullptr};
    const bool finite =
        pack_all(TileLayout::rows_transposed, scaled, count, 0, width, parts, tiles_.data());
    // A cosine takes NaN from the rest of a row that is not finite, so such rows need no refusal.
    holds_all_ = cosine || finite;
  }

  static int64_t group() { return kTileGroup; }
  bool holds_all() const { return holds_all_; }
  double factor(int64_t token) const { return rest_[token]; }

  int64_t steps() const { return ceil_div(width, kTileDepth); }
  // The operand from `token` on, a multiple of kTileGroup.
  Operand operand(int64_t token) const {
    const int64_t strip = token / kTileSide;
    return {tiles_.data() + strip * parts * steps() * kTileElements, parts, steps()};
  }

  const int64_t width, parts;
  const bool cosine;

 private:
  std::vector<float> rest_;
  const Memory<uint16_t> tiles_;
  bool holds_all_ = true;
};

class SplitDocument {
 public:
  SplitDocument(const SplitQueries& queries, int64_t most)
      : queries_(queries), tiles_(operand_elements(most, queries.width, queries.parts)),
        powers_(most), inverse_(most), rest_(most, 1.0f) {}

  bool take(const Matrix& y, const int64_t* tokens, int64_t count) {
    const int64_t width = queries_.width;
    const Matrix rows = gathered(y, tokens, count, width, copy_);
    if (queries_.cosine) {
      amx_in_use().norms(rows, width, inverse_.data(), powers_.data(), rest_.data(), {0, count});
    }
    const ScaledMatrix scaled{rows, queries_.cosine ? powers_.data() : nullptr, nullptr};
    const bool finite =
        amx_in_use().pack(TileLayout::rows, scaled, count, 0, width, queries_.parts, tiles_.data(),
                          {0, 2 * ceil_div(count, kTileGroup)});
    count_ = count;
    return finite || queries_.cosine;
  }

  void multiply(int64_t first, int64_t columns, float* panel, int64_t stride) const {
    const Operand left{tiles_.data(), queries_.parts, queries_.steps()};
    amx_in_use().scores(left, count_, queries_.operand(first), columns, true, {}, panel, stride,
                        false, {0, ceil_div(columns, kTileGroup)});
  }

  const float* factors() const { return rest_.data(); }

 private:
  const SplitQueries& queries_;
  const Memory<uint16_t> tiles_;
  std::vector<float> powers_, inverse_, rest_;
  std::vector<char> copy_;
  int64_t count_ = 0;
};

}  // namespace
}  // namespace fastsim
