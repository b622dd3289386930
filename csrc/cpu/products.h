// The matrix products of the engine in float32 or float64, for one thread's share of the output.
// The operands are row-major, or columns packed into micro-panels. Every product is made of
// register tiles (tile.h), each summed over the whole depth of a block before it is written. So
// every output has one fixed order of summation, whatever the number of threads.
#pragma once

#include "dtypes.h"
#include "tile.h"
#include "transpose.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The depth of a block of the right operand. If a row of a tile is one cache line, the block stays
// in L1. Otherwise it stays in L2, together with the block of the left operand and the result.
constexpr int64_t kDepth = 256;
// The same for the transposed product. Without a limit by L1 it is as deep as a band of rows is
// high, so that its result, which has as many rows as the panel has columns, is read once.
constexpr int64_t kTransposedDepth = kRowFitsLine ? kDepth : 512;
// The number of columns of a panel that the transposed product packs at a time, over
// kTransposedDepth rows: 192 KB in float32.
constexpr int64_t kColumnBlock = 48 * 1024 / kTransposedDepth;

// A left operand, whose rows are divided into groups of kTileRows. Element (r, k) of group g is at
// data[g * group + r * row + k * step]. On arm64 n = kStepsPerLoad steps are loaded at once and
// have to lie side by side: there the offset of step k is k / n * n * step + k % n.
template <class T>
struct LeftOperand {
  const T* data;
  int64_t row, step, group;
};

// The rows of a row-major matrix as a left operand.
template <class T>
LeftOperand<T> left_rows(const T* data, int64_t stride) {
  return {data, stride, 1, kTileRows * stride};
}

// The number of vectors that hold `columns` numbers.
template <class T>
constexpr int64_t vectors_of(int64_t columns) {
  return (columns + kLanes<T> - 1) / kLanes<T>;
}

// Prefetches rows [begin, end) into L2. Always inline, for the reason that `prefetch_ahead` (isa.h)
// is.
template <class T>
FASTSIM_INLINE void prefetch_rows(const L2Rows<T>& l2_rows, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    for (int64_t line = 0; line < kLinesPerRow<T, kVectors>; ++line) {
      __builtin_prefetch(l2_rows.data + k * l2_rows.step + line * kNumbersPerLine<T>, 0, 2);
    }
  }
}

// Whether a block of the right operand is packed before it is multiplied with `rows` rows. For
// fewer rows, packing takes more time than it saves. Unpacked, the cache lines of the block are so
// far apart that they share a few sets of L1: 8 of 64, if a row has 384 numbers.
constexpr bool packing_pays(int64_t rows) { return kRowFitsLine && rows >= 10 * kTileRows; }

// Packs `columns` numbers of a row, as `change` returns them, and zeros up to `padded`.
// change(numbers, j): for a vector of the numbers from the index j on, or for the number at j.
template <class T, class Change>
FASTSIM_INLINE void pack_row(const T* row, int64_t columns, int64_t padded, T* packed,
                             const Change& change) {
  int64_t j = 0;
  for (; j + kLanes<T> <= columns; j += kLanes<T>) {
    put_values(change(vector_at(row + j), j), packed + j);
  }
  for (; j < padded; ++j) packed[j] = j < columns ? change(row[j], j) : T(0);
}

// Packs a block b (depth, columns) of the right operand, with rows `b_step` apart, into the
// contiguous `packed` (depth, padded). The columns after `columns` are zeros.
template <class T>
void pack_block(const T* b, int64_t b_step, int64_t columns, int64_t padded, int64_t depth,
                T* packed) {
  const auto unchanged = [](auto numbers, int64_t) { return numbers; };
  for (int64_t k = 0; k < depth; ++k, b += b_step, packed += padded) {
    pack_row(b, columns, padded, packed, unchanged);
  }
}

// Packs columns [column, column + columns) of the unit rows [row, row + depth) of y into `packed`
// (depth, kTileColumns). y has the type T, and its rows or its columns are contiguous. Zeros pad
// the last vector.
template <class T>
void pack_unit_block(const Matrix& y, const T* inverse, int64_t row, int64_t column,
                     int64_t columns, int64_t depth, T* packed) {
  constexpr int64_t wide = kTileColumns<T>;
  const int64_t padded = vectors_of<T>(columns) * kLanes<T>;
  const T* from = static_cast<const T*>(y.data) + row * y.row_stride + column * y.column_stride;
  int64_t step = y.row_stride;
  if (y.column_stride != 1) {
    transpose(from, y.column_stride, packed, wide, columns, false, int64_t(0), depth);
    from = packed;
    step = wide;
  }
  for (int64_t k = 0; k < depth; ++k, from += step, packed += wide) {
    const T factor = inverse[row + k];
    const auto times_factor = [factor](auto numbers, int64_t) { return numbers * factor; };
    pack_row(from, columns, padded, packed, times_factor);
  }
}

