// Products of bfloat16 operands with float32 sums, on the matrix unit of a processor (Intel AMX) or
// by its AVX512_BF16 instruction. A float32 operand is the sum of up to three bfloat16 parts of 8
// bits each. Three parts hold all of its 24 bits, so the number of parts decides how exact a
// product is. Plain data, shared by the registrations (amx_ops.cpp) and the kernels (amx.cpp).
#pragma once

#include <cstdint>

#include "block.h"

namespace fastsim {

// Unit rows are never in memory. Two factors of a row x, whose product is 1 / |x|, stand for them:
//
//   x / |x| = rest (power x),   power = 2^-e with |x| in [2^e, 2^(e + 1)),   rest in (0.5, 1]
//
// `power` changes only the exponent of an entry. The operand is made of power x, before the split
// into parts, and this rounds nothing of a float16 or bfloat16 row. `rest` would round, so it
// multiplies float32 numbers instead. A score is multiplied by the rests of its row and column
// (ScoreScales). A score gradient is multiplied by the same two rests (ScaledMatrix) before its
// product with power x. Such products add up to the gradient of a unit row times the rest of that
// row; SplitSide::finish divides by this rest.

constexpr int64_t kTileSide = 16;   // rows of an operand tile, which has 1 KB
constexpr int64_t kTileDepth = 32;  // depth of a tile: 16 pairs of bfloat16 numbers in each row
constexpr int64_t kTileElements = kTileSide * kTileDepth;
// Rows of a group, which are two strips of tiles. The product of a group of rows and a group of
// columns is a square of 32 x 32 sums.
constexpr int64_t kTileGroup = 2 * kTileSide;

// How a tile holds a part of a matrix. `rows`: row r of the tile holds 32 entries of row r of the
// matrix. `row_pairs`: row p of the tile holds 16 entries of rows 2p and 2p + 1 of the matrix,
// interleaved (the VNNI layout). The left operand of a product needs the first layout, the right
// operand the second. The others are these tiles transposed, as 16 x 16 pairs of numbers:
// `row_pairs_transposed` makes a left operand of the transposed matrix, `rows_transposed` a right
// one.
enum class TileLayout : int64_t { rows, rows_transposed, row_pairs, row_pairs_transposed };

// So many bfloat16 parts hold all bits of a float32.
constexpr int64_t kAllParts = 3;

// An operand of a product. It is cut into strips of 16 rows (of a right operand: 16 columns). A
// strip has `steps` tiles along its depth for each part. Tiles lie in memory as (strip, part,
// step).
struct Operand {
  const uint16_t* tiles;
  int64_t parts, steps;
  // For an operand of two parts: products of a group and a step use its second part if
  // uses_second[group * group_stride + step * step_stride]. Null: they all do.
  const bool* uses_second = nullptr;
  int64_t group_stride = 0, step_stride = 0;

  int64_t part_size() const { return steps * kTileElements; }
  int64_t strip_size() const { return parts * part_size(); }
};

// A matrix to be packed, with row i multiplied by row_scale[i] and column j by column_scale[j];
// null: 1. The scales of embeddings are the powers of their rows; those of a block of score
// gradients are the rests of its rows and of its columns.
struct ScaledMatrix {
  Matrix matrix;  // float32, float16 or bfloat16, with column stride 1
  const float *row_scale = nullptr, *column_scale = nullptr;

  // The matrix without its first `row` rows.
  ScaledMatrix from_row(int64_t row) const {
    return {matrix.from_row(row), row_scale ? row_scale + row : nullptr, column_scale};
  }
};

// The rests of the rows and of the columns of a block, which multiply its scores; null: 1.
struct ScoreScales {
  const float *rows = nullptr, *columns = nullptr;
};

// A matrix (rows, width) stored as squares of kTileGroup x kTileGroup, which are smaller at its
// edges. The squares of the same rows follow one another. A square is contiguous in memory, so that
// products are added to it in one place.
struct SquareLayout {
  int64_t rows, width;

