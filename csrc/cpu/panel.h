// The scores of two sides, one band of rows at a time. The memory of a band lives as long as the
// `Panel`.
#pragma once

#include "passes.h"
#include "scratch.h"
#include "side.h"

namespace fastsim {

// The columns of the scores of all bands: packed once, if that pays, or again for each band.
template <class T>
class PanelColumns {
 public:
  // y (count, width). inverse: the inverse norms by which the rows of y are multiplied, (count,),
  // or null: then y holds contiguous rows of T. several_bands: whether there is more than one band.
  PanelColumns(const Matrix& y, const T* inverse, int64_t count, int64_t width, bool several_bands)
      : y_(y), inverse_(inverse), width_(width),
        packs_once_(!inverse && several_bands && pack_once_pays(count, width)),
        packed_(packs_once_ ? packed_rows<T>(count) * width : 0) {
    if (packs_once_) pack<T>(static_cast<const T*>(y.data), count, width, packed_);
  }
  PanelColumns(const Side<T>& y, bool several_bands)
      : PanelColumns(y.operand(), y.inverse(), y.count, y.width, several_bands) {}

  // The most bytes of packed columns that are still in a near cache when the next band needs them
  // (CACHED in fastsim/backends/cpu/workspace.py).
  static constexpr int64_t kCached = 8 << 20;

  // Whether packing y (count, width) once for all bands is faster than packing it again for each.
  static bool pack_once_pays(int64_t count, int64_t width) {
    return count * width * int64_t(sizeof(T)) <= kCached;
  }

  // The most bytes of unit rows that only save time: as many as a panel has (BAND in
  // fastsim/backends/cpu/sizes.py).
  static constexpr int64_t kMostUnitRows = 32 << 20;

  // Whether columns (count, width) are multiplied by their inverse norms while they are packed, so
  // that no unit rows are in memory. That costs no time if they are packed anyway. For the scores
  // they are packed once or for each band, for the gradient of the rows by some instruction sets.
  static bool is_lazy(int64_t count, int64_t width, bool several_bands, bool with_gradient) {
    const bool again = several_bands && !pack_once_pays(count, width);
    if (!with_gradient) return again || !several_bands;
    const bool few = count * width * int64_t(sizeof(T)) <= kMostUnitRows;
    return again && !(few && kernels().of<T>().reads_unpacked);
  }

  // Sets the scores of a block to the products of the unit rows x with all columns.
  void fill(const T* x, const Block<T>& b) const {
    if (packs_once_) return fill_scores<T>(x, width_, packed_, b);
    fill_scores<T>(x, width_, y_, inverse_, b, false);
  }

 private:
  const Matrix y_;
  const T* const inverse_;
  const int64_t width_;
  const bool packs_once_;
  const Scratch<T> packed_;
};

template <class T>
class Panel {
 public:
  // x (rows, width) and y (columns, width) may be the same rows. inverse: as for PanelColumns.
  // band_rows: the rows of a band. kept_rows: the scores of whole bands within the first so many
  // rows have memory of their own, so that they can be kept; the other bands share theirs with the
  // first.
  Panel(const T* x, int64_t rows, const Matrix& y, const T* inverse, int64_t columns, int64_t width,
        int64_t band_rows, int64_t kept_rows = 0)
      : x_(x), rows_(rows), columns_(columns), width_(width), band_rows_(std::min(rows, band_rows)),
        kept_rows_(std::min(rows, kept_rows)),
        packed_columns_(y, inverse, columns, width, band_rows_ < rows),
        memory_(std::max(band_rows_, kept_rows_) * stride()) {}

  // Computes the scores of the band whose first row is `first`. all_pairs: what decides the roles
  // of all pairs of the matrix.
  Block<T> band(int64_t first, const Block<T>& all_pairs) const {
    return band(first, all_pairs, x_ + first * width_);
  }

  // The same for x, the rows of the band alone.
  Block<T> band(int64_t first, const Block<T>& all_pairs, const T* x) const {
    const Block<T> b = memory_of(first, all_pairs);
    packed_columns_.fill(x, b);
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
  const int64_t rows_, columns_, width_, band_rows_, kept_rows_;
  const PanelColumns<T> packed_columns_;
  const Scratch<T> memory_;
};

}  // namespace fastsim