// Computes one column of tiles: c (+)= a b for all `rows` rows of a and `columns` <= kTileColumns
// columns of b. Tiles are whole vectors wide. b is packed into `block` (depth, kTileColumns) if
// that pays or if its last vector is not full. A b whose rows are kTileColumns apart is packed
// already, and can be read past its last column.
template <class T>
void column_of_tiles(const LeftOperand<T>& a, int64_t rows, const T* b, int64_t b_step,
                     int64_t columns, int64_t depth, T* c, int64_t c_row, bool add, T* block,
                     L2Rows<T> l2_rows = {}) {
  if (rows == 0) return;
  const int64_t vectors = vectors_of<T>(columns), padded = vectors * kLanes<T>;
  const bool full = columns == padded;
  if (b_step != kTileColumns<T> && (!full || packing_pays(rows))) {
    pack_block(b, b_step, columns, padded, depth, block);
    b = block;
    b_step = padded;
  }
  // The number of l2_rows that are prefetched before each tile. More cache lines at once would
  // stall the processor.
  constexpr int64_t kMostLines = 32;
  const int64_t rows_per_tile = min_of(kMostLines / kLinesPerRow<T, kVectors>,
                                       (l2_rows.count * kTileRows + rows - 1) / rows);
  const T* left = a.data;
  int64_t prefetched = 0;
  for (int64_t top = 0; top < rows; top += kTileRows, left += a.group) {
    const int64_t count = min_of(kTileRows, rows - top);
    const int64_t end = min_of(prefetched + rows_per_tile, l2_rows.count);
    prefetch_rows(l2_rows, prefetched, end);
    prefetched = end;
    T* out = c + top * c_row;
    if (full) {
      tile_of<T>(count, vectors, add)(left, a.row, a.step, b, b_step, depth, out, c_row);
    } else {
      T scratch[kTileRows * kTileColumns<T>];
      tile_of<T>(count, vectors, false)(left, a.row, a.step, b, b_step, depth, scratch, padded);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t j = 0; j < columns; ++j) {
          T& to = out[r * c_row + j];
          to = add ? to + scratch[r * padded + j] : scratch[r * padded + j];
        }
      }
    }
  }
}

template <class T>
struct RightBlock {
  T values[kTransposedDepth * kTileColumns<T>];
};

// Packs `count` <= kTileColumns unit rows into a micro-panel (width, kTileColumns). Row j of y
// starts at y[j], and its numbers are `step` apart. Zeros pad the last vector.
template <class T>
void pack_unit_columns(const T* y, int64_t step, const T* inverse, int64_t count, int64_t width,
                       T* packed) {
  const int64_t padded = vectors_of<T>(count) * kLanes<T>;
  const auto times_inverse = [&](auto numbers, int64_t j) {
    return numbers * values_at<decltype(numbers)>(inverse + j);
  };
  for (int64_t k = 0; k < width; ++k, y += step, packed += kTileColumns<T>) {
    pack_row(y, count, padded, packed, times_inverse);
  }
}

// Packs one micro-panel of the right operand of `score_panels`: rows [row, row + count) of y,
// transposed to (width, kTileColumns), where count <= kTileColumns. Zeros pad the last vector. With
// `inverse` each row is multiplied by its inverse norm; without it the rows are contiguous and have
// the type T. Others are first loaded into `loaded`, memory of (kTileColumns, width).
template <class T>
void pack_panel(const Matrix& y, int64_t row, int64_t count, int64_t width, const T* inverse,
                T* loaded, T* packed) {
  constexpr int64_t wide = kTileColumns<T>;
  const T* from = static_cast<const T*>(y.data) + row * y.row_stride;
  int64_t stride = y.row_stride;
  if (inverse && lies_by_columns<T>(y)) {
    return pack_unit_columns(from, y.column_stride, inverse + row, count, width, packed);
  }
  if (!lies_by_rows<T>(y)) {
    for (int64_t j = 0; j < count; ++j) load(y, row + j, 0, width, loaded + j * width);
    from = loaded;
    stride = width;
  }
  if (inverse) {
    each_transposed(from, stride, count, 0, width, [&](auto numbers, int64_t k, int64_t j) {
      put_values(numbers * values_at<decltype(numbers)>(inverse + row + j), packed + k * wide + j);
    });
  } else {
    transpose(from, stride, packed, wide, count, false, int64_t(0), width);
  }
  const int64_t end = vectors_of<T>(count) * kLanes<T>;
  if (count == end) return;
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t j = count; j < end; ++j) packed[k * wide + j] = T(0);
  }
}

