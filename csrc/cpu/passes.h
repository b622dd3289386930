// The passes of the engine over raw memory, shared out over torch's threads.
#pragma once

#include <algorithm>
#include <vector>

#include "block.h"
#include "scratch.h"
#include "threads.h"

namespace fastsim {

template <class T>
void make_unit_rows(const Matrix& x, int64_t rows, int64_t width, T* unit, T* inverse) {
  over(rows, width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().unit_rows(x, width, unit, inverse, begin, end);
  });
}

template <class T>
void through_unit_rows(const T* grad_unit, const Matrix& x, int64_t rows, int64_t width,
                       const T* inverse, T factor, void* grad, Dtype dtype, T* dots) {
  over(rows, width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().unit_rows_backward(grad_unit, x, width, inverse, factor, grad, dtype, dots,
                                         begin, end);
  });
}

// The sum of all rows, (width,).
template <class T>
std::vector<double> sum_of_rows(const T* x, int64_t rows, int64_t width) {
  std::vector<double> sums(width);
  over(width, rows, [&](int64_t begin, int64_t end) {
    kernels().of<T>().column_sums(x, rows, width, sums.data(), begin, end);
  });
  return sums;
}

// Rows of the packed form of `rows` rows.
template <class T>
int64_t packed_rows(int64_t rows) {
  const int64_t wide = kernels().of<T>().panel_columns;
  return tiles(rows, wide) * wide;
}

template <class T>
void pack(const T* y, int64_t rows, int64_t width, T* packed) {
  const auto& k = kernels().of<T>();
  over(tiles(rows, k.panel_columns), k.panel_columns * width, [&](int64_t begin, int64_t end) {
    k.pack_panels(y, rows, width, packed, {begin, end});
  });
}

// Column panels that are shared out over the threads: of fewer the rows are.
constexpr int64_t kManyPanels = 16;

// The scores of a block from unit rows and packed columns, or what these add to them.
template <class T>
void fill_scores(const T* x, int64_t width, const T* packed, const Block<T>& b, bool add = false) {
  const auto& k = kernels().of<T>();
  const int64_t count = tiles(b.columns, k.panel_columns);
  const auto run = [&](Range rows, Range panels) {
    k.score_panels(x, width, packed, b.columns, b.scores, b.stride, add, rows, panels,
                   static_cast<const T*>(nullptr));
  };
  if (count >= kManyPanels) {
    share_out(count, 1, [&](int64_t begin, int64_t end) { run({0, b.rows}, {begin, end}); });
  } else {
    over_tiles(b.rows, b.columns * width, [&](Range rows) { run(rows, {0, count}); });
  }
}

// The same from columns as they came, which each thread packs a panel at a time: no memory but that
// panel's. With `inverse` each column is multiplied by its number.
template <class T>
void fill_scores(const T* x, int64_t width, const Matrix& y, const T* inverse, const Block<T>& b,
                 bool add) {
  const auto& k = kernels().of<T>();
  const int64_t wide = k.panel_columns, count = tiles(b.columns, wide), size = wide * width;
  const auto pack = [&](int64_t panel, T* unit, T* packed) {
    k.pack_panel(y, panel * wide, std::min(wide, b.columns - panel * wide), width, inverse, unit,
                 packed);
  };
  if (count < kManyPanels) {
    const Scratch<T> packed(count * size);
    over(count, size, [&](int64_t begin, int64_t end) {
      const Scratch<T> unit(inverse ? size : 0);
      for (int64_t panel = begin; panel < end; ++panel) pack(panel, unit, packed + panel * size);
    });
    fill_scores<T>(x, width, packed, b, add);
    return;
  }
  share_out(count, 1, [&](int64_t begin, int64_t end) {
    const Scratch<T> packed(size), unit(inverse ? size : 0);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t at = panel * wide, columns = std::min(wide, b.columns - at);
      pack(panel, unit, packed);
      const bool more = !inverse && at + 2 * wide <= b.columns && y.row_stride == width;
      const T* next = more ? static_cast<const T*>(y.data) + (at + wide) * width : nullptr;
      k.score_panels(x, width, packed, columns, b.scores + at, b.stride, add, {0, b.rows}, {0, 1},
                     next);
    }
  });
}

// Register tiles that a piece of the rows of a product has at least. All of the right operand passes
// through the second cache for each piece; a column of twice as many tiles asks for all that is
// multiplied next.
constexpr int64_t kTilesOfRows = 8;

// out (+)= panel right, or with `transposed` panel^T right.
template <class T>
void multiply_panel(const Block<T>& b, const T* right, int64_t width, T* out, bool transposed,
                    bool add) {
  const auto& k = kernels().of<T>();
  const int64_t count = transposed ? b.columns : b.rows, depth = transposed ? b.rows : b.columns;
  if (depth == 0 && !add) std::fill_n(out, count * width, T(0));  // the kernels go over the depth
  const auto run = transposed ? k.multiply_columns : k.multiply_rows;
  const auto multiply = [&](Range share) {
    run(b.scores, b.stride, depth, right, width, out, add, share);
  };
  over_tiles(count, depth * width, multiply, transposed ? 1 : kTilesOfRows);
}

}  // namespace fastsim