  // The size of the square that begins at this row and column, and its offset in memory.
  int64_t square_rows(int64_t row) const {
    return rows - row < kTileGroup ? rows - row : kTileGroup;
  }
  int64_t square_columns(int64_t column) const {
    return width - column < kTileGroup ? width - column : kTileGroup;
  }
  int64_t offset(int64_t row, int64_t column) const {
    return row * width + square_rows(row) * column;
  }
};

// The residuals of score gradients whose second part is dropped. A residual is the difference
// between a score gradient and its first part, times the norm of the row that the score gradient
// multiplies. Residuals are added up by row and by column. Such a sum times a mean unit row is most
// of what a gradient lacks where all rows are nearly parallel.
struct Residuals {
  const float *row_norms, *column_norms;  // of power x: 1 / rest; zeros up to the next kTileGroup
  float* rows;     // (rows up to the next kTileGroup, 16): 16 summands for each row
  float* columns;  // (columns up to the next kTileGroup)
};

struct AmxKernels {
  const char* name;
  // The most parts of an operand for which products are faster than those of float32 numbers.
  int64_t most_parts;
  // Computes 1 / |x|, power and rest of the rows in the range. All three are 0 for a row whose norm
  // counts as 0. A row that is not finite has power 1 and rest NaN.
  void (*norms)(const Matrix& x, int64_t width, float* inverse, float* powers, float* rest, Range);
  // Packs strips of an operand, whose depth is entries [first, first + depth) of the matrix.
  // Returns false if one of them is not finite. operand_rows: all rows of the operand (of a right
  // operand: its columns).
  bool (*pack)(TileLayout, const ScaledMatrix& from, int64_t operand_rows, int64_t first,
               int64_t depth, int64_t parts, uint16_t* to, Range strips);
  // Packs a float32 block of score gradients (rows, columns) for both of its products: in the
  // layout `rows` to multiply the columns' embeddings, in the layout `row_pairs` to be multiplied
  // by the transposed embeddings of the rows. uses_second, for each square, a row of squares after
  // another: whether `small` is 0 or the absolute value of an entry is larger than `small`. In the
  // other squares the second of two parts is dropped and the residuals are added up.
  void (*pack_both)(const ScaledMatrix& from, int64_t rows, int64_t columns, int64_t parts,
                    float small, const Residuals&, uint16_t* as_rows, uint16_t* as_row_pairs,
                    bool* uses_second);
  // sums (rows,) += the dropped second parts of a left operand of two parts, each times the norm of
  // the row that it would multiply. norms: of all rows along the operand's depth.
  void (*add_dropped)(const Operand&, int64_t rows, const float* norms, float* sums);
  // sums (rows,) += the sum of a * b of each row of two float32 blocks (rows, columns).
  void (*add_row_dots)(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                       int64_t rows, int64_t columns, double* sums);
  // The largest absolute value in each square of a float32 block (rows, columns), a row of squares
  // after another.
  void (*largest_of_squares)(const Matrix& from, int64_t rows, int64_t columns, float* squares);
  // scores (rows, columns) = x y^T times the scales, or += with `add`, for some groups of columns.
  // exact: if both operands have two parts, all four products of parts are added up.
  void (*scores)(const Operand& x, int64_t rows, const Operand& y, int64_t columns, bool exact,
                 const ScoreScales&, float* scores, int64_t stride, bool add, Range groups);
  // out (rows, width) = left right, or += with `add`, for some groups of the `width` columns. Both
  // operands have the same number of steps. in_squares: `out` has the SquareLayout.
  void (*multiply)(const Operand& left, int64_t rows, const Operand& right, int64_t width,
                   float* out, bool add, bool in_squares, Range groups);
};

// The kernels of this processor. Null if it has none that pay off, or if FASTSIM_AMX=0 turns them
// off.
const AmxKernels* amx_kernels();

// For bfloat16 rows a score gradient needs only its first part if it is at most this share of the
// largest: its second part is less than 2^-9 of it. All dropped parts together are then less than
// the rounding error of the gradient of their row, or as large as that if the row has no larger
// score gradients. Where all rows are nearly parallel they would be more, but residuals make up for
// them. In panels (kSmallShare) the largest is taken over the same rows. In one call
// (kSmallInOneCall) it is the largest that an entry can be: if a row has one target, many squares
// of a few hundred rows have entries a little above 1/32 of that.
constexpr float kSmallShare = 1.0f / 32, kSmallInOneCall = 1.0f / 8;

// The depth of a block of the gradient products. Its tiles of both operands stay in cache. The sum
// of so many products is added to the result at once, and rounds the result only once.
constexpr int64_t kBlockDepth = 256;

}  // namespace fastsim
