// Scores of rows on a matrix unit, a band of rows at a time. A block of a band is made, looked at and
// multiplied while it lies in the second cache. A loss that needs all of a row first has the scores
// of whole rows kept, to be read back from the last cache. One that needs all scores first has them
// made twice, but for those that memory is left for.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "amx_sides.h"

namespace fastsim {
namespace {

// A block and what its products read and add to are to lie in the second cache. With several parts
// they do not fit, and the more rows a band has, the less passes through that cache.
constexpr int64_t kBlockColumns = kBlockDepth;
constexpr int64_t kFewRows = 256, kManyRows = 512;
constexpr int64_t kFewestRows = 64;   // of a band, where its rows make fewer bands than kBands
constexpr int64_t kBands = 4;         // of few rows: for as many threads
// The columns of a block that are added to in one turn, so that the next band waits for these alone;
// one more turn is for sums of columns.
constexpr int64_t kGroupsOfTurn = 2;
constexpr int64_t kTurns = 1 + kBlockColumns / kTileGroup / kGroupsOfTurn;

constexpr int64_t kWhole = 1 << 21;   // scores of many whole rows in memory: 8 MB
constexpr int64_t kWorthKeeping = 8;  // to keep less than one band in so many saves too little

// Rows of a band of `rows`; columns: whose scores of a band are in memory at once. Bands are of one
// height, and several are an even number: threads, mostly an even number too, are done at about the
// same time. By sizes alone, since the bits of sums depend on bands.
inline int64_t band_rows(int64_t rows, int64_t width, int64_t parts, int64_t columns) {
  const bool many = parts > 1 && kManyRows * columns <= kWhole;
  const int64_t fit = (many ? kManyRows : kFewRows) / (width > 512 ? 2 : 1);
  const int64_t most = many ? fit : std::min(fit, std::max(kFewestRows, tiles(rows, kBands)));
  if (rows <= most) return rows;
  const int64_t height = even_part(rows, tiles(rows, tiles(tiles(rows, most), 2) * 2), kTileGroup);
  const auto even = [&](int64_t tall) { return tiles(rows, tall) % 2 == 0; };
  int64_t taller = height, shorter = height;  // as it is rounded, fewer bands may do
  while (taller <= fit && !even(taller)) taller += kTileGroup;
  while (shorter >= kFewestRows && !even(shorter)) shorter -= kTileGroup;
  return taller <= fit ? taller : shorter >= kFewestRows ? shorter : height;
}

// Whose turn it is at each block of columns: what bands of rows add to it they add in their order,
// whatever thread has them. Once a band has failed, no turn after its own would come.
class Turns {
 public:
  explicit Turns(int64_t blocks) : bands_(blocks) {}

  template <class F>
  void take(int64_t block, int64_t band, const F& f) {
    while (bands_[block].load(std::memory_order_acquire) != band) {
      if (failed()) return;
      std::this_thread::yield();
    }
    f();
    bands_[block].store(band + 1, std::memory_order_release);
  }