// Packs y (rows, width) into micro-panels (rows / kTileColumns, width, kTileColumns). This call
// packs the micro-panels numbered `panels`.
template <class T>
void pack_panels(const T* y, int64_t rows, int64_t width, T* packed, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  const Matrix from = row_major(y, width);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    pack_panel<T>(from, at, min_of(wide, rows - at), width, nullptr, nullptr, packed + at * width);
  }
}

// scores (+)= x y^T, for the given rows of x (rows, width) and micro-panels of the packed y.
// `next`: what is read after the last micro-panel.
template <class T>
void score_panels(const T* x, int64_t width, const T* packed, int64_t columns, T* scores,
                  int64_t stride, bool add, Range rows, Range panels, const L2Rows<T>& next) {
  constexpr int64_t wide = kTileColumns<T>;
  if (width == 0) {  // a tile needs a depth of at least one
    const int64_t first = panels.begin * wide, end = min_of(panels.end * wide, columns);
    for (int64_t row = rows.begin; row < rows.end && !add; ++row) {
      for (int64_t j = first; j < end; ++j) scores[row * stride + j] = T(0);
    }
    return;
  }
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    const T* right = packed + at * width;
    const L2Rows<T> panel_below{right + wide * width, wide, width};
    const L2Rows<T>& l2_rows = panel + 1 < panels.end ? panel_below : next;
    column_of_tiles(left_rows(x + rows.begin * width, width), rows.end - rows.begin, right, wide,
                    min_of(wide, columns - at), width, scores + rows.begin * stride + at, stride,
                    add, static_cast<T*>(nullptr), l2_rows);
  }
}

// out (+)= panel y for the given rows, with panel (rows, depth) and y (depth, width), which has the
// type T and contiguous rows. With `inverse` (depth,) each row of y is first multiplied by its
// inverse norm; then the columns of y may be contiguous instead.
template <class T>
void multiply_rows(const T* panel, int64_t stride, int64_t depth, const Matrix& y, const T* inverse,
                   int64_t width, T* out, bool add, Range rows) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local RightBlock<T> block;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t block_depth = min_of(kDepth, depth - k);
    for (int64_t at = 0; at < width; at += wide) {
      const int64_t columns = min_of(wide, width - at);
      const T *y_rows = static_cast<const T*>(y.data) + k * y.row_stride, *right = y_rows + at;
      int64_t right_step = y.row_stride;
      if (inverse) {
        pack_unit_block(y, inverse, k, at, columns, block_depth, block.values);
        right = block.values;
        right_step = wide;
      }
      // The block of y that is multiplied next, and is as large as this one: the block beside it,
      // or the first one below.
      const bool beside = at + 2 * wide <= width, below = k + 2 * kDepth <= depth;
      const bool more = (beside || below) && y.column_stride == 1;
      const T* next = y_rows + (beside ? at + wide : kDepth * y.row_stride);
      column_of_tiles(left_rows(panel + rows.begin * stride + k, stride), rows.end - rows.begin,
                      right, right_step, columns, block_depth, out + rows.begin * width + at, width,
                      add || k > 0, block.values, {next, y.row_stride, more ? block_depth : 0});
    }
  }
}

// The depth of a packed left operand, rounded up to whole loads of kStepsPerLoad steps.
template <class T>
constexpr int64_t padded_steps(int64_t depth) {
  return (depth + kStepsPerLoad<T> - 1) / kStepsPerLoad<T> * kStepsPerLoad<T>;
}

