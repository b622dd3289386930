// The two sides of a matrix of scores as operands of a matrix unit: the rows of one, and the rows of
// the other, a stripe of which is columns at a time.
#pragma once

#include "amx_operands.h"

namespace fastsim {
namespace {

// One side of the scores: its rows as they came, and the factors that make unit rows of them
// (amx.h), which without `cosine` are 1.
class SplitSide {
 public:
  SplitSide(const Tensor& x, int64_t parts, bool cosine)
      : count(x.size(0)), width(x.size(1)), parts(parts), from_(packed_matrix(x)),
        memory_(3 * count + padded(count)), inverse_(memory_), powers_(inverse_ + count),
        rest_(powers_ + count), norms_(rest_ + count), to_unit_(cosine ? rest_ : inverse_),
        cosine_(cosine) {
    over(count, width, [&](int64_t begin, int64_t end) {
      amx_in_use().norms(from_.matrix, width, inverse_, powers_, rest_, {begin, end});
    });
    norms_of_operand(to_unit_, count, norms_);
    if (!cosine) std::fill_n(powers_, 2 * count, 1.0f);  // with the rests: rows as they are
  }

  int64_t steps() const { return tiles(width, kTileDepth); }
  int64_t elements(int64_t rows) const { return operand_elements(rows, width, parts); }

  // Of the rows from `first` on.
  Packed rows(int64_t first) const {
    return {from_.matrix.from_row(first), powers_ + first, nullptr};
  }
  const float* rest(int64_t first) const { return rest_ + first; }
  // Of (power x), and zeros after the last up to the next kTileGroup.
  const float* norms(int64_t first) const { return norms_ + first; }

  // dL/dx of rows in the place of what `BandScores` adds up, dL/d(unit row) times the row's rest, to
  // which residuals (rows,) times the mean row (D,) of the other side belong; null where there are
  // none. dots: row_i . drow_i.
  void finish(float* grad, const float* residuals, const float* mean, int64_t first, int64_t rows,
              double* dots) const {
    for (int64_t i = 0; i < rows; ++i) {
      const float left = residuals ? residuals[i] : 0, norm = cosine_ ? norms(first)[i] : 1;
      float* row = grad + i * width;
      if (residuals) {
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row[k] = (row[k] + left * mean[k]) * norm;
      } else if (cosine_) {
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row[k] *= norm;
      }
    }
    if (!cosine_) return multiply_by_rows(grad, first, rows, dots);
    const Scratch<float> along(rows);
    kernels().of<float>().unit_rows_backward(grad, from_.matrix.from_row(first), width,
                                             inverse_ + first, 1.0f, grad, Dtype::float32, along, 0,
                                             rows);
    std::copy_n(static_cast<float*>(along), rows, dots);
  }

  // A mean of the unit rows (D,).
  void mean(float* mean) const { mean_row({from_.matrix, powers_}, to_unit_, count, width, mean); }

  const int64_t count, width, parts;

 private:
  void multiply_by_rows(const float* grad, int64_t first, int64_t rows, double* dots) const {
    const Scratch<float> row(width);
    for (int64_t i = 0; i < rows; ++i, grad += width) {
      const int64_t at = first + i;
      kernels().of<float>().token_rows(from_.matrix, &at, 1, width, false, row);
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(grad[k]);
      dots[i] = dot;
    }
  }

  const Packed from_;
  const Scratch<float> memory_;
  float *const inverse_, *const powers_, *const rest_, *const norms_;
  const float* const to_unit_;  // what makes unit rows of (power x)
  const bool cosine_;
};

// What a stripe of columns is as operands: of scores, and with `products` of gradients too. In one
// piece of memory, which of a large one no thread keeps.
class Columns {
 public:
  // Columns [first, first + count) of y; `first` is a multiple of kBlockDepth.
  Columns(const SplitSide& y, int64_t first, int64_t count, bool products)
      : first(first), count(count), y_(y), size_(y.elements(count)),
        tiles_(products ? 2 * size_ : size_) {
    const Packed from = y.rows(first);
    pack_all(Pack::rows_transposed, from, count, 0, y.width, y.parts, tiles_);
    if (products) pack_right(from, count, y.width, y.parts, tiles_ + size_);
  }

  // Of the columns from `column` on, a multiple of 32 of the matrix.
  Operand of_scores(int64_t column) const {
    const int64_t at = (column - first) * y_.parts * y_.steps() * kTileDepth;
    return {tiles_ + at, y_.parts, y_.steps()};
  }
  // Of a block.
  const uint16_t* of_gradients(int64_t column) const {
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

// Both sides of scores that are products of operands, and nothing else is.
class SplitSides {
 public:
  SplitSides(const Tensor& x, const Tensor& y, int64_t parts, bool cosine)
      : rows_(x, parts, cosine), columns_(y, parts, cosine),
        packed_(columns_, 0, columns_.count, false) {}

  // Memory for so many rows, and what is packed there of those from `first` on.
  int64_t elements(int64_t rows) const { return rows_.elements(rows); }
  void pack(int64_t first, int64_t rows, uint16_t* to) const {
    const Range strips{0, 2 * tiles(rows, kTileGroup)};
    amx_in_use().pack(Pack::rows, rows_.rows(first), rows, 0, rows_.width, rows_.parts, to, strips);
  }

  // The scores of these rows with the columns [begin, end), of which `begin` is the first of a tile.
  void score(const uint16_t* packed, int64_t first, int64_t rows, int64_t begin, int64_t end,
             float* scores, int64_t stride) const {
    const Operand left{packed, rows_.parts, rows_.steps()};
    const int64_t columns = end - begin;
    amx_in_use().scores(left, rows, packed_.of_scores(begin), columns, true,
                        {rows_.rest(first), packed_.rest(begin)}, scores, stride, false,
                        {0, tiles(columns, kTileGroup)});
  }

  // The scores of rows from `first` on with all columns.
  void score_rows(int64_t first, int64_t rows, float* scores, int64_t stride) const {
    const Scratch<uint16_t> packed(elements(rows));
    pack(first, rows, packed);
    score(packed, first, rows, 0, columns_.count, scores, stride);
  }

 private:
  const SplitSide rows_, columns_;
  const Columns packed_;
};

}  // namespace
}  // namespace fastsim
