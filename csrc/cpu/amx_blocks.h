// Scores of bfloat16 operands, a band of rows at a time. A block of a band is computed, processed
// by the loss and multiplied while it is in the L2 cache. A loss that needs whole rows first keeps
// the scores of a band's whole rows, and reads them back from the last-level cache. A loss that
// needs all scores first computes them twice, except for those that there is memory to keep.
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

// A band has at most kFewRows rows: a block, and the data that its products read and add to, then
// fit into the L2 cache. With several parts they do not fit in any case. A band then has up to
// kManyRows rows, since with more rows less data passes through that cache.
constexpr int64_t kBlockColumns = kBlockDepth;
constexpr int64_t kFewRows = 256, kManyRows = 512;
// A band of wider rows of one part is half as high, so that they stay in that cache. A processor
// with AVX512_BF16 and no matrix unit has a smaller one.
constexpr int64_t kWide = 2048, kWideWithoutUnit = 512;
// Threads take whole bands, so even few rows are cut into kBands bands if these have at least
// kFewestRows rows, and more rows into twice as many bands of twice as many rows.
constexpr int64_t kFewestRows = 64;
constexpr int64_t kBands = 4;
// The groups of a block's columns whose gradients a band adds to in one turn. The next band waits
// for these groups alone. One more turn is for sums over columns.
constexpr int64_t kGroupsOfTurn = 2;
constexpr int64_t kTurns = 1 + kBlockColumns / kTileGroup / kGroupsOfTurn;

constexpr int64_t kMostWholeScores = 1 << 21;  // of kManyRows whole rows in memory: 8 MB
constexpr int64_t kWorthKeeping = 8;  // to keep less than one band in this many saves too little

// The number of rows of a band, for `rows` rows in all. columns: the columns of a band whose scores
// are in memory at once. All bands but the last have this height. If there are several bands, their
// number is even if possible: threads, mostly an even number too, then finish at about the same
// time. Only sizes decide, since the bits of sums depend on the bands.
inline int64_t band_rows(int64_t rows, int64_t width, int64_t parts, int64_t columns) {
  const bool many = parts > 1 && kManyRows * columns <= kMostWholeScores;
  const bool wide = parts == 1 && width > (amx_in_use().most_parts > 1 ? kWide : kWideWithoutUnit);
  const int64_t limit = (many ? kManyRows : kFewRows) / (wide ? 2 : 1);
  const int64_t low = std::clamp(ceil_div(rows, kBands), kFewestRows, 2 * kFewestRows);
  const int64_t most = std::min(limit, std::max(low, ceil_div(rows, 2 * kBands)));
  if (rows <= most) return rows;
  const int64_t height =
      even_part(rows, ceil_div(rows, ceil_div(ceil_div(rows, most), 2) * 2), kTileGroup);
  const auto makes_even = [&](int64_t rows_of_band) {
    return ceil_div(rows, rows_of_band) % 2 == 0;
  };
  // The height is rounded up, so there may be fewer bands than planned, and an odd number.
  int64_t taller = height, shorter = height;
  while (taller <= limit && !makes_even(taller)) taller += kTileGroup;
  while (shorter >= kFewestRows && !makes_even(shorter)) shorter -= kTileGroup;
  return taller <= limit ? taller : shorter >= kFewestRows ? shorter : height;
}

// Lets bands add to the same sums in the order of the bands, whatever threads process them. There
// are `count` places; in each, every band has a turn.
class Turns {
 public:
  explicit Turns(int64_t count) : next_bands_(count) {}

  // Waits for the turn of this band in a place, then calls f. Once a band has failed, the turns
  // after its own would never come; this then returns without calling f.
  template <class F>
  void take(int64_t place, int64_t band, const F& f) {
    while (next_bands_[place].load(std::memory_order_acquire) != band) {
      if (failed()) return;
      std::this_thread::yield();
    }
    f();
    next_bands_[place].store(band + 1, std::memory_order_release);
  }

