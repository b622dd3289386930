// Scores of two sides of rows, a band of rows at a time, in memory for the time of a call.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

template <class T>
class Panel {
 public:
  // x (rows, width) and y (columns, width), which may be one; tall: the rows of a band.
  Panel(const T* x, int64_t rows, const T* y, int64_t columns, int64_t width, int64_t tall)
      : x_(x), y_(y), rows_(rows), columns_(columns), width_(width), tall_(std::min(rows, tall)),
        packs_once_(tall_ < rows && packing_pays()),
        packed_(packs_once_ ? packed_rows<T>(columns) * width : 0), memory_(tall_ * stride()) {
    if (packs_once_) pack<T>(y, columns, width, packed_);
  }

  // The scores of the band whose first row is `first`. all: what decides the roles of all pairs.
  Block<T> band(int64_t first, const Block<T>& all) const {
    Block<T> b = all.from_row(first);
    b.scores = memory_;
    b.stride = stride();
    b.rows = std::min(tall_, rows_ - first);
    b.columns = columns_;
    const T* x = x_ + first * width_;
    if (packs_once_) {
      fill_scores<T>(x, width_, packed_, b);
    } else {
      fill_scores<T>(x, width_, {y_, kDtypeOf<T>, width_, 1}, nullptr, b, false);
    }
    return b;
  }

 private:
  // Rows of a band from which packing the columns again for each band costs next to nothing beside
  // its product (PACK_AGAIN in fastsim/backends/cpu/workspace.py).
  static constexpr int64_t kPackAgain = 240;
  // Bytes of packed columns that are still near the processor when the next band comes.
  static constexpr int64_t kNear = 4 << 20;

  // Whether columns are packed once for all bands.
  bool packing_pays() const {
    return tall_ < kPackAgain || columns_ * width_ * int64_t(sizeof(T)) <= kNear;
  }

  // Off a power of two, for the cache's sets.
  int64_t stride() const { return columns_ + kAligned / int64_t(sizeof(T)); }

  const T *x_, *y_;
  const int64_t rows_, columns_, width_, tall_;
  const bool packs_once_;
  const Scratch<T> packed_, memory_;
};

}  // namespace fastsim
