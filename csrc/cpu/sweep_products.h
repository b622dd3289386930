// The products of a sweep over prefixes (the terms: fastsim/engine/sweep.py), for all widths and
// for one part of a block at a time. So what a part has for all widths stays in L2 between the
// products that make its scores, its epilogue, and the products of its score gradients.
#pragma once

#include <vector>

#include "arguments.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {

// The rows (count, own columns) of an operand or a gradient, for each width.
template <class T>
struct OwnColumns {
  struct Rows {
    T* data;
    int64_t width;

    T* row(int64_t at) const { return data + at * width; }
  };
  std::vector<Rows> by_width;
  int64_t width = 0;  // sum of the widths

  OwnColumns(const std::vector<Tensor>& given, const char* name, int64_t widths, int64_t count) {
    STD_TORCH_CHECK(given.empty() || int64_t(given.size()) == widths, "fastsim: ", name,
                    ": wanted rows of each of ", widths, " widths, got ", given.size());
    for (const Tensor& t : given) {
      by_width.push_back({output<std::remove_const_t<T>>(t, name, count * t.size(1)), t.size(1)});
      width += t.size(1);
    }
  }
  explicit operator bool() const { return !by_width.empty(); }
};

// The part of a block with rows [row, row + rows) and columns [column, column + columns).
struct Part {
  int64_t row, rows, column, columns;
};

template <class T>
class SweepProducts {
 public:
  // An empty grad_x or grad_y is not wanted. Products are added to the gradients, but the first
  // ones are written: to grad_x if the block has the first columns of the matrix (first_columns),
  // to grad_y if it has the first rows (first_rows).
  SweepProducts(OwnColumns<const T> x, OwnColumns<const T> y, OwnColumns<T> grad_x,
                OwnColumns<T> grad_y, bool first_rows, bool first_columns, int64_t most_columns)
      : x_(std::move(x)), y_(std::move(y)), grad_x_(std::move(grad_x)),
        grad_y_(std::move(grad_y)), first_rows_(first_rows), first_columns_(first_columns),
        panel_columns_(kernels().of<T>().panel_columns),
        most_columns_(ceil_div(most_columns, panel_columns_) * panel_columns_),
        packed_(most_columns_ * x_.width) {
    const auto has_same_widths = [&](const auto& side) {
      for (size_t k = 0; k < side.by_width.size(); ++k) {
        if (!x_ || side.by_width[k].width != x_.by_width[k].width) return false;
      }
      return true;
    };
    STD_TORCH_CHECK(has_same_widths(y_) && has_same_widths(grad_x_) && has_same_widths(grad_y_),
                    "fastsim: y, grad_x, grad_y: wanted the widths of x");
  }

  // Packs columns [column, column + columns) of y, which `fill` with a range of rows reads.
  void pack(int64_t column, int64_t columns) const {
    const int64_t panels = ceil_div(columns, panel_columns_), widths = y_.by_width.size();
    over(panels * widths, panel_columns_ * y_.width / widths, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t panel = at % panels, k = at / panels;
        const auto& y = y_.by_width[k];
        kernels().of<T>().pack_panels(y.row(column), columns, y.width, packed(k),
                                      {panel, panel + 1});
      }
    });
  }

  // Computes the products of the part's rows `rows`, which are counted from the part's first row.
  // scores(k) is the address of the part's first score in the panel of width k.
  template <class ScoresOf>
  void fill(const Part& part, Range rows, const ScoresOf& scores, int64_t stride) const {
    const Range panels{0, ceil_div(part.columns, panel_columns_)};
    for (size_t k = 0; k < x_.by_width.size(); ++k) {
      const auto& x = x_.by_width[k];
      kernels().of<T>().score_panels(x.row(part.row), x.width, packed(k), part.columns, scores(k),
                                     stride, false, rows, panels, {});
    }
  }

  // Computes the products of a part that is too large for L2, from columns that are not packed.
  template <class ScoresOf>
  void fill(const Part& part, const ScoresOf& scores, int64_t stride) const {
    Block<T> b{};
    b.stride = stride;
    b.rows = part.rows;
    b.columns = part.columns;
    for (size_t k = 0; k < x_.by_width.size(); ++k) {
      const auto &x = x_.by_width[k], &y = y_.by_width[k];
      b.scores = scores(k);
      const Matrix columns = row_major<T>(y.row(part.column), y.width);
      fill_scores<T>(x.row(part.row), x.width, columns, nullptr, b, false);
    }
  }

  // Multiplies the score gradients of a part into the gradients, first of the columns and then of
  // the rows: grad_x may be the memory of x.
  template <class ScoresOf>
  void multiply(const Part& part, const ScoresOf& scores, int64_t stride) const {
    const auto& table = kernels().of<T>();
    if (grad_y_) {
      const bool add = !first_rows_ || part.row > 0;
      over_widths(part.columns, part.rows, [&](size_t k, Range columns) {
        const auto& x = x_.by_width[k];
        table.multiply_columns(scores(k), stride, part.rows, x.row(part.row), x.width,
                               grad_y_.by_width[k].row(part.column), add, columns);
      });
    }
    if (grad_x_) {
      const bool add = !first_columns_ || part.column > 0;
      over_widths(part.rows, part.columns, [&](size_t k, Range rows) {
        const auto& y = y_.by_width[k];
        const Matrix columns = row_major<T>(y.row(part.column), y.width);
        table.multiply_rows(scores(k), stride, part.columns, columns, nullptr, y.width,
                            grad_x_.by_width[k].row(part.row), add, rows);
      });
    }
  }

  // Writes the gradients of a block without rows or without columns: zeros.
  void clear(int64_t rows, int64_t columns) const {
    const auto clear_side = [](const OwnColumns<T>& side, int64_t count) {
      for (const auto& rows : side.by_width) std::fill_n(rows.data, count * rows.width, T(0));
    };
    if (first_columns_) clear_side(grad_x_, rows);
    if (first_rows_) clear_side(grad_y_, columns);
  }

  bool multiplies() const { return bool(grad_x_) || bool(grad_y_); }

 private:
  // Calls multiply(k, share) for shares of `count` rows or columns, and each width k.
  template <class F>
  void over_widths(int64_t count, int64_t depth, const F& multiply) const {
    over_tiles(count, depth * x_.width, [&](Range share) {
      for (size_t k = 0; k < x_.by_width.size(); ++k) multiply(k, share);
    });
  }

  // The memory of the packed columns of width k.
  T* packed(int64_t k) const {
    int64_t before = 0;
    for (int64_t l = 0; l < k; ++l) before += y_.by_width[l].width;
    return packed_ + most_columns_ * before;
  }

  const OwnColumns<const T> x_, y_;
  const OwnColumns<T> grad_x_, grad_y_;
  const bool first_rows_, first_columns_;
  const int64_t panel_columns_, most_columns_;
  const Scratch<T> packed_;
};

}  // namespace fastsim