  void fail() { failed_.store(true, std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  std::vector<std::atomic<int64_t>> bands_;
  std::atomic<bool> failed_{false};
};

// Runs work(memory, band) for all bands. Threads take them in order, so that the one whose turn it
// is has been taken; make: a thread's memory, before others wait for it. An error in one ends all.
template <class Make, class Work>
void for_bands(int64_t bands, Turns& turns, const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, bands, 1, [&](int64_t, int64_t) {
    auto memory = make();
    try {
      for (int64_t band; !turns.failed() && (band = next.fetch_add(1)) < bands;) {
        work(memory, band);
      }
    } catch (...) {
      turns.fail();
      throw;
    }
  });
}

// Of how many bfloat16 parts the score gradients are; of two, how large the entries of a square are
// whose second part is left out (0: nowhere), and the residuals of rows and columns (amx.h), added
// to what is there.
struct ScoreGrads {
  int64_t parts;
  float small;
  float *of_rows, *of_columns;
};

// What one thread holds: rows of a band as operands, scores of its rows, their gradients as operand.
class Band {
 public:
  // wide: columns whose scores are in memory at a time. to_rows, to_columns: the gradients wanted.
  Band(const SplitSide& x, const ScoreGrads& score_grads, int64_t tall, int64_t wide, bool to_rows,
       bool to_columns)
      : x_(x), as_parts_(score_grads), wide_(wide), to_columns_(to_columns),
        to_either_(to_rows || to_columns), rows_(x.elements(tall)), panel_(tall * stride(wide)),
        transposed_(to_columns ? operand_elements(x.width, tall, x.parts) : 0),
        score_grads_(to_either_ ? 2 * operand_elements(tall, kBlockColumns, as_parts_.parts) : 0),
        in_pairs_(score_grads_ + operand_elements(tall, kBlockColumns, as_parts_.parts)),
        second_(tiles(tall, kTileGroup) * tiles(kBlockColumns, kTileGroup)),
        residuals_(to_either_ ? padded(tall) * kTileSide : 0), of_columns_(kBlockColumns) {
    if (to_either_) std::fill_n(static_cast<float*>(residuals_), padded(tall) * kTileSide, 0.0f);
  }

  void begin(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    const Packed from = x_.rows(first);
    const AmxKernels& amx = amx_in_use();
    const Range strips{0, 2 * tiles(count, kTileGroup)};
    amx.pack(Pack::rows, from, count, 0, x_.width, x_.parts, rows_, strips);
    if (!to_columns_) return;
    const Range of_width{0, 2 * tiles(x_.width, kTileGroup)};
    amx.pack(Pack::pairs_transposed, from, x_.width, 0, count, x_.parts, transposed_, of_width);
  }

  // Columns [column, column + count), their scores not made yet; all: what decides the roles of
  // pairs. Those of a block begin the panel, or in whole rows have their place there; kept: null, or
  // memory in its place.
  Block<float> columns(const Block<float>& all, int64_t column, int64_t count,
                       float* kept = nullptr) const {
    Block<float> b = all.from_row(first_).from_column(column);
    if (all.seen) b.seen = all.seen + first_ * kObserved;
    b.scores = kept ? kept : panel_ + (wide_ > kBlockColumns ? column : 0);
    b.stride = stride(wide_);
    b.rows = count_;
    b.columns = count;
    return b;
  }

  void fill(const Block<float>& b, const Columns& columns) const {
    const Operand left{rows_, x_.parts, x_.steps()};
    const ScoreScales scales{x_.rest(first_), columns.rest(b.column0)};
    amx_in_use().scores(left, count_, columns.of_scores(b.column0), b.columns, true, scales,
                        b.scores, b.stride, false, {0, tiles(b.columns, kTileGroup)});
  }

  // Makes operands of a block's score gradients, times the rests of its rows and columns.
  void take_score_grads(const Block<float>& b, const Columns& columns) const {
    const Packed from{{b.scores, Dtype::float32, b.stride, 1},
                      x_.rest(first_),
                      columns.rest(b.column0)};
    const Residuals residuals{x_.norms(first_), columns.norms(b.column0), residuals_, of_columns_};
    std::fill_n(static_cast<float*>(of_columns_), kBlockColumns, 0.0f);
    amx_in_use().pack_both(from, b.rows, b.columns, as_parts_.parts, as_parts_.small, residuals,
                           score_grads_, in_pairs_, second_);
  }

  // Of the block whose operands were made last.
  void add_residuals_of_columns(const Block<float>& b) const {
    float* const sums = as_parts_.of_columns + b.column0;
    for (int64_t j = 0; j < b.columns; ++j) sums[j] += of_columns_[j];
  }

  // Of all blocks of the band, which the next one begins without.
  void add_residuals_of_rows() const {
    for (int64_t i = 0; i < count_; ++i) {
      float* const of_row = residuals_ + i * kTileSide;
      as_parts_.of_rows[first_ + i] += std::accumulate(of_row, of_row + kTileSide, 0.0f);
      std::fill_n(of_row, kTileSide, 0.0f);
    }
  }

