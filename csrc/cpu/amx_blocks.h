// Scores of 16-bit rows on a matrix unit, block by block: each is made, looked at and multiplied
// while it lies in the second cache. Products are so fast there that scores which leave that cache
// cost more than scores made twice.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "amx_operands.h"

namespace fastsim {
namespace {

// Two: the score gradients of 16-bit rows, whose own rounding is then that of the gradient.
constexpr int64_t kSlopeParts = 2;

// A block and what its products read and add to are to lie in the second cache.
constexpr int64_t kBlockColumns = kBlockDepth;
int64_t block_rows(int64_t width) { return width > 512 ? kBlockDepth / 2 : kBlockDepth; }

// One side of the scores: its rows as they came, and what makes unit rows of them (AmxKernels).
class Side16 {
 public:
  explicit Side16(const Tensor& x)
      : count(x.size(0)), width(x.size(1)), from_(packed_matrix(x)), numbers_(3 * count) {
    STD_TORCH_CHECK(from_.matrix.dtype != Dtype::float32, "fastsim: wanted 16-bit rows");
    over(count, width, [&](int64_t begin, int64_t end) {
      amx_in_use().norms(from_.matrix, width, numbers_, numbers_ + count, numbers_ + 2 * count,
                         {begin, end});
    });
  }

  // One part holds a bfloat16, two a float16.
  int64_t parts() const { return from_.matrix.dtype == Dtype::bfloat16 ? 1 : 2; }
  int64_t steps() const { return tiles(width, kTileDepth); }
  int64_t elements(int64_t rows) const { return operand_elements(rows, width, parts()); }

  // The rows from `first` on, times their powers of two; what these still lack.
  Packed rows(int64_t first) const {
    return {from_.matrix.from_row(first), numbers_ + count + first, nullptr};
  }
  const float* rest(int64_t first) const { return numbers_ + 2 * count + first; }

  // dL/dx of rows in the place of dL/drows; dots: row_i . drow_i.
  void finish(float* grad, int64_t first, int64_t rows, float* dots) const {
    kernels().of<float>().unit_rows_backward(grad, from_.matrix.from_row(first), width,
                                             numbers_ + first, 1.0f, grad, Dtype::float32, dots, 0,
                                             rows);
  }

  const int64_t count, width;

 private:
  const Packed from_;
  const Scratch<float> numbers_;
};

// What blocks of columns are as operands: of scores, and with `products` of gradients too. In one
// piece of memory, which of a large batch no thread keeps.
class Columns {
 public:
  Columns(const Side16& y, bool products)
      : side(y), size_(y.elements(y.count)), tiles_(products ? 2 * size_ : size_) {
    pack_all(Pack::rows_transposed, y.rows(0), y.count, 0, y.width, y.parts(), tiles_);
    if (products) pack_right(y.rows(0), y.count, y.width, y.parts(), tiles_ + size_);
  }

  // From a multiple of 32 on.
  Operand of_scores(int64_t first) const {
    return {tiles_ + first * side.parts() * side.steps() * kTileDepth, side.parts(), side.steps()};
  }
  // Of a block, which begins at a multiple of kBlockDepth.
  const uint16_t* of_gradients(int64_t first) const {
    return tiles_ + size_ + operand_elements(side.width, first, side.parts());
  }

  const Side16& side;

 private:
  const int64_t size_;
  const Scratch<uint16_t> tiles_;
};

// Whose turn it is at each block of columns: what bands of rows add to it they add in their order,
// whatever thread has them.
class Turns {
 public:
  explicit Turns(int64_t blocks) : bands_(blocks) {}

  template <class F>
  void take(int64_t block, int64_t band, const F& f) {
    while (bands_[block].load(std::memory_order_acquire) != band) std::this_thread::yield();
    f();
    bands_[block].store(band + 1, std::memory_order_release);
  }

 private:
  std::vector<std::atomic<int64_t>> bands_;
};

// Runs work(memory, band) for all bands. Threads take them in order, so that the one whose turn it
// is has been taken; make: a thread's memory, before others wait for it.
template <class Make, class Work>
void for_bands(int64_t bands, const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, bands, 1, [&](int64_t, int64_t) {
    auto memory = make();
    for (int64_t band; (band = next.fetch_add(1)) < bands;) work(memory, band);
  });
}

// What one thread holds: rows of a band as operands, scores of a block, their gradients as operand.
class Band {
 public:
  Band(const Side16& x, int64_t tall, bool products)
      : x_(x), rows_(x.elements(tall)), panel_(tall * kStride),
        right_(products ? operand_elements(x.width, tall, x.parts()) : 0),
        score_grads_(products ? operand_elements(tall, kBlockColumns, kSlopeParts) : 0) {}

