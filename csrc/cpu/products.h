// The matrix products of the engine, single precision or double, for one thread's share of the
// output, on row-major operands, or on columns that are packed. A register tile of kTileRows x kTileColumns is
// summed over the whole depth of a block before it touches memory, so every output has one fixed
// order of summation whatever the threads.
#pragma once

#include "dtypes.h"
#include "tile.h"
#include "transpose.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Of a block of the right operand that stays in cache: in the first, or else in the second.
constexpr int64_t kDepth = kOneLine ? 256 : 512;
// Columns of a panel packed at a time, transposed product: 192 KB of them in float32.
constexpr int64_t kColumnBlock = 48 * 1024 / kDepth;

// A left operand: element (r, k) of group g lies at data[g * group + r * row + k * step], a group
// being kTileRows rows. Where n = kTogether steps are loaded at once they lie side by side: in the
// place of k * step is k / n * n * step + k % n.
template <class T>
struct Left {
  const T* data;
  int64_t row, step, group;
};

// Rows of a row-major matrix.
template <class T>
Left<T> rows_of(const T* data, int64_t stride) {
  return {data, stride, 1, kTileRows * stride};
}

// What a column of tiles leaves in the second cache: a tile's width of `depth` rows, `step` apart.
template <class T>
struct Later {
  const T* data = nullptr;
  int64_t step = 0;
};

// As few vectors as hold so many columns.
template <class T>
constexpr int64_t vectors_of(int64_t columns) {
  return (columns + kLanes<T> - 1) / kLanes<T>;
}

// Asks for rows [begin, end) of what comes later, of which each is a line. Always inline, as `ask_for`
// of isa.h.
template <class T>
FASTSIM_INLINE void ask_for(const Later<T>& later, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) __builtin_prefetch(later.data + k * later.step, 0, 2);
}

// Whether a block of the right operand is packed for so many rows; for fewer, packing takes more time
// than it saves. In a matrix its lines lie so far apart that they share few sets of the first cache:
// 8 of 64, where a row has 384 numbers.
constexpr bool packing_pays(int64_t rows) { return kOneLine && rows >= 10 * kTileRows; }

// A block of the right operand, (depth, columns), with its rows side by side: (depth, wide), zeros
// after the columns.
template <class T>
void pack_block(const T* b, int64_t b_step, int64_t columns, int64_t wide, int64_t depth, T* packed) {
  for (int64_t k = 0; k < depth; ++k, b += b_step, packed += wide) {
    int64_t j = 0;
    for (; j + kLanes<T> <= columns; j += kLanes<T>) put_vector<T>(vector_at(b + j), packed + j);
    for (; j < wide; ++j) packed[j] = j < columns ? b[j] : T(0);
  }
}