  // out (rows, width) (+)= these times the columns.
  void multiply_columns(const Block<float>& b, const Columns& columns, float* out, bool add) const {
    const int64_t steps = tiles(b.columns, kTileDepth);
    amx_in_use().multiply({score_grads_, as_parts_.parts, steps, second_, steps, 1}, b.rows,
                          {columns.of_gradients(b.column0), x_.parts, steps}, x_.width, out, add,
                          false, {0, tiles(x_.width, kTileGroup)});
  }

  // out (width, columns) (+)= the transposed rows of the band times these, as InBlocks: of some groups
  // of columns.
  void multiply_rows(const Block<float>& b, float* out, bool add, Range of_columns) const {
    const int64_t steps = tiles(b.rows, kTileDepth), groups = tiles(b.columns, kTileGroup);
    amx_in_use().multiply({transposed_, x_.parts, steps}, x_.width,
                          {in_pairs_, as_parts_.parts, steps, second_, 1, groups}, b.columns, out, add,
                          true, of_columns);
  }

  // Of the rows of a panel: off a power of two.
  static int64_t stride(int64_t wide) { return tiles(wide, kTileSide) * kTileSide + 16; }

 private:
  const SplitSide& x_;
  const ScoreGrads as_parts_;
  const int64_t wide_;
  const bool to_columns_, to_either_;
  const Scratch<uint16_t> rows_;
  const Scratch<float> panel_;
  const Scratch<uint16_t> transposed_, score_grads_;
  uint16_t* const in_pairs_;
  const Scratch<bool> second_;
  const Scratch<float> residuals_, of_columns_;
  int64_t first_ = 0, count_ = 0;
};

// The scores of all rows, band after band. Each comes as a block over all rows of a band: some of
// its columns, or all of them.
class BandScores {
 public:
  // products: whether gradients will be wanted. whole: rows are seen whole. stripe: columns that are
  // operands at a time, a multiple of kBlockColumns; whole rows have no more. kept: bytes that these
  // and the scores may take that are kept until all blocks are seen again.
  BandScores(const SplitSide& x, const SplitSide& y, const Block<float>& all,
             const ScoreGrads& score_grads, bool products, bool whole, int64_t stripe, int64_t kept)
      : x_(x), y_(y), all_(all), score_grads_(score_grads), stripe_(stripe),
        wide_(whole ? y.count : kBlockColumns),
        tall_(band_rows(x.count, x.width, x.parts, wide_)),
        kept_bands_(bands_to_keep(kept)), kept_(kept_bands_ * kept_size()) {
    STD_TORCH_CHECK(stripe > 0 && stripe % kBlockColumns == 0, "fastsim: wanted whole blocks");
    STD_TORCH_CHECK(!whole || y.count <= stripe, "fastsim: wanted whole rows");
    if (y.count <= stripe) columns_.emplace(y, 0, y.count, products);
  }

  int64_t tall() const { return tall_; }  // rows of a band
  int64_t bands() const { return tiles(x_.count, tall_); }
  // Whether the scores of the band with this row are those of the first look at them.
  bool kept(int64_t row) const { return row < kept_bands_ * tall_; }

  // Calls look(block, row, column) for each block, then in_turn(block, column), with those of the
  // same columns in the order of their rows. Where to_x (N, D) or to_y (M, D) is given, `look` makes
  // score gradients of the scores, and it becomes their product with the unit rows of the other
  // side, times the rests of its own rows. Of to_y the columns of a block lie transposed, as
  // InBlocks.
  template <class Look, class InTurn>
  void each_block(const Look& look, const InTurn& in_turn, float* to_x = nullptr,
                  float* to_y = nullptr) const {
    each_stripe(to_x || to_y, [&](const Columns& stripe) {
      each_band(stripe, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
        for_blocks(stripe, [&](int64_t column, int64_t count) {
          float* const place = kept_place(index, column);
          const Block<float> b = band.columns(all_, column, count, place);
          if (!place || !(to_x || to_y)) band.fill(b, stripe);
          look(b, index * tall_, column);
          multiply(band, b, stripe, index, to_x, to_y, turns, [&] { in_turn(b, column); });
        });
      });
    });
  }