  void fail() { failed_.store(true, std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  std::vector<std::atomic<int64_t>> next_bands_;
  std::atomic<bool> failed_{false};
};

// Runs work(memory, band) for all bands. Threads take the bands in order, so that a band whose turn
// is awaited always has a thread. make() allocates the memory of a thread, which has to come before
// other threads wait for it. An error in one thread ends all.
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

// How score gradients are split into `parts` bfloat16 parts. small: the second of two parts is
// dropped in squares whose entries are at most this large; 0: nowhere. The residuals (amx.h) are
// added to row_residuals (N,) and column_residuals (M,).
struct ScoreGradSplit {
  int64_t parts;
  float small;
  float *row_residuals, *column_residuals;
};

// The memory of one thread: the rows of a band as operands, the panel of their scores, and the
// score gradients of a block as operands.
class Band {
 public:
  // height: the rows of a band. panel_columns: the columns whose scores are in memory at once.
  // row_grads, column_grads: which gradients are computed.
  Band(const SplitSide& x, const ScoreGradSplit& split, int64_t height, int64_t panel_columns,
       bool row_grads, bool column_grads)
      : x_(x), split_(split), panel_columns_(panel_columns), column_grads_(column_grads),
        any_grads_(row_grads || column_grads), rows_(x.elements(height)),
        panel_(height * stride(panel_columns)),
        transposed_rows_(column_grads ? operand_elements(x.width, height, x.parts) : 0),
        score_grads_(any_grads_ ? 2 * operand_elements(height, kBlockColumns, split_.parts) : 0),
        score_grad_pairs_(score_grads_ + operand_elements(height, kBlockColumns, split_.parts)),
        uses_second_(ceil_div(height, kTileGroup) * ceil_div(kBlockColumns, kTileGroup)),
        row_residuals_(any_grads_ ? padded(height) * kTileSide : 0),
        column_residuals_(kBlockColumns) {
    if (any_grads_) {
      std::fill_n(static_cast<float*>(row_residuals_), padded(height) * kTileSide, 0.0f);
    }
  }

  // Packs the rows of the band, `count` rows from `first` on.
  void begin(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    const ScaledMatrix from = x_.rows(first);
    const AmxKernels& amx = amx_in_use();
    const Range strips{0, 2 * ceil_div(count, kTileGroup)};
    amx.pack(TileLayout::rows, from, count, 0, x_.width, x_.parts, rows_, strips);
    if (!column_grads_) return;
    const Range width_strips{0, 2 * ceil_div(x_.width, kTileGroup)};
    amx.pack(TileLayout::row_pairs_transposed, from, x_.width, 0, count, x_.parts,
             transposed_rows_, width_strips);
  }

  // The block of the band's columns [column, column + count), whose scores are not computed yet. It
  // begins at the start of the panel, or at its place among whole rows, or at `kept` if this is not
  // null. all: what decides the roles of all pairs of the matrix.
  Block<float> block(const Block<float>& all, int64_t column, int64_t count,
                     float* kept = nullptr) const {
    Block<float> b = all.from_row(first_).from_column(column);
    if (all.row_metrics) b.row_metrics = all.row_metrics + first_ * kRowMetrics;
    b.scores = kept ? kept : panel_ + (panel_columns_ > kBlockColumns ? column : 0);
    b.stride = stride(panel_columns_);
    b.rows = count_;
    b.columns = count;
    return b;
  }

  // Computes the scores of a block.
  void fill(const Block<float>& b, const PackedColumns& columns) const {
    const Operand left{rows_, x_.parts, x_.steps()};
    const ScoreScales scales{x_.rest(first_), columns.rest(b.column0)};
    amx_in_use().scores(left, count_, columns.score_operand(b.column0), b.columns, true, scales,
                        b.scores, b.stride, false, {0, ceil_div(b.columns, kTileGroup)});
  }

  // Packs the score gradients of a block, times the rests of its rows and columns, as operands.
  void pack_score_grads(const Block<float>& b, const PackedColumns& columns) const {
    const ScaledMatrix from{{b.scores, Dtype::float32, b.stride, 1},
                            x_.rest(first_),
                            columns.rest(b.column0)};
    const Residuals residuals{x_.norms(first_), columns.norms(b.column0), row_residuals_,
                              column_residuals_};
    std::fill_n(static_cast<float*>(column_residuals_), kBlockColumns, 0.0f);
    amx_in_use().pack_both(from, b.rows, b.columns, split_.parts, split_.small, residuals,
                           score_grads_, score_grad_pairs_, uses_second_);
  }

  // Adds the column residuals of the block whose score gradients were packed last.
  void add_column_residuals(const Block<float>& b) const {
    float* const sums = split_.column_residuals + b.column0;
    for (int64_t j = 0; j < b.columns; ++j) sums[j] += column_residuals_[j];
  }

  // Adds the row residuals of all blocks of the band, and sets them to zero for the next band.
  void add_row_residuals() const {
    for (int64_t i = 0; i < count_; ++i) {
      float* const row = row_residuals_ + i * kTileSide;
      split_.row_residuals[first_ + i] += std::accumulate(row, row + kTileSide, 0.0f);
      std::fill_n(row, kTileSide, 0.0f);
    }
  }

  // out (rows, D) = the packed score gradients times the block's columns, or += with `add`.
  void multiply_columns(const Block<float>& b, const PackedColumns& columns, float* out,
                        bool add) const {
    const int64_t steps = ceil_div(b.columns, kTileDepth);
    amx_in_use().multiply({score_grads_, split_.parts, steps, uses_second_, steps, 1}, b.rows,
                          {columns.gradient_tiles(b.column0), x_.parts, steps}, x_.width, out, add,
                          false, {0, ceil_div(x_.width, kTileGroup)});
  }

  // out (D, columns) = the transposed rows of the band times the packed score gradients, or += with
  // `add`, for some groups of the block's columns. `out` has the SquareLayout.
  void multiply_rows(const Block<float>& b, float* out, bool add, Range column_groups) const {
    const int64_t steps = ceil_div(b.rows, kTileDepth), groups = ceil_div(b.columns, kTileGroup);
    amx_in_use().multiply({transposed_rows_, x_.parts, steps}, x_.width,
                          {score_grad_pairs_, split_.parts, steps, uses_second_, 1, groups},
                          b.columns, out, add, true, column_groups);
  }

  // The stride of the rows of a panel, which is no power of two.
  static int64_t stride(int64_t columns) { return ceil_div(columns, kTileSide) * kTileSide + 16; }

 private:
  const SplitSide& x_;
  const ScoreGradSplit split_;
  const int64_t panel_columns_;
  const bool column_grads_, any_grads_;
  const Scratch<uint16_t> rows_;
  const Scratch<float> panel_;
  const Scratch<uint16_t> transposed_rows_, score_grads_;
  uint16_t* const score_grad_pairs_;  // the same score gradients in the layout `row_pairs`
  const Scratch<bool> uses_second_;  // for each square of a block
  const Scratch<float> row_residuals_, column_residuals_;
  int64_t first_ = 0, count_ = 0;
};

// The scores of all rows, band after band. The scores of a band come as blocks of some columns or
// as one block of whole rows.
class BandScores {
 public:
  // gradients: whether gradients will be computed. whole_rows: whether the scores of whole rows are
  // in memory at once. stripe: the columns that are packed at a time, a multiple of kBlockColumns;
  // whole rows have at most one stripe. kept_bytes: what packed columns and the scores that are
  // kept for a second pass over all blocks may take together.
  BandScores(const SplitSide& x, const SplitSide& y, const Block<float>& all,
             const ScoreGradSplit& split, bool gradients, bool whole_rows, int64_t stripe,
             int64_t kept_bytes)
      : x_(x), y_(y), all_(all), split_(split), stripe_(stripe),
        panel_columns_(whole_rows ? y.count : kBlockColumns),
        band_height_(band_rows(x.count, x.width, x.parts, panel_columns_)),
        kept_bands_(bands_to_keep(kept_bytes)), kept_(kept_bands_ * kept_size()) {
    STD_TORCH_CHECK(stripe > 0 && stripe % kBlockColumns == 0, "fastsim: wanted whole blocks");
    STD_TORCH_CHECK(!whole_rows || y.count <= stripe, "fastsim: wanted whole rows");
    if (y.count <= stripe) columns_.emplace(y, 0, y.count, gradients);
  }

  int64_t band_height() const { return band_height_; }  // rows of a band
  int64_t bands() const { return ceil_div(x_.count, band_height_); }
  // Whether the second pass reads the scores of the band with this row as the first pass left them.
  bool is_kept(int64_t row) const { return row < kept_bands_ * band_height_; }

  // Calls process(block, row, column) for each block, then in_turn(block, column). The calls of
  // in_turn for the same columns come in the order of their rows. If to_x (N, D) or to_y (M, D) is
  // given, `process` turns the scores into score gradients. to_x and to_y then become the products
  // of these with the unit rows of the other side, times the rests of their own rows. The part of
  // to_y of a block's columns is transposed, in the SquareLayout.
  template <class Process, class InTurn>
  void each_block(const Process& process, const InTurn& in_turn, float* to_x = nullptr,
                  float* to_y = nullptr) const {
    each_stripe(to_x || to_y, [&](const PackedColumns& stripe) {
      each_band(stripe, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
        each_part(stripe, [&](int64_t column, int64_t count) {
          float* const kept = kept_scores(index, column);
          const Block<float> b = band.block(all_, column, count, kept);
          if (!kept || !(to_x || to_y)) band.fill(b, stripe);
          process(b, index * band_height_, column);
          multiply(band, b, stripe, index, to_x, to_y, turns, [&] { in_turn(b, column); });
        });
      });
    });
  }

  // The same for whole rows: calls process(block, row) for each band.
  template <class Process>
  void each_whole_band(const Process& process, float* to_x, float* to_y) const {
    each_band(*columns_, to_x, to_y, [&](Band& band, int64_t index, Turns& turns) {
      const Block<float> rows = band.block(all_, 0, y_.count);
      band.fill(rows, *columns_);
      process(rows, index * band_height_);
      if (!to_x && !to_y) return;
      each_part(*columns_, [&](int64_t column, int64_t count) {
        const Block<float> b = band.block(all_, column, count);
        multiply(band, b, *columns_, index, to_x, to_y, turns, [] {});
      });
    });
  }

 private:
  // The sizes, in numbers, of a block of kept scores and of a band of them.
  int64_t block_size() const { return band_height_ * Band::stride(kBlockColumns); }
  int64_t kept_size() const { return ceil_div(y_.count, kBlockColumns) * block_size(); }

  bool has_residuals(const float* to_x, const float* to_y) const {
    return (to_x || to_y) && split_.small > 0;
  }

  // Where the scores of a block are kept; null: nowhere.
  float* kept_scores(int64_t band, int64_t column) const {
    if (band >= kept_bands_) return nullptr;
    return kept_ + (band * kept_size() + column / kBlockColumns * block_size());
  }

  // The number of bands whose scores are kept. None are kept of bfloat16 rows on a matrix unit,
  // which computes such scores again as fast as they are read back.
  int64_t bands_to_keep(int64_t bytes) const {
    const int64_t column_bytes = 2 * sizeof(uint16_t) * y_.elements(std::min(stripe_, y_.count));
    const int64_t room = (bytes - column_bytes) / int64_t(sizeof(float));
    if ((x_.parts == 1 && amx_in_use().most_parts > 1) || room <= 0) return 0;
    const int64_t count = std::min(bands(), room / kept_size());
    return count * kWorthKeeping >= bands() ? count : 0;
  }

  // Calls f for each stripe of packed columns.
  template <class F>
  void each_stripe(bool gradients, const F& f) const {
    if (columns_) return f(*columns_);
    for (int64_t first = 0; first < y_.count; first += stripe_) {
      f(PackedColumns(y_, first, std::min(stripe_, y_.count - first), gradients));
    }
  }

  // Calls work(band, index, turns) for each band, with its rows packed.
  template <class Work>
  void each_band(const PackedColumns& columns, float* to_x, float* to_y, const Work& work) const {
    Turns turns(ceil_div(columns.count, kBlockColumns) * kTurns);
    const auto make = [&] { return Band(x_, split_, band_height_, panel_columns_, to_x, to_y); };
    for_bands(bands(), turns, make, [&](Band& band, int64_t index) {
      band.begin(index * band_height_, std::min(band_height_, x_.count - index * band_height_));
      work(band, index, turns);
      if (has_residuals(to_x, to_y)) band.add_row_residuals();
    });
  }

  // Calls f(column, count) for the columns of each block of a stripe.
  template <class F>
  void each_part(const PackedColumns& columns, const F& f) const {
    const int64_t end = columns.first + columns.count;
    for (int64_t column = columns.first; column < end; column += kBlockColumns) {
      f(column, std::min(kBlockColumns, end - column));
    }
  }

  // Adds the products of a block's score gradients to the gradients that are given, and takes all
  // turns of the band in the block's columns; `in_turn` is called in the first.
  template <class InTurn>
  void multiply(const Band& band, const Block<float>& b, const PackedColumns& columns,
                int64_t index, float* to_x, float* to_y, Turns& turns,
                const InTurn& in_turn) const {
    const int64_t column = b.column0, width = x_.width;
    if (to_x || to_y) band.pack_score_grads(b, columns);
    if (to_x) band.multiply_columns(b, columns, to_x + index * band_height_ * width, column > 0);
    const int64_t first_place = (column - columns.first) / kBlockColumns * kTurns;
    turns.take(first_place, index, [&] {
      in_turn();
      if (has_residuals(to_x, to_y)) band.add_column_residuals(b);
    });
    for (int64_t turn = 1; to_y && turn < kTurns; ++turn) {
      const int64_t group = (turn - 1) * kGroupsOfTurn;
      turns.take(first_place + turn, index, [&] {
        band.multiply_rows(b, to_y + column * width, index > 0, {group, group + kGroupsOfTurn});
      });
    }
  }

  const SplitSide &x_, &y_;
  const Block<float> all_;
  const ScoreGradSplit split_;
  const int64_t stripe_, panel_columns_, band_height_, kept_bands_;
  const Scratch<float> kept_;
  std::optional<PackedColumns> columns_;  // all columns, if they are one stripe
};

}  // namespace
}  // namespace fastsim
