// A part of a panel turned over, for scores of rows against themselves: the score of a pair is that
// of the pair turned round.
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// to = from^T, with `add` added to it, in the rows [begin, end) of `to`, which has `columns`. In
// squares, so that each line of the cache is read and written once.
template <class T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t columns,
               bool add, int64_t begin, int64_t end) {
  constexpr int64_t kSide = 16;
  T square[kSide][kSide];
  for (int64_t top = begin; top < end; top += kSide) {
    const int64_t high = smaller(kSide, end - top);
    for (int64_t left = 0; left < columns; left += kSide) {
      const int64_t wide = smaller(kSide, columns - left);
      for (int64_t c = 0; c < wide; ++c) {
        const T* source = from + (left + c) * from_stride + top;
        for (int64_t r = 0; r < high; ++r) square[r][c] = source[r];
      }
      for (int64_t r = 0; r < high; ++r) {
        T* target = to + (top + r) * to_stride + left;
        for (int64_t c = 0; c < wide; ++c) target[c] = add ? target[c] + square[r][c] : square[r][c];
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
