// Scores of 16-bit rows on a matrix unit, a band of rows at a time. A block of a band is made, looked
// at and multiplied while it lies in the second cache. A loss that needs all of a row first has the
// scores of whole rows kept, to be read back from the last cache, or if they are long made twice.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "amx_operands.h"

namespace fastsim {
namespace {

// Two: the score gradients of 16-bit rows, whose own rounding is then that of the gradient.
constexpr int64_t kScoreGradParts = 2;

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

// What a stripe of columns is as operands: of scores, and with `products` of gradients too. In one
// piece of memory, which of a large one no thread keeps.
class Columns {
 public:
  // Columns [first, first + count) of y; `first` is a multiple of kBlockDepth.
  Columns(const Side16& y, int64_t first, int64_t count, bool products)
      : first(first), count(count), y_(y), size_(y.elements(count)),
        tiles_(products ? 2 * size_ : size_) {
    const Packed from = y.rows(first);
    pack_all(Pack::rows_transposed, from, count, 0, y.width, y.parts(), tiles_);
    if (products) pack_right(from, count, y.width, y.parts(), tiles_ + size_);
  }

  // Of the columns from `column` on, a multiple of 32 of the matrix.
  Operand of_scores(int64_t column) const {
    const int64_t at = (column - first) * y_.parts() * y_.steps() * kTileDepth;
    return {tiles_ + at, y_.parts(), y_.steps()};
  }
  // Of a block.
  const uint16_t* of_gradients(int64_t column) const {
    return tiles_ + size_ + operand_elements(y_.width, column - first, y_.parts());
  }
  const float* rest(int64_t column) const { return y_.rest(column); }

  const int64_t first, count;

 private:
  const Side16& y_;
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

// What one thread holds: rows of a band as operands, scores of its rows, their gradients as operand.
class Band {
 public:
  // wide: columns whose scores are in memory at a time.
  Band(const Side16& x, int64_t tall, int64_t wide, bool products)
      : x_(x), wide_(wide), rows_(x.elements(tall)), panel_(tall * stride()),
        right_(products ? operand_elements(x.width, tall, x.parts()) : 0),
        score_grads_(products ? operand_elements(tall, kBlockColumns, kScoreGradParts) : 0) {}

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

  // Columns [column, column + count), their scores not made yet; all: what decides the roles of
  // pairs. Those of a block begin the panel, or in whole rows have their place there.
  Block<float> columns(const Block<float>& all, int64_t column, int64_t count) const {
    Block<float> b = all.from_row(first_).from_column(column);
    if (all.seen) b.seen = all.seen + first_ * kObserved;
    b.scores = panel_ + (wide_ > kBlockColumns ? column : 0);
    b.stride = stride();
    b.rows = count_;
    b.columns = count;
    return b;
  }

  void fill(const Block<float>& b, const Columns& columns) const {
    const Operand left{rows_, x_.parts(), x_.steps()};
    const ScoreScales scales{x_.rest(first_), columns.rest(b.column0)};
    amx_in_use().scores(left, count_, columns.of_scores(b.column0), b.columns, true, scales,
                        b.scores, b.stride, false, {0, tiles(b.columns, kTileGroup)});
  }

  // out (rows, width) (+)= the block's score gradients times its columns.
  void multiply_columns(const Block<float>& b, const Columns& columns, float* out, bool add) const {
    multiply(b, false, columns.of_gradients(b.column0), columns.rest(b.column0), out, add);
  }

  // out (columns, width) (+)= the transposed score gradients times the band's rows.
  void multiply_rows(const Block<float>& b, float* out, bool add) const {
    multiply(b, true, right_, x_.rest(first_), out, add);
  }

 private:
  int64_t stride() const { return tiles(wide_, kTileSide) * kTileSide + 16; }  // off a power of two

  void multiply(const Block<float>& b, bool transposed, const uint16_t* right, const float* rest,
                float* out, bool add) const {
    const int64_t count = transposed ? b.columns : b.rows, depth = transposed ? b.rows : b.columns;
    const int64_t steps = tiles(depth, kTileDepth);
    const AmxKernels& amx = amx_in_use();
    amx.pack(transposed ? Pack::pairs_transposed : Pack::rows, score_grads(b, rest, transposed),
             count, 0, depth, kScoreGradParts, score_grads_, {0, 2 * tiles(count, kTileGroup)});
    amx.multiply({score_grads_, kScoreGradParts, steps}, count, {right, x_.parts(), steps}, x_.width,
                 out, add);
  }

