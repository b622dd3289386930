// The columns of a matrix of cosines: the rows of y as unit rows, packed for products, and the sum
// of these unit rows.
#pragma once

#include <vector>

#include "passes.h"
#include "scratch.h"

namespace fastsim {

template <class T>
class UnitColumns {
 public:
  // packs: whether `score` will be called.
  UnitColumns(const Tensor& y, bool packs)
      : count(y.size(0)), width(y.size(1)), from(matrix(y)), sum(width), inverse_(count),
        packed_(packs ? packed_rows<T>(count) * width : 0) {
    const auto& k = kernels().of<T>();
    const int64_t wide = k.panel_columns, panels = ceil_div(count, wide);
    const Scratch<double> sums(panels * width);
    over(panels, wide * width, [&](int64_t begin, int64_t end) {
      const Scratch<T> unit(wide * width);
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t first = panel * wide, rows = std::min(wide, count - first);
        k.unit_rows(from.from_row(first), width, unit, inverse_ + first, 0, rows);
        k.column_sums(unit, rows, width, sums + panel * width, 0, width);
        if (packs) k.pack_panels(unit, rows, width, packed_ + first * width, {0, 1});
      }
    });
    const std::vector<double> all = sum_of_rows<double>(sums, panels, width);
    sum.assign(all.begin(), all.end());
  }

  // Writes the scores of the unit rows x (rows, width) with the columns [begin, end), in the
  // calling thread. `begin` is the first column of a micro-panel.
  void score(const T* x, int64_t rows, int64_t begin, int64_t end, T* scores,
             int64_t stride) const {
    const auto& k = kernels().of<T>();
    const T* next = end < count ? packed_ + end * width : nullptr;
    k.score_panels(x, width, packed_ + begin * width, end - begin, scores, stride, false, {0, rows},
                   {0, ceil_div(end - begin, k.panel_columns)}, {next, k.panel_columns});
  }

  const T* inverse() const { return inverse_; }

  const int64_t count, width;
  const Matrix from;
  std::vector<T> sum;  // of the unit rows, (width,)

 private:
  const Scratch<T> inverse_, packed_;
};

}  // namespace fastsim