// Packs the left operand of the transposed product: `columns` columns of a panel over `depth` of
// its rows. The result consists of groups of kTileRows columns, each of the shape (padded_steps /
// kStepsPerLoad, kTileRows, kStepsPerLoad). It is packed because the rows of a panel are pages
// apart.
template <class T>
void pack_columns(const T* panel, int64_t stride, int64_t columns, int64_t depth, T* packed) {
  constexpr int64_t kRowsAtOnce = 16;  // all columns of so many rows stay in cache
  constexpr int64_t per_load = kStepsPerLoad<T>;
  for (int64_t k0 = 0; k0 < depth; k0 += kRowsAtOnce) {
    const int64_t k1 = min_of(k0 + kRowsAtOnce, depth);
    for (int64_t at = 0; at < columns; at += kTileRows) {
      const T* from = panel + at;
      T* to = packed + at * padded_steps<T>(depth);
      if (per_load == 1 && columns - at >= kTileRows) {
        for (int64_t k = k0; k < k1; ++k) {
          __builtin_memcpy(to + k * kTileRows, from + k * stride, kTileRows * sizeof(T));
        }
      } else {
        const int64_t rows = min_of(kTileRows, columns - at);
        for (int64_t k = k0; k < k1; ++k) {
          T* step = to + k / per_load * per_load * kTileRows + k % per_load;
          for (int64_t r = 0; r < rows; ++r) step[r * per_load] = from[k * stride + r];
        }
      }
    }
  }
}

// The part of the panel that `multiply_columns` packs next: the next rows of the same columns or,
// after the last rows, the first rows of the next columns. Each of the last columns of tiles
// prefetches as many columns of it as a tile has. columns: those that are left, of which the first
// kColumnBlock are multiplied now, with the rows of the panel from k on and the columns of x from
// `at` on.
template <class T>
L2Rows<T> next_of_panel(const T* panel, int64_t stride, int64_t depth, Range columns, int64_t k,
                        int64_t at, int64_t width) {
  constexpr int64_t wide = kTileColumns<T>, kBlockWidth = (kColumnBlock + wide - 1) / wide * wide;
  const bool below = k + kTransposedDepth < depth;
  const int64_t offset = kBlockWidth - (width + wide - 1) / wide * wide + at;
  const int64_t ahead = columns.begin + (below ? 0 : kColumnBlock) + offset;
  const int64_t end = below ? min_of(columns.begin + kColumnBlock, columns.end) : columns.end;
  if (offset < 0 || ahead >= end) return {};
  return {panel + (below ? k + kTransposedDepth : 0) * stride + ahead, stride,
          min_of(kTransposedDepth, depth - k)};
}

// The part of the result that the next column of tiles in `multiply_columns` adds to. It lies in a
// farther cache or in main memory, and a tile can prefetch only little of it (tile.h). columns, at:
// as above.
template <class T>
L2Rows<T> next_of_result(const T* out, int64_t width, Range columns, int64_t at) {
  const int64_t beside = at + kTileColumns<T>;
  const int64_t row = columns.begin + (beside < width ? 0 : kColumnBlock);
  const int64_t count = max_of(0, min_of(kColumnBlock, columns.end - row));
  return {out + row * width + (beside < width ? beside : 0), width, count};
}

// out (+)= panel^T x for the given columns of the panel, with panel (depth, columns) and x (depth,
// width).
template <class T>
void multiply_columns(const T* panel, int64_t stride, int64_t depth, const T* x, int64_t width,
                      T* out, bool add, Range columns) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local RightBlock<T> block;
  static thread_local T packed[kTransposedDepth * kColumnBlock];
  for (int64_t first = columns.begin; first < columns.end; first += kColumnBlock) {
    const int64_t count = min_of(kColumnBlock, columns.end - first);
    for (int64_t k = 0; k < depth; k += kTransposedDepth) {
      const int64_t block_depth = min_of(kTransposedDepth, depth - k);
      pack_columns(panel + k * stride + first, stride, count, block_depth, packed);
      const LeftOperand<T> left{packed, kStepsPerLoad<T>, kTileRows,
                                kTileRows * padded_steps<T>(block_depth)};
      for (int64_t at = 0; at < width; at += wide) {
        L2Rows<T> next;  // with AVX-512, to prefetch the panel costs more time than it saves
        if constexpr (kRowFitsLine) {
          next = next_of_panel(panel, stride, depth, {first, columns.end}, k, at, width);
        } else {
          next = next_of_result(out, width, {first, columns.end}, at);
        }
        column_of_tiles(left, count, x + k * width + at, width, min_of(wide, width - at),
                        block_depth, out + first * width + at, width, add || k > 0, block.values,
                        next);
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