  const Side16& x_;
  const int64_t wide_;
  const Scratch<uint16_t> rows_;
  const Scratch<float> panel_;
  const Scratch<uint16_t> right_, score_grads_;
  int64_t first_ = 0, count_ = 0;
};

// The scores of all rows, band after band. Each comes as a block over all rows of a band: some of
// its columns, or all of them.
class Scores {
 public:
  // products: whether gradients will be wanted. stripe: columns that are operands at a time, a
  // multiple of kBlockColumns; whole rows have no more.
  Scores(const Side16& x, const Side16& y, const Block<float>& all, bool products, int64_t stripe)
      : x_(x), y_(y), all_(all), products_(products), stripe_(stripe),
        tall_(std::min(block_rows(x.width), x.count)) {
    STD_TORCH_CHECK(stripe > 0 && stripe % kBlockColumns == 0, "fastsim: wanted whole blocks");
  }

  int64_t tall() const { return tall_; }  // rows of a band
  int64_t bands() const { return tiles(x_.count, tall_); }
  bool fit_whole_rows() const { return y_.count <= stripe_; }

  // Calls look(block, row, column) for each block, then in_turn(block, column), with those of the
  // same columns in the order of their rows. Where to_x (N, D) or to_y (M, D) is given, `look` makes
  // score gradients of the scores, and it becomes their product with the unit rows of the other
  // side.
  template <class Look, class InTurn>
  void each_block(const Look& look, const InTurn& in_turn, float* to_x = nullptr,
                  float* to_y = nullptr) const {
    for (int64_t first = 0; first < y_.count; first += stripe_) {
      const Columns stripe(y_, first, std::min(stripe_, y_.count - first), products_);
      each_band(kBlockColumns, stripe, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
        for_blocks(stripe, [&](int64_t column, int64_t count) {
          const Block<float> b = band.columns(all_, column, count);
          band.fill(b, stripe);
          look(b, index * tall_, column);
          multiply(band, b, stripe, index, to_x, to_y, turns, [&] { in_turn(b, column); });
        });
      });
    }
  }

  // The same of whole rows, where these fit: look(block, row).
  template <class Look>
  void each_whole(const Look& look, float* to_x, float* to_y) const {
    const Columns columns(y_, 0, y_.count, products_);
    each_band(y_.count, columns, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
      const Block<float> rows = band.columns(all_, 0, y_.count);
      band.fill(rows, columns);
      look(rows, index * tall_);
      if (!to_x && !to_y) return;
      for_blocks(columns, [&](int64_t column, int64_t count) {
        const Block<float> b = band.columns(all_, column, count);
        multiply(band, b, columns, index, to_x, to_y, turns, [] {});
      });
    });
  }

 private:
  template <class Work>
  void each_band(int64_t wide, const Columns& columns, float* to_x, float* to_y,
                 const Work& work) const {
    Turns turns(tiles(columns.count, kBlockColumns));
    const auto make = [&] { return Band(x_, tall_, wide, to_x || to_y); };
    for_bands(bands(), make, [&](Band& band, int64_t index) {
      band.begin(index * tall_, std::min(tall_, x_.count - index * tall_), to_y);
      work(band, index, turns);
    });
  }

  template <class F>
  void for_blocks(const Columns& columns, const F& f) const {
    const int64_t end = columns.first + columns.count;
    for (int64_t column = columns.first; column < end; column += kBlockColumns) {
      f(column, std::min(kBlockColumns, end - column));
    }
  }

  template <class InTurn>
  void multiply(const Band& band, const Block<float>& b, const Columns& columns, int64_t index,
                float* to_x, float* to_y, Turns& turns, const InTurn& in_turn) const {
    const int64_t column = b.column0, width = x_.width;
    if (to_x) band.multiply_columns(b, columns, to_x + index * tall_ * width, column > 0);
    turns.take((column - columns.first) / kBlockColumns, index, [&] {
      in_turn();
      if (to_y) band.multiply_rows(b, to_y + column * width, index > 0);
    });
  }

  const Side16 &x_, &y_;
  const Block<float> all_;
  const bool products_;
  const int64_t stripe_, tall_;
};

}  // namespace
}  // namespace fastsim
