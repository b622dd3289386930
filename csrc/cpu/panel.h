// All scores of two sides of rows as one block, in memory for the time of a call.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

template <class T>
class Panel {
 public:
  // x (rows, width) and y (columns, width), which may be one.
  Panel(const T* x, int64_t rows, const T* y, int64_t columns, int64_t width)
      : memory_(rows * stride(columns)) {
    block.scores = memory_;
    block.rows = rows;
    block.columns = columns;
    block.stride = stride(columns);
    Scratch<T> packed(packed_rows<T>(columns) * width);
    pack<T>(y, columns, width, packed);
    fill_scores<T>(x, width, packed, block);
  }

  Block<T> block{};

 private:
  // Off a power of two, for the cache's sets.
  static int64_t stride(int64_t columns) { return columns + kAligned / int64_t(sizeof(T)); }

  Scratch<T> memory_;
};

}  // namespace fastsim