// A column of tiles: all `rows` of a against `columns` <= kTileColumns of b, in whole vectors. b is
// packed into `block` (depth, kTileColumns) where that pays, and where its last vector is not full,
// unless b is wide enough to be read past.
template <class T>
void column_of_tiles(const Left<T>& a, int64_t rows, const T* b, int64_t b_step, int64_t columns,
                     int64_t depth, T* c, int64_t c_row, bool add, T* block, Later<T> later = {}) {
  if (rows == 0) return;
  const int64_t vectors = vectors_of<T>(columns), wide = vectors * kLanes<T>;
  const bool whole = columns == wide;
  if (b_step != kTileColumns<T> && (!whole || packing_pays(rows))) {
    pack_block(b, b_step, columns, wide, depth, block);
    b = block;
    b_step = wide;
  }
  // Rows of what comes later that a tile asks for: while it is summed, or, where its own rows are one
  // line, just before.
  constexpr int64_t kMostAsked = 32;  // more at once than the processor can wait for would hold it up
  const int64_t asked_by_each = kOneLine
                                    ? smaller(kMostAsked, (depth * kTileRows + rows - 1) / rows)
                                    : (depth + kLineOf<T> - 1) / kLineOf<T>;
  const T* left = a.data;
  int64_t asked = 0;
  for (int64_t top = 0; top < rows; top += kTileRows) {
    const int64_t count = smaller(kTileRows, rows - top);
    const T* next_left = top + kTileRows < rows ? left + a.group : a.data;
    const bool asks = later.data && asked < depth;
    const Next<T> next{next_left, asks ? later.data + asked * later.step : next_left,
                       asks ? later.step : 0};
    if (kOneLine && asks) ask_for(later, asked, smaller(asked + asked_by_each, depth));
    asked += asked_by_each;
    T* out = c + top * c_row;
    if (whole) {
      tile_of<T>(count, vectors, add)(left, a.row, a.step, b, b_step, depth, out, c_row, next);
    } else {
      T scratch[kTileRows * kTileColumns<T>];
      tile_of<T>(count, vectors, false)(left, a.row, a.step, b, b_step, depth, scratch, wide, next);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t j = 0; j < columns; ++j) {
          T& to = out[r * c_row + j];
          to = add ? to + scratch[r * wide + j] : scratch[r * wide + j];
        }
      }
    }
    left = next_left;
  }
}

template <class T>
struct RightBlock {
  T values[kDepth * kTileColumns<T>];
};

// One column panel of the right operand of `score_panels`: `count` <= wide rows of y turned over,
// (width, wide), padded with zeros to whole vectors. With `inverse` each row is multiplied by its
// number first, in `unit`, memory of (wide, width).
template <class T>
void pack_panel(const Matrix& y, int64_t row, int64_t count, int64_t width, const T* inverse,
                T* unit, T* packed) {
  constexpr int64_t wide = kTileColumns<T>;
  const T* from = static_cast<const T*>(y.data) + row * y.row_stride;
  int64_t stride = y.row_stride;
  if (inverse) {
    for (int64_t j = 0; j < count; ++j) {
      T* out = unit + j * width;
      load(y, row + j, 0, width, out);
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) out[k] *= inverse[row + j];
    }
    from = unit;
    stride = width;
  }
  transpose(from, stride, packed, wide, count, false, int64_t(0), width);
  const int64_t end = vectors_of<T>(count) * kLanes<T>;
  if (count == end) return;
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t j = count; j < end; ++j) packed[k * wide + j] = T(0);
  }
}

// y (rows, width) as column panels (rows / wide, width, wide).
template <class T>
void pack_panels(const T* y, int64_t rows, int64_t width, T* packed, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  const Matrix from{y, kDtypeOf<T>, width, 1};
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    pack_panel<T>(from, at, smaller(wide, rows - at), width, nullptr, nullptr, packed + at * width);
  }
}

// scores (+)= x y^T with y packed, for the given rows of x and panels of y. `next`: what is read
// after the last of them, as much as a panel, or null.
template <class T>
void score_panels(const T* x, int64_t width, const T* packed, int64_t columns, T* scores,
                  int64_t stride, bool add, Range rows, Range panels, const T* next) {
  constexpr int64_t wide = kTileColumns<T>;
  if (width == 0) {  // a tile takes one step at least
    const int64_t first = panels.begin * wide, end = smaller(panels.end * wide, columns);
    for (int64_t row = rows.begin; row < rows.end && !add; ++row) {
      for (int64_t j = first; j < end; ++j) scores[row * stride + j] = T(0);
    }
    return;
  }
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    const T* right = packed + at * width;
    const Later<T> later{panel + 1 < panels.end ? right + wide * width : next, wide};
    column_of_tiles(rows_of(x + rows.begin * width, width), rows.end - rows.begin, right, wide,
                    smaller(wide, columns - at), width, scores + rows.begin * stride + at, stride,
                    add, static_cast<T*>(nullptr), later);
  }
}

