// The passes of the engine over raw memory. Each divides its work among torch's threads.
#pragma once

#include <algorithm>
#include <vector>

#include "block.h"
#include "scratch.h"
#include "threads.h"

namespace fastsim {

// Writes 1 / |x| of each row, which has the type T, to `inverse`: 0 for a row that counts as zero.
template <class T>
void make_inverse_norms(const Matrix& x, int64_t rows, int64_t width, T* inverse) {
  over(rows, width, [&](int64_t begin, int64_t end) {
    const Scratch<T> memory(x.column_stride == 1 ? 0 : kRowGroup * width);
    kernels().of<T>().inverse_norms(x, width, memory, inverse, begin, end);
  });
}

// Writes x / |x| of each row to `unit`, and 1 / |x| to `inverse`: 0 for a row that counts as zero.
template <class T>
void make_unit_rows(const Matrix& x, int64_t rows, int64_t width, T* unit, T* inverse) {
  over(rows, width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().unit_rows(x, width, unit, inverse, begin, end);
  });
}

// The backward pass of `make_unit_rows`: writes `factor` times dL/dx to `grad`, of the given dtype,
// from grad_unit = dL/dunit. `dots` (rows,) gets the product of each unit row with its gradient.
template <class T>
void through_unit_rows(const T* grad_unit, const Matrix& x, int64_t rows, int64_t width,
                       const T* inverse, T factor, void* grad, Dtype dtype, T* dots) {
  over(rows, width, [&](int64_t begin, int64_t end) {
    kernels().of<T>().unit_rows_backward(grad_unit, x, width, inverse, factor, grad, dtype, dots,
                                         begin, end);
  });
}

// The sum of the rows of x (rows, width): (width,), in float64.
template <class T>
std::vector<double> sum_of_rows(const T* x, int64_t rows, int64_t width) {
  std::vector<double> sums(width);
  over(width, rows, [&](int64_t begin, int64_t end) {
    kernels().of<T>().column_sums(x, rows, width, sums.data(), begin, end);
  });
  return sums;
}

// The number of rows, with padding, that the packed form of `rows` rows has.
template <class T>
int64_t packed_rows(int64_t rows) {
  const int64_t wide = kernels().of<T>().panel_columns;
  return ceil_div(rows, wide) * wide;
}

// Packs the rows y (rows, width) into micro-panels, as columns of a product.
template <class T>
void pack(const T* y, int64_t rows, int64_t width, T* packed) {
  const auto& k = kernels().of<T>();
  over(ceil_div(rows, k.panel_columns), k.panel_columns * width, [&](int64_t begin, int64_t end) {
    k.pack_panels(y, rows, width, packed, {begin, end});
  });
}

// From this number of micro-panels of columns on, threads share the micro-panels of a product; with
// fewer, they share its rows.
constexpr int64_t kManyPanels = 16;

// Writes the scores of a block, unit rows x times packed columns, to the block's panel. With `add`
// it adds the products to the panel.
template <class T>
void fill_scores(const T* x, int64_t width, const T* packed, const Block<T>& b, bool add = false) {
  const auto& k = kernels().of<T>();
  const int64_t count = ceil_div(b.columns, k.panel_columns);
  const auto run = [&](Range rows, Range panels) {
    k.score_panels(x, width, packed, b.columns, b.scores, b.stride, add, rows, panels, {});
  };
  if (count >= kManyPanels) {
    share_out(count, 1, [&](int64_t begin, int64_t end) { run({0, b.rows}, {begin, end}); });
  } else {
    over_tiles(b.rows, b.columns * width, [&](Range rows) { run(rows, {0, count}); });
  }
}

// What a product prefetches of y (rows, width): the micro-panel that starts at `row` and is packed
// next, if all of it is contiguous rows or columns of the type T.
template <class T>
L2Rows<T> next_panel(const Matrix& y, int64_t row, int64_t rows, int64_t width) {
  const int64_t wide = kernels().of<T>().panel_columns;
  const bool row_major = lies_by_rows<T>(y) && y.row_stride == width;
  if (row + wide > rows || !(row_major || lies_by_columns<T>(y))) return {};
  const T* first = static_cast<const T*>(y.data) + row * y.row_stride;
  return {first, row_major ? wide : y.column_stride, width};
}

// The same for columns y that are not packed. With `inverse` each column is multiplied by its
// inverse norm. Given many micro-panels, each thread packs one at a time, so this needs no memory
// but that of the micro-panel; fewer are all packed first.
template <class T>
void fill_scores(const T* x, int64_t width, const Matrix& y, const T* inverse, const Block<T>& b,
                 bool add) {
  const auto& k = kernels().of<T>();
  const int64_t wide = k.panel_columns, count = ceil_div(b.columns, wide), size = wide * width;
  const auto pack = [&](int64_t panel, T* loaded, T* packed) {
    k.pack_panel(y, panel * wide, std::min(wide, b.columns - panel * wide), width, inverse, loaded,
                 packed);
  };
  if (count < kManyPanels) {
    const Scratch<T> packed(count * size);
    over(count, size, [&](int64_t begin, int64_t end) {
      const Scratch<T> loaded(inverse ? size : 0);
      for (int64_t panel = begin; panel < end; ++panel) pack(panel, loaded, packed + panel * size);
    });
    fill_scores<T>(x, width, packed, b, add);
    return;
  }
  share_out(count, 1, [&](int64_t begin, int64_t end) {
    const Scratch<T> packed(size), loaded(inverse ? size : 0);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t at = panel * wide, columns = std::min(wide, b.columns - at);
      pack(panel, loaded, packed);
      k.score_panels(x, width, packed, columns, b.scores + at, b.stride, add, {0, b.rows}, {0, 1},
                     next_panel<T>(y, at + wide, b.columns, width));
    }
  });
}

// The least number of register tiles in a thread's piece of the rows of a product. The whole right
// operand passes through L2 once per piece, and may be packed once per piece. A longer column of
// tiles also prefetches more of what is multiplied next.
constexpr int64_t kTilesOfRows = 16;

// out (+)= panel right. With `inverse` each row of `right` is first multiplied by its inverse norm.
// Without it the rows of `right` are contiguous, otherwise its rows or its columns.
template <class T>
void multiply_panel(const Block<T>& b, const Matrix& right, const T* inverse, int64_t width, T* out,
                    bool add) {
  if (b.columns == 0 && !add) std::fill_n(out, b.rows * width, T(0));  // the kernel writes nothing
  const auto multiply = [&](Range rows) {
    kernels().of<T>().multiply_rows(b.scores, b.stride, b.columns, right, inverse, width, out, add,
                                    rows);
  };
  over_tiles(b.rows, b.columns * width, multiply, kTilesOfRows);
}

// out (+)= panel right, or with `transposed` panel^T right.
template <class T>
void multiply_panel(const Block<T>& b, const T* right, int64_t width, T* out, bool transposed,
                    bool add) {
  if (!transposed) {
    return multiply_panel<T>(b, row_major(right, width), nullptr, width, out, add);
  }
  if (b.rows == 0 && !add) std::fill_n(out, b.columns * width, T(0));  // the kernel writes nothing
  over_tiles(b.columns, b.rows * width, [&](Range columns) {
    kernels().of<T>().multiply_columns(b.scores, b.stride, b.rows, right, width, out, add, columns);
  });
}

}  // namespace fastsim
