// x compared with itself, with all scores in memory: s_ij = s_ji, so each score is computed once
// for both pairs. The gradient sum_j (G_ij + G_ji) x_j is one product, with H = G + G^T.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

// Cuts the triangle on and above the diagonal of a square matrix into parts, and calls
// f(rows, columns) for each, in several threads at once. Parts are as wide as a micro-panel. A part
// on the diagonal is square; its mirror image lies in itself.
template <class T, class F>
void over_triangle(int64_t count, const F& f) {
  constexpr int64_t kTall = 16 * kTileRows;
  const int64_t wide = kernels().of<T>().panel_columns, panels = ceil_div(count, wide);
  // The parts of a micro-panel: one on the diagonal, and those above it.
  const auto parts_of = [&](int64_t panel) { return 1 + ceil_div(panel * wide, kTall); };
  int64_t parts = 0;
  for (int64_t panel = 0; panel < panels; ++panel) parts += parts_of(panel);
  share_out(parts, 1, [&](int64_t begin, int64_t end) {
    int64_t panel = 0, first = 0;  // the first part of the micro-panel
    for (int64_t part = begin; part < end; ++part) {
      while (part >= first + parts_of(panel)) first += parts_of(panel++);
      const Range columns{panel * wide, std::min(count, (panel + 1) * wide)};
      const int64_t row = (part - first - 1) * kTall;
      f(part == first ? columns : Range{row, std::min(row + kTall, columns.begin)}, columns);
    }
  });
}

// Writes the transpose of the part (rows, columns) of a square matrix to its mirror image.
template <class T>
void mirror(T* matrix, int64_t stride, Range rows, Range columns, bool add) {
  kernels().of<T>().transpose(matrix + rows.begin * stride + columns.begin, stride,
                              matrix + columns.begin * stride + rows.begin, stride,
                              rows.end - rows.begin, add, 0, columns.end - columns.begin);
}

// Writes the scores of rows x (b.rows, width) with themselves to the block's panel.
template <class T>
void mirrored_scores(const T* x, int64_t width, const Block<T>& b) {
  const Scratch<T> packed(packed_rows<T>(b.rows) * width);
  pack<T>(x, b.rows, width, packed);
  over_triangle<T>(b.rows, [&](Range rows, Range columns) {
    kernels().of<T>().score_panels(x, width, packed + columns.begin * width,
                                   columns.end - columns.begin, b.scores + columns.begin, b.stride,
                                   false, rows, {0, 1}, {});
    if (rows.end <= columns.begin) mirror<T>(b.scores, b.stride, rows, columns, false);
  });
}

// Replaces the score gradients G in a square panel by G + G^T.
template <class T>
void add_mirrored(const Block<T>& b) {
  over_triangle<T>(b.rows, [&](Range rows, Range columns) {
    if (rows.end <= columns.begin) {
      mirror<T>(b.scores, b.stride, columns, rows, true);
      mirror<T>(b.scores, b.stride, rows, columns, false);
      return;
    }
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      T* const row = b.scores + i * b.stride;
      for (int64_t j = rows.begin; j < i; ++j) {
        T& other = b.scores[j * b.stride + i];
        row[j] = other += row[j];
      }
      row[i] += row[i];
    }
  });
}

}  // namespace fastsim