// out (+)= panel y in the given rows, with panel (rows, depth) and y (depth, width).
template <class T>
void multiply_rows(const T* panel, int64_t stride, int64_t depth, const T* y, int64_t width,
                   T* out, bool add, Range rows) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local RightBlock<T> block;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = smaller(kDepth, depth - k);
    for (int64_t at = 0; at < width; at += wide) {
      // What is multiplied next: as wide and as deep beside this, or below it.
      const bool beside = at + 2 * wide <= width, below = k + 2 * kDepth <= depth;
      const T* next = y + k * width + (beside ? at + wide : kDepth * width);
      column_of_tiles(rows_of(panel + rows.begin * stride + k, stride), rows.end - rows.begin,
                      y + k * width + at, width, smaller(wide, width - at), deep,
                      out + rows.begin * width + at, width, add || k > 0, block.values,
                      Later<T>{beside || below ? next : nullptr, width});
    }
  }
}

// Steps of the depth that a group of a packed left operand has: whole loads.
template <class T>
constexpr int64_t whole_steps(int64_t depth) {
  return (depth + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
}

// The left operand of the transposed product: `columns` columns of a panel over `depth` of its
// rows, in groups of kTileRows, each (whole_steps / kTogether, kTileRows, kTogether). The rows of a
// panel lie pages apart.
template <class T>
void pack_columns(const T* panel, int64_t stride, int64_t columns, int64_t depth, T* packed) {
  constexpr int64_t kRows = 16;  // read at a time: all their columns stay in cache
  constexpr int64_t together = kTogether<T>;
  for (int64_t k0 = 0; k0 < depth; k0 += kRows) {
    const int64_t k1 = smaller(k0 + kRows, depth);
    for (int64_t at = 0; at < columns; at += kTileRows) {
      const T* from = panel + at;
      T* to = packed + at * whole_steps<T>(depth);
      if (together == 1 && columns - at >= kTileRows) {
        for (int64_t k = k0; k < k1; ++k) {
          __builtin_memcpy(to + k * kTileRows, from + k * stride, kTileRows * sizeof(T));
        }
      } else {
        const int64_t rows = smaller(kTileRows, columns - at);
        for (int64_t k = k0; k < k1; ++k) {
          T* step = to + k / together * together * kTileRows + k % together;
          for (int64_t r = 0; r < rows; ++r) step[r * together] = from[k * stride + r];
        }
      }
    }
  }
}

// out (+)= panel^T x in the given columns of the panel, with panel (depth, columns) and x (depth, width).
template <class T>
void multiply_columns(const T* panel, int64_t stride, int64_t depth, const T* x, int64_t width,
                      T* out, bool add, Range columns) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local RightBlock<T> block;
  static thread_local T packed[kDepth * kColumnBlock];
  for (int64_t first = columns.begin; first < columns.end; first += kColumnBlock) {
    const int64_t count = smaller(kColumnBlock, columns.end - first);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t deep = smaller(kDepth, depth - k);
      pack_columns(panel + k * stride + first, stride, count, deep, packed);
      const Left<T> left{packed, kTogether<T>, kTileRows, kTileRows * whole_steps<T>(deep)};
      for (int64_t at = 0; at < width; at += wide) {
        // The last columns of tiles ask for what is packed next, as wide as they are: what is below
        // this, or then beside it.
        constexpr int64_t kAsking = (kColumnBlock + wide - 1) / wide * wide;
        const int64_t asked = kAsking - (width + wide - 1) / wide * wide + at;
        const bool below = k + kDepth < depth;
        const int64_t ahead = (below ? first : first + kColumnBlock) + asked;
        const bool more = asked >= 0 && ahead < (below ? first + count : columns.end);
        const T* next = panel + (below ? k + kDepth : 0) * stride + ahead;
        column_of_tiles(left, count, x + k * width + at, width, smaller(wide, width - at), deep,
                        out + first * width + at, width, add || k > 0, block.values,
                        Later<T>{more ? next : nullptr, stride});
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