  // The same of whole rows: look(block, row).
  template <class Look>
  void each_whole(const Look& look, float* to_x, float* to_y) const {
    each_band(*columns_, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
      const Block<float> rows = band.columns(all_, 0, y_.count);
      band.fill(rows, *columns_);
      look(rows, index * tall_);
      if (!to_x && !to_y) return;
      for_blocks(*columns_, [&](int64_t column, int64_t count) {
        const Block<float> b = band.columns(all_, column, count);
        multiply(band, b, *columns_, index, to_x, to_y, turns, [] {});
      });
    });
  }

 private:
  // Scores of a block and of a band in memory.
  int64_t block_size() const { return tall_ * Band::stride(kBlockColumns); }
  int64_t kept_size() const { return tiles(y_.count, kBlockColumns) * block_size(); }

  bool leaves_residuals(const float* to_x, const float* to_y) const {
    return (to_x || to_y) && score_grads_.small > 0;
  }

  float* kept_place(int64_t band, int64_t column) const {
    if (band >= kept_bands_) return nullptr;
    return kept_ + (band * kept_size() + column / kBlockColumns * block_size());
  }

  // A matrix unit makes those of bfloat16 again as soon as they are read back.
  int64_t bands_to_keep(int64_t bytes) const {
    const int64_t of_columns = 2 * sizeof(uint16_t) * y_.elements(std::min(stripe_, y_.count));
    const int64_t left = (bytes - of_columns) / int64_t(sizeof(float));
    if ((x_.parts == 1 && amx_in_use().most_parts > 1) || left <= 0) return 0;
    const int64_t most = std::min(bands(), left / kept_size());
    return most * kWorthKeeping >= bands() ? most : 0;
  }

  template <class F>
  void each_stripe(bool products, const F& f) const {
    if (columns_) return f(*columns_);
    for (int64_t first = 0; first < y_.count; first += stripe_) {
      f(Columns(y_, first, std::min(stripe_, y_.count - first), products));
    }
  }

  template <class Work>
  void each_band(const Columns& columns, float* to_x, float* to_y, const Work& work) const {
    Turns turns(tiles(columns.count, kBlockColumns) * kTurns);
    const auto make = [&] { return Band(x_, score_grads_, tall_, wide_, to_x, to_y); };
    for_bands(bands(), turns, make, [&](Band& band, int64_t index) {
      band.begin(index * tall_, std::min(tall_, x_.count - index * tall_));
      work(band, index, turns);
      if (leaves_residuals(to_x, to_y)) band.add_residuals_of_rows();
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
    if (to_x || to_y) band.take_score_grads(b, columns);
    if (to_x) band.multiply_columns(b, columns, to_x + index * tall_ * width, column > 0);
    const int64_t first_turn = (column - columns.first) / kBlockColumns * kTurns;
    turns.take(first_turn, index, [&] {
      in_turn();
      if (leaves_residuals(to_x, to_y)) band.add_residuals_of_columns(b);
    });
    for (int64_t turn = 1; to_y && turn < kTurns; ++turn) {
      const int64_t group = (turn - 1) * kGroupsOfTurn;
      turns.take(first_turn + turn, index, [&] {
        band.multiply_rows(b, to_y + column * width, index > 0, {group, group + kGroupsOfTurn});
      });
    }
  }

  const SplitSide &x_, &y_;
  const Block<float> all_;
  const ScoreGrads score_grads_;
  const int64_t stripe_, wide_, tall_, kept_bands_;
  const Scratch<float> kept_;
  std::optional<Columns> columns_;  // all, where they are one stripe
};

}  // namespace
}  // namespace fastsim
