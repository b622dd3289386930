// Scores of the same pairs by other embeddings than those of the loss, one band of rows at a time.
#pragma once

#include "panel.h"
#include "row_losses.h"

namespace fastsim {
namespace {

// The embeddings are a guide's, or the factors of the targets. The unit rows of a band are made for
// it, and those of many columns for each band.
template <class T>
class OtherPanel {
 public:
  OtherPanel(const Tensor& rows, const Tensor& columns, bool cosine, int64_t band_rows)
      : rows_(matrix(rows)), width_(rows.size(1)), cosine_(cosine),
        columns_(columns, width_, cosine, nullptr,
                 PanelColumns<T>::is_lazy(columns.size(0), width_, band_rows < rows.size(0),
                                          false)),
        panel_(nullptr, rows.size(0), columns_.operand(), columns_.inverse(), columns_.count,
               width_, band_rows) {}

  OtherScores<T> band(int64_t first) const {
    const int64_t count = panel_.memory_of(first, {}).rows;
    const Side<T> rows(rows_.from_row(first), count, width_, cosine_, nullptr, false);
    const Block<T> b = panel_.band(first, {}, rows);
    return {b.scores, b.stride};
  }

 private:
  const Matrix rows_;
  const int64_t width_;
  const bool cosine_;
  const Side<T> columns_;
  const Panel<T> panel_;
};

}  // namespace
}  // namespace fastsim
