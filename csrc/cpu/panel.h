// The scores of two sides, one band of rows at a time. The memory of a band lives as long as the
// `Panel`.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

template <class T>
class Panel {
 public:
  // x (rows, width) and y (columns, width) may be the same rows. inverse: the inverse norms by
  // which the rows of y are multiplied, (columns,), or null: then y holds contiguous rows of T.
  // band_rows: the rows of a band. kept_rows: the scores of whole bands within the first so many
  // rows have memory of their own, so that they can be kept; the other bands share theirs with the
  // first.
  Panel(const T* x, int64_t rows, const Matrix& y, const T* inverse, int64_t columns, int64_t width,
        int64_t band_rows, int64_t kept_rows = 0)
      : x_(x), y_(y), inverse_(inverse), rows_(rows), columns_(columns), width_(width),
        band_rows_(std::min(rows, band_rows)), kept_rows_(std::min(rows, kept_rows)),
        packs_once_(!inverse && band_rows_ < rows && pack_once_pays(columns, width)),
        packed_(packs_once_ ? packed_rows<T>(columns) * width : 0),
        memory_(std::max(band_rows_, kept_rows_) * stride()) {
    if (packs_once_) pack<T>(static_cast<const T*>(y.data), columns, width, packed_);
  }

  // The most bytes of packed columns that are still in a near cache when the next band needs them
  // (CACHED in fastsim/backends/cpu/workspace.py).
  static constexpr int64_t kCached = 8 << 20;

  // Whether packing y (columns, width) once for all bands is faster than packing it again for each.
  static bool pack_once_pays(int64_t columns, int64_t width) {
    return columns * width * int64_t(sizeof(T)) <= kCached;
  }

  // Whether there are several bands, for each of which y is packed again.
  static bool packs_again(int64_t rows, int64_t band_rows, int64_t columns, int64_t width) {
    return band_rows < rows && !pack_once_pays(columns, width);
  }

  // Computes the scores of the band whose first row is `first`. all_pairs: what decides the roles
  // of all pairs of the matrix.
  Block<T> band(int64_t first, const Block<T>& all_pairs) const {
    return band(first, all_pairs, x_ + first * width_);
  }

  // The same for x, the rows of the band alone.
  Block<T> band(int64_t first, const Block<T>& all_pairs, const T* x) const {
    const Block<T> b = memory_of(first, all_pairs);
    if (packs_once_) {
      fill_scores<T>(x, width_, packed_, b);
    } else {
      fill_scores<T>(x, width_, y_, inverse_, b, false);
    }
    return b;
  }

  // The same band, whose scores are what its memory has.
  Block<T> memory_of(int64_t first, const Block<T>& all_pairs) const {
    Block<T> b = all_pairs.from_row(first);
    b.rows = std::min(band_rows_, rows_ - first);
    b.columns = columns_;
    b.stride = stride();
    b.scores = memory_ + (is_kept(first) ? first * b.stride : 0);
    return b;
  }

  // Whether the band has memory of its own.
  bool is_kept(int64_t first) const { return std::min(first + band_rows_, rows_) <= kept_rows_; }

 private:
  int64_t stride() const { return panel_stride<T>(columns_); }

  const T* const x_;
  const Matrix y_;
  const T* const inverse_;
  const int64_t rows_, columns_, width_, band_rows_, kept_rows_;
  const bool packs_once_;
  const Scratch<T> packed_, memory_;
};

}  // namespace fastsim
