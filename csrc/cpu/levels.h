// CoSENT over a matrix.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// First column of the row that takes part.
template <class T>
int64_t first_column(const Block<T>& b, int64_t row) {
  if (b.skip != Skip::lower) return 0;
  const int64_t after = b.row0 + row - b.column0 + 1;
  return after < 0 ? 0 : smaller(after, b.columns);
}

// Levels of `count` pairs: the number of level values below the target.
template <class T>
void load_levels(const Block<T>& b, const T* values, int64_t levels, int64_t row, int64_t column,
                 int64_t count, int32_t* out) {
  T targets[kChunk];
  load_targets(b, row, column, count, targets);
  for (int64_t j = 0; j < count; ++j) out[j] = 0;
  for (int64_t l = 0; l + 1 < levels; ++l) {
    const T value = values[l];
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] += targets[j] > value ? 1 : 0;
  }
}

// The largest s and the largest -s among the pairs of one level.
template <class T>
void level_extremes(const T* s, const int32_t* level, int32_t wanted, int64_t count, T& high,
                    T& low) {
  T top = kLeftOut<T>, bottom = kLeftOut<T>;
#pragma omp simd reduction(max : top, bottom)
  for (int64_t j = 0; j < count; ++j) {
    const T up = level[j] == wanted ? s[j] : kLeftOut<T>;
    const T down = level[j] == wanted ? -s[j] : kLeftOut<T>;
    top = up > top ? up : top;
    bottom = down > bottom ? down : bottom;
  }
  high = top;
  low = bottom;
}

template <class T>
void level_sums(const T* s, const int32_t* level, int32_t wanted, int64_t count,
                Softmax<T> softmax, T high, T low, T& above, T& below) {
  T up = 0, down = 0;
#pragma omp simd reduction(+ : up, down)
  for (int64_t j = 0; j < count; ++j) {
    const T of_s = softmax.share(s[j], high), of_minus = softmax.share(-s[j], low);
    up += level[j] == wanted ? of_s : T(0);
    down += level[j] == wanted ? of_minus : T(0);
  }
  above = up;
  below = down;
}

// partial: (rows, 4, levels) of maximum of s, its sum, maximum of -s, its sum.
template <class T>
void levels_forward(const Block<T>& b, T scale, const T* values, int64_t count, double* partial,
                 int64_t begin, int64_t end) {
  const Softmax<T> softmax{scale};
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    double* out = partial + row * 4 * count;
    const MaxSum up{out, out + count}, down{out + 2 * count, out + 3 * count};
    for_chunks(first_column(b, row), b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, values, count, row, at, n, level);
      for (int64_t l = 0; l < count; ++l) {
        T high, low, above, below;
        level_extremes(s + at, level, static_cast<int32_t>(l), n, high, low);
        level_sums(s + at, level, static_cast<int32_t>(l), n, softmax, high, low, above, below);
        // A NaN loses every comparison of maxima but shows in the sums.
        if (above != T(0)) merge(up, l, high, above, scale);
        if (below != T(0)) merge(down, l, low, below, scale);
      }
    });
  }
}

template <class T>
void levels_score_grad(const Block<T>& b, T scale, const LevelScoreGrad<T>& score_grad, int64_t begin,
                  int64_t end) {
  const Levels<T> levels{scale};
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t first = first_column(b, row);
    for (int64_t j = 0; j < first; ++j) s[j] = T(0);
    for_chunks(first, b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, score_grad.values, score_grad.count, row, at, n, level);
      T* chunk = s + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const int32_t l = level[j];
        chunk[j] = levels.score_grad(chunk[j], score_grad.high[l], score_grad.up[l], score_grad.low[l], score_grad.down[l]);
      }
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
