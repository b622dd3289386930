// Products of bfloat16 operands with float32 sums, on the matrix unit of a processor (Intel AMX) or
// by its AVX512_BF16 instruction. A float32 operand is the sum of up to three bfloat16 parts of 8 bits
// each, which hold all of its 24, so that a product of parts is as exact as it is asked to be. Plain
// data: shared by the registrations (amx_ops.cpp) and the kernels (amx.cpp).
#pragma once

#include <cstdint>

#include "block.h"

namespace fastsim {

// Unit rows are never made. Of a row x two factors, whose product is 1 / |x|, make it one:
//
//   x / |x| = rest (power x),   power = 2^-e with |x| in [2^e, 2^(e + 1)),   rest in (0.5, 1]
//
// `power` changes no bit of an entry but its exponent: it goes into the operand (Packed), before the
// split into parts, and rounds nothing of a float16 or bfloat16 row. `rest` would round, so it
// multiplies what is float32: scores, by the rests of their row and column (ScoreScales), and score
// gradients, by both again, before the products with power x (Packed of a block). What these add up
// to is the gradient of a unit row times the row's own rest, which SplitSide::finish divides out.

constexpr int64_t kTileSide = 16;   // rows of an operand tile of 1 KB
constexpr int64_t kTileDepth = 32;  // its depth: pairs of bfloat16 in each of 16 columns
constexpr int64_t kTileElements = kTileSide * kTileDepth;
constexpr int64_t kTileGroup = 2 * kTileSide;  // rows and columns of the output of one block

// Which bit patterns an operand's tiles hold. `rows`: row r of the tile is row r of the matrix, 32
// of its columns. `pairs`: row p of the tile is rows 2p and 2p + 1 of the matrix, their 16 columns
// in turns. The transposed ones exchange the rows of a tile for its pairs.
enum class Pack : int64_t { rows, rows_transposed, pairs, pairs_transposed };

// A product's operand: strips of 16 rows (or columns) and `steps` tiles of depth, by part.
// Tiles lie as (strip, part, step).
struct Operand {
  const uint16_t* tiles;
  int64_t parts, steps;
  // Of two parts, whether the second counts: that of kTileGroup rows (or columns) and one step is
  // second[group * next_group + step * next_step]. Null: everywhere.
  const bool* second = nullptr;
  int64_t next_group = 0, next_step = 0;

  int64_t part() const { return steps * kTileElements; }
  int64_t strip() const { return parts * part(); }
};

// What is packed: row i of the matrix times row_scale[i], column j times column_scale[j]; null: 1.
// Of rows the scale is their power; of a block of score gradients it is the rests of its rows and
// columns.
struct Packed {
  Matrix matrix;  // float32, float16 or bfloat16, its columns side by side
  const float *row_scale = nullptr, *column_scale = nullptr;

  // The same without its first rows.
  Packed from_row(int64_t row) const {
    return {matrix.from_row(row), row_scale ? row_scale + row : nullptr, column_scale};
  }
};

// What the scores of a block are multiplied by, the rests of its rows and columns; null for 1.
struct ScoreScales {
  const float *rows = nullptr, *columns = nullptr;
};

// A matrix (rows, width) as blocks of kTileGroup rows and columns, or what is left of these, one
// after another along its rows: what is added to a block then lies together.
struct InBlocks {
  int64_t rows, width;

  // The size of the block that begins at a row and a column; where it lies.
  int64_t tall(int64_t row) const { return rows - row < kTileGroup ? rows - row : kTileGroup; }
  int64_t wide(int64_t at) const { return width - at < kTileGroup ? width - at : kTileGroup; }
  int64_t place(int64_t row, int64_t at) const { return row * width + tall(row) * at; }
};

// Where second parts of a block of score gradients are left out, what their first parts leave of each
// entry is added up by row and by column, times the norm of the row that it would multiply: that sum
// times a mean unit row is most of what a gradient lacks where all rows are nearly parallel.
struct Residuals {
  const float *row_norms, *column_norms;  // of power x: 1 / rest, and zeros up to the next kTileGroup
  float* rows;     // (rows to the next kTileGroup, 16): the sum of the 16 is that of the row
  float* columns;  // (columns to the next kTileGroup)
};

struct AmxKernels {
  const char* name;
  int64_t most_parts;  // of an operand whose products take less time than those of float32 numbers
  // For rows [begin, end): 1 / |x|; power and rest. All 0 for a row of norm 0; a row that is not
  // finite has power 1 and rest NaN.
  void (*norms)(const Matrix& x, int64_t width, float* inverse, float* powers, float* rest, Range);
  // Packs the strips [strips) of a matrix, whose depth begins at `first` and has `depth` entries;
  // false if one of them is not finite.
  bool (*pack)(Pack, const Packed& from, int64_t strip_count, int64_t first, int64_t depth,
               int64_t parts, uint16_t* to, Range strips);
  // Packs a float32 block (rows, columns) for both of its products: as `rows` for those with its
  // columns, as `pairs` for those of its columns with what has its rows. second: for each square of
  // kTileGroup, a row of squares after another, whether one of its entries is larger than `small`, or
  // that is 0: of two parts the second is left out where none is, and added to the residuals.
  void (*pack_both)(const Packed& from, int64_t rows, int64_t columns, int64_t parts, float small,
                    const Residuals&, uint16_t* as_rows, uint16_t* as_pairs, bool* second);
  // sums (rows,) += the second parts of an operand of two that are left out, each times the norm of
  // the row that it would multiply (norms: of all its depth).
  void (*add_left_out)(const Operand&, int64_t rows, const float* norms, float* sums);
  // The largest size of an entry of each square of kTileGroup of a float32 block, a row of squares
  // after another.
  void (*largest_of_squares)(const Matrix& from, int64_t rows, int64_t columns, float* squares);
  // scores = x y^T, with `add` added to them: all strips of x against the groups of columns
  // [groups). `exact`: all products of parts.
  void (*scores)(const Operand& x, int64_t rows, const Operand& y, int64_t columns, bool exact,
                 const ScoreScales&, float* scores, int64_t stride, bool add, Range groups);
  // out (rows, width) (+)= left right, for as many steps of depth of both; `left` packed as rows,
  // `right`, which has width columns, as pairs, of which the groups [groups) are taken. in_blocks:
  // `out` lies as InBlocks.
  void (*multiply)(const Operand& left, int64_t rows, const Operand& right, int64_t width,
                   float* out, bool add, bool in_blocks, Range groups);
};

// Null where the processor has none that pay, or FASTSIM_AMX=0 turns them off.
const AmxKernels* amx_kernels();

// A score gradient of bfloat16 rows does with one part where it is no larger a share of the largest
// than this: the second is less than 2^-9 of it. What is left out of all that are so small is less
// than what the rounding of a row's gradient leaves out, or the row has no larger ones; then it is as
// much. Residuals see to rows that are all nearly parallel, of whose gradient it would be more. In
// panels the largest is that of the same rows. In one call it is the largest that an entry can be, of
// which many squares of a few hundred rows have a little more than 1/32, where a row has one target.
constexpr float kSmallShare = 1.0f / 32, kSmallInOneCall = 1.0f / 8;

// Depth of a block of the gradient products: both operands' share of it stays in cache. What a sum
// of so many products is added to rounds once for all of them.
constexpr int64_t kBlockDepth = 256;

}  // namespace fastsim