  void begin(int64_t first, int64_t count, bool products) {
    first_ = first;
    count_ = count;
    const Packed from = x_.rows(first);
    const AmxKernels& amx = amx_in_use();
    const Range strips{0, 2 * tiles(count, kTileGroup)};
    amx.pack(Pack::rows, from, count, 0, x_.width, x_.parts(), rows_, strips);
    if (!products) return;
    const Range of_width{0, 2 * tiles(x_.width, kTileGroup)};
    amx.pack(Pack::pairs, from, x_.width, 0, count, x_.parts(), right_, of_width);
  }

  // The scores against the block of columns from `column` on; all: what decides the roles of pairs.
  Block<float> scores(const Block<float>& all, const Columns& columns, int64_t column,
                      int64_t count) const {
    Block<float> b = all.from_row(first_).from_column(column);
    if (all.seen) b.seen = all.seen + first_ * kObserved;
    b.scores = panel_;
    b.stride = kStride;
    b.rows = count_;
    b.columns = count;
    const Operand left{rows_, x_.parts(), x_.steps()};
    const ScoreScales scales{x_.rest(first_), columns.side.rest(column)};
    amx_in_use().scores(left, count_, columns.of_scores(column), count, true, scales, b.scores,
                        b.stride, false, {0, tiles(count, kTileGroup)});
    return b;
  }

  // out (rows, width) (+)= the block's score gradients times its columns.
  void multiply_columns(const Block<float>& b, const Columns& columns, float* out, bool add) const {
    multiply(b, false, columns.of_gradients(b.column0), columns.side.rest(b.column0), out, add);
  }

  // out (columns, width) (+)= the transposed score gradients times the band's rows.
  void multiply_rows(const Block<float>& b, float* out, bool add) const {
    multiply(b, true, right_, x_.rest(first_), out, add);
  }

 private:
  static constexpr int64_t kStride = kBlockColumns + 16;  // off a power of two

  void multiply(const Block<float>& b, bool transposed, const uint16_t* right, const float* rest,
                float* out, bool add) const {
    const int64_t count = transposed ? b.columns : b.rows, depth = transposed ? b.rows : b.columns;
    const int64_t steps = tiles(depth, kTileDepth);
    const AmxKernels& amx = amx_in_use();
    amx.pack(transposed ? Pack::pairs_transposed : Pack::rows, score_grads(b, rest, transposed),
             count, 0, depth, kSlopeParts, score_grads_, {0, 2 * tiles(count, kTileGroup)});
    amx.multiply({score_grads_, kSlopeParts, steps}, count, {right, x_.parts(), steps}, x_.width,
                 out, add);
  }

  const Side16& x_;
  const Scratch<uint16_t> rows_;
  const Scratch<float> panel_;
  const Scratch<uint16_t> right_, score_grads_;
  int64_t first_ = 0, count_ = 0;
};

// The blocks of all scores, band after band.
class Scores {
 public:
  // products: whether gradients will be wanted.
  Scores(const Side16& x, const Side16& y, const Block<float>& all, bool products)
      : x_(x), columns_(y, products), all_(all), tall_(std::min(block_rows(x.width), x.count)) {}

  // Calls look(block, row, column) for each, then in_turn(block, column), with those of the same
  // columns in the order of their rows. Where to_x (N, D) or to_y (M, D) is given, `look` makes
  // score gradients of the scores, and it becomes their product with the unit rows of the other
  // side.
  template <class Look, class InTurn>
  void each(const Look& look, const InTurn& in_turn, float* to_x = nullptr,
            float* to_y = nullptr) const {
    const int64_t rows = x_.count, columns = columns_.side.count, width = x_.width;
    Turns turns(tiles(columns, kBlockColumns));
    const auto make = [&] { return Band(x_, tall_, to_x || to_y); };
    for_bands(tiles(rows, tall_), make, [&](Band& band, int64_t index) {
      const int64_t first = index * tall_;
      band.begin(first, std::min(tall_, rows - first), to_y);
      for (int64_t column = 0, at = 0; column < columns; column += kBlockColumns, ++at) {
        const int64_t wide = std::min(kBlockColumns, columns - column);
        const Block<float> b = band.scores(all_, columns_, column, wide);
        look(b, first, column);
        if (to_x) band.multiply_columns(b, columns_, to_x + first * width, column > 0);
        turns.take(at, index, [&] {
          in_turn(b, column);
          if (to_y) band.multiply_rows(b, to_y + column * width, index > 0);
        });
      }
    });
  }

 private:
  const Side16& x_;
  const Columns columns_;
  const Block<float> all_;
  const int64_t tall_;
};

}  // namespace
}  // namespace fastsim
