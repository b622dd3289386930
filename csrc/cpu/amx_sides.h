// The two sides of a score matrix as bfloat16 operands. One side has the rows; the other has the
// columns, of which a stripe is packed at a time.
#pragma once

#include "amx_operands.h"

namespace fastsim {
namespace {

// One side of a score matrix: its rows in the caller's memory, and the factors that make them unit
// rows (amx.h). Without `cosine` the factors power and rest are 1.
class SplitSide {
 public:
  SplitSide(const Tensor& x, int64_t parts, bool cosine)
      : count(x.size(0)), width(x.size(1)), parts(parts), from_(scaled_matrix(x)),
        memory_(3 * count + padded(count)), inverse_(memory_), powers_(inverse_ + count),
        rest_(powers_ + count), norms_(rest_ + count), to_unit_(cosine ? rest_ : inverse_),
        cosine_(cosine) {
    over(count, width, [&](int64_t begin, int64_t end) {
      amx_in_use().norms(from_.matrix, width, inverse_, powers_, rest_, {begin, end});
    });
    norms_of_operand(to_unit_, count, norms_);
    if (!cosine) std::fill_n(powers_, 2 * count, 1.0f);  // powers_ and rest_
  }

  int64_t steps() const { return ceil_div(width, kTileDepth); }
  // The number of elements of an operand of so many rows.
  int64_t elements(int64_t rows) const { return operand_elements(rows, width, parts); }

  // The rows from `first` on, to be packed times their powers.
  ScaledMatrix rows(int64_t first) const {
    return {from_.matrix.from_row(first), powers_ + first, nullptr};
  }
  const float* rest(int64_t first) const { return rest_ + first; }
  // The norms of the rows of power x from `first` on. Zeros follow up to the next kTileGroup.
  const float* norms(int64_t first) const { return norms_ + first; }

  // Replaces the sums that `BandScores` has left in `grad` (rows, D), for rows from `first` on, by
  // dL/dx. Such a sum is dL/d(unit row) times the row's rest, without the dropped second parts.
  // For these, residuals (rows,) times the mean row (D,) of the other side are added; null: no part
  // is dropped. dots (rows,): the product of each unit row (without `cosine`, of each row) with its
  // gradient.
  void finish(float* grad, const float* residuals, const float* mean, int64_t first, int64_t rows,
              double* dots) const {
    for (int64_t i = 0; i < rows; ++i) {
      const float residual = residuals ? residuals[i] : 0;
      const float norm = cosine_ ? norms(first)[i] : 1;
      float* row = grad + i * width;
      if (residuals) {
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row[k] = (row[k] + residual * mean[k]) * norm;
      } else if (cosine_) {
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row[k] *= norm;
      }
    }
    if (!cosine_) return multiply_by_rows(grad, first, rows, dots);
    const Scratch<float> float_dots(rows);
    kernels().of<float>().unit_rows_backward(grad, from_.matrix.from_row(first), width,
                                             inverse_ + first, 1.0f, grad, Dtype::float32,
                                             float_dots, 0, rows);
    std::copy_n(static_cast<float*>(float_dots), rows, dots);
  }

  // Writes a mean (D,) of the unit rows.
  void mean(float* mean) const { mean_row({from_.matrix, powers_}, to_unit_, count, width, mean); }

  const int64_t count, width, parts;

 private:
  // dots (rows,): the products of rows with their gradients.
  void multiply_by_rows(const float* grad, int64_t first, int64_t rows, double* dots) const {
    const Scratch<float> row(width);
    for (int64_t i = 0; i < rows; ++i, grad += width) {
      const int64_t number = first + i;
      kernels().of<float>().token_rows(from_.matrix, &number, 1, width, false, row);
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(grad[k]);
      dots[i] = dot;
    }
  }

  const ScaledMatrix from_;
  const Scratch<float> memory_;
  float *const inverse_, *const powers_, *const rest_, *const norms_;
  const float* const to_unit_;  // the factors from power x to unit rows
  const bool cosine_;
};

// A stripe of columns as right operands: of scores, and with `for_gradients` of the gradient
// products too. They share one piece of memory.
class PackedColumns {
 public:
  // Columns [first, first + count) of y; `first` is a multiple of kBlockDepth.
  PackedColumns(const SplitSide& y, int64_t first, int64_t count, bool for_gradients)
      : first(first), count(count), y_(y), size_(y.elements(count)),
        tiles_(for_gradients ? 2 * size_ : size_) {
    const ScaledMatrix from = y.rows(first);
    pack_all(TileLayout::rows_transposed, from, count, 0, y.width, y.parts, tiles_);
    if (for_gradients) pack_right(from, count, y.width, y.parts, tiles_ + size_);
  }

  // The operand of scores with the columns from `column` of the matrix on, a multiple of 32.
  Operand score_operand(int64_t column) const {
    const int64_t offset = (column - first) * y_.parts * y_.steps() * kTileDepth;
    return {tiles_ + offset, y_.parts, y_.steps()};
  }
  // The tiles of a gradient product with the block of columns that begins at `column`, a multiple
  // of kBlockDepth.
  const uint16_t* gradient_tiles(int64_t column) const {
    return tiles_ + size_ + operand_elements(y_.width, column - first, y_.parts);
  }
  const float* rest(int64_t column) const { return y_.rest(column); }
  const float* norms(int64_t column) const { return y_.norms(column); }

  const int64_t first, count;

 private:
  const SplitSide& y_;
  const int64_t size_;
  const Scratch<uint16_t> tiles_;
};

// Both sides of a score matrix of which only scores are needed, no gradients. All columns stay
// packed.
class SplitSides {
 public:
  SplitSides(const Tensor& x, const Tensor& y, int64_t parts, bool cosine)
      : rows_(x, parts, cosine), columns_(y, parts, cosine),
        packed_(columns_, 0, columns_.count, false) {}

  // The number of elements of an operand of so many rows.
  int64_t elements(int64_t rows) const { return rows_.elements(rows); }
  // Packs so many rows from `first` on.
  void pack(int64_t first, int64_t rows, uint16_t* to) const {
    const Range strips{0, 2 * ceil_div(rows, kTileGroup)};
    amx_in_use().pack(TileLayout::rows, rows_.rows(first), rows, 0, rows_.width, rows_.parts, to,
                      strips);
  }

  // Computes the scores of packed rows, the first of which is row `first`, with columns
  // [begin, end); `begin` is a multiple of 32.
  void score(const uint16_t* packed, int64_t first, int64_t rows, int64_t begin, int64_t end,
             float* scores, int64_t stride) const {
    const Operand left{packed, rows_.parts, rows_.steps()};
    const int64_t columns = end - begin;
    amx_in_use().scores(left, rows, packed_.score_operand(begin), columns, true,
                        {rows_.rest(first), packed_.rest(begin)}, scores, stride, false,
                        {0, ceil_div(columns, kTileGroup)});
  }

  // Packs rows from `first` on, and computes their scores with all columns.
  void score_rows(int64_t first, int64_t rows, float* scores, int64_t stride) const {
    const Scratch<uint16_t> packed(elements(rows));
    pack(first, rows, packed);
    score(packed, first, rows, 0, columns_.count, scores, stride);
  }

 private:
  const SplitSide rows_, columns_;
  const PackedColumns packed_;
};

}  // namespace
}  // namespace fastsim
