// The products of a sweep over prefixes (fastsim/engine/sweep.py), of all widths and of a part of a
// block at a time: what a part has of every width stays in the second cache, between the products
// that make its scores, its epilogue, and the products of its score gradients.
#pragma once

#include <vector>

#include "arguments.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {

// Of each width, rows (count, own columns) of an operand or of a gradient.
template <class T>
struct OwnColumns {
  struct OfWidth {
    T* data;
    int64_t width;

    T* row(int64_t at) const { return data + at * width; }
  };
  std::vector<OfWidth> of;
  int64_t width = 0;  // of all

  OwnColumns(const std::vector<Tensor>& given, const char* name, int64_t widths, int64_t count) {
    STD_TORCH_CHECK(given.empty() || int64_t(given.size()) == widths, "fastsim: ", name,
                    ": wanted rows of each of ", widths, " widths, got ", given.size());
    for (const Tensor& t : given) {
      of.push_back({output<std::remove_const_t<T>>(t, name, count * t.size(1)), t.size(1)});
      width += t.size(1);
    }
  }
  explicit operator bool() const { return !of.empty(); }
};

// Part of a block: rows [row, row + rows) and columns [column, column + columns).
struct Part {
  int64_t row, rows, column, columns;
};

template <class T>
class SweepProducts {
 public:
  // The gradients are added to, but that grad_x is written where the block has the first columns of
  // the matrix, and grad_y where it has the first rows. Empty: not wanted.
  SweepProducts(OwnColumns<const T> x, OwnColumns<const T> y, OwnColumns<T> grad_x,
                OwnColumns<T> grad_y, bool first_rows, bool first_columns, int64_t most_columns)
      : x_(std::move(x)), y_(std::move(y)), grad_x_(std::move(grad_x)),
        grad_y_(std::move(grad_y)), first_rows_(first_rows), first_columns_(first_columns),
        wide_(kernels().of<T>().panel_columns),
        most_columns_(tiles(most_columns, wide_) * wide_), packed_(most_columns_ * x_.width) {
    const auto alike = [&](const auto& side) {
      for (size_t k = 0; k < side.of.size(); ++k) {
        if (!x_ || side.of[k].width != x_.of[k].width) return false;
      }
      return true;
    };
    STD_TORCH_CHECK(alike(y_) && alike(grad_x_) && alike(grad_y_),
                    "fastsim: y, grad_x, grad_y: wanted the widths of x");
  }

  // Packs columns, before their scores are made.
  void pack(int64_t column, int64_t columns) const {
    const int64_t panels = tiles(columns, wide_), widths = y_.of.size();
    over(panels * widths, wide_ * y_.width / widths, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t panel = at % panels, k = at / panels;
        const auto& y = y_.of[k];
        kernels().of<T>().pack_panels(y.row(column), columns, y.width, packed(k),
                                      {panel, panel + 1});
      }
    });
  }

  // The products of the rows [begin, end) of a part, whose first row is in `scores` of each width.
  template <class ScoresOf>
  void fill(const Part& part, Range rows, const ScoresOf& scores, int64_t stride) const {
    const Range panels{0, tiles(part.columns, wide_)};
    for (size_t k = 0; k < x_.of.size(); ++k) {
      const auto& x = x_.of[k];
      kernels().of<T>().score_panels(x.row(part.row), x.width, packed(k), part.columns, scores(k),
                                     stride, false, rows, panels, static_cast<const T*>(nullptr));
    }
  }

  // Those of a part that is too large for the second cache.
  template <class ScoresOf>
  void fill(const Part& part, const ScoresOf& scores, int64_t stride) const {
    Block<T> b{};
    b.stride = stride;
    b.rows = part.rows;
    b.columns = part.columns;
    for (size_t k = 0; k < x_.of.size(); ++k) {
      const auto &x = x_.of[k], &y = y_.of[k];
      b.scores = scores(k);
      const Matrix columns{y.row(part.column), kDtypeOf<T>, y.width, 1};
      fill_scores<T>(x.row(part.row), x.width, columns, nullptr, b, false);
    }
  }

  // What the score gradients of a part are to the columns, then to the rows, whose gradients may
  // take the place of the rows.
  template <class ScoresOf>
  void multiply(const Part& part, const ScoresOf& scores, int64_t stride) const {
    const auto& k_ = kernels().of<T>();
    if (grad_y_) {
      const bool add = !first_rows_ || part.row > 0;
      over_widths(part.columns, part.rows, [&](size_t k, Range columns) {
        const auto& x = x_.of[k];
        k_.multiply_columns(scores(k), stride, part.rows, x.row(part.row), x.width,
                            grad_y_.of[k].row(part.column), add, columns);
      });
    }
    if (grad_x_) {
      const bool add = !first_columns_ || part.column > 0;
      over_widths(part.rows, part.columns, [&](size_t k, Range rows) {
        const auto& y = y_.of[k];
        k_.multiply_rows(scores(k), stride, part.columns, y.row(part.column), y.width,
                         grad_x_.of[k].row(part.row), add, rows);
      });
    }
  }

  // Of a block without rows or without columns: what would be written is 0.
  void clear(int64_t rows, int64_t columns) const {
    const auto clear_side = [](const OwnColumns<T>& side, int64_t count) {
      for (const auto& of : side.of) std::fill_n(of.data, count * of.width, T(0));
    };
    if (first_columns_) clear_side(grad_x_, rows);
    if (first_rows_) clear_side(grad_y_, columns);
  }

  bool multiplies() const { return bool(grad_x_) || bool(grad_y_); }

 private:
  template <class F>
  void over_widths(int64_t count, int64_t depth, const F& multiply) const {
    over_tiles(count, depth * x_.width, [&](Range share) {
      for (size_t k = 0; k < x_.of.size(); ++k) multiply(k, share);
    });
  }

  T* packed(int64_t k) const {
    int64_t before = 0;
    for (int64_t l = 0; l < k; ++l) before += y_.of[l].width;
    return packed_ + most_columns_ * before;
  }

  const OwnColumns<const T> x_, y_;
  const OwnColumns<T> grad_x_, grad_y_;
  const bool first_rows_, first_columns_;
  const int64_t wide_, most_columns_;
  const Scratch<T> packed_;
};

}  // namespace fastsim
