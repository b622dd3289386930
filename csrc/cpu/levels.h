// CoSENT over a matrix. The pairs with one target are a level.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The first column of a row that takes part.
template <class T>
int64_t first_column(const Block<T>& b, int64_t row) {
  if (b.skip != Skip::lower) return 0;
  const int64_t after = b.row0 + row - b.column0 + 1;
  return after < 0 ? 0 : min_of(after, b.columns);
}

// With up to this number of levels, each level has a vectorised pass over the pairs of a chunk.
// With more, the value of each pair is added to an entry of its level.
constexpr int64_t kFewLevels = 8;
// The number of sums per level, so that an addition need not wait for the one before it.
constexpr int64_t kLanesOfLevels = 4;

// Writes the levels of `count` pairs to `out`: the level of a pair is the number of level values
// below its target.
template <class T>
void load_levels(const Block<T>& b, Values<T> levels, int64_t row, int64_t column, int64_t count,
                 int32_t* out) {
  T targets[kChunk];
  load_targets(b, row, column, count, targets);
  for (int64_t j = 0; j < count; ++j) out[j] = 0;
  if (levels.count <= kFewLevels) {
    for (int64_t l = 0; l + 1 < levels.count; ++l) {
      const T value = levels.data[l];
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) out[j] += targets[j] > value ? 1 : 0;
    }
    return;
  }
  int32_t step = 1;  // a binary search for all pairs at once
  while (2 * int64_t(step) < levels.count) step *= 2;
  for (; step > 0; step /= 2) {
    const int32_t last = static_cast<int32_t>(levels.count) - 1;
    const T* values = levels.data;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int32_t next = out[j] + step, index = next > last ? last : next;
      out[j] = next <= last && targets[j] > values[index - 1] ? next : out[j];
    }
  }
}

// For each of `count` levels of a chunk: `high`, the maximum of s, and `low`, the maximum of -s;
// `above` and `below`, the sums of exponentials relative to them. All (count,).
template <class T>
struct LevelSums {
  int64_t count;
  T *high, *low;
  double *above, *below;
};

// Computes `high` and `low` of a chunk.
template <class T>
void level_extremes(const T* s, const int32_t* level, int64_t n, const LevelSums<T>& sums) {
  if (sums.count > kFewLevels) {
    for (int64_t l = 0; l < sums.count; ++l) sums.high[l] = sums.low[l] = kLeftOut<T>;
    for (int64_t j = 0; j < n; ++j) {
      T &high = sums.high[level[j]], &low = sums.low[level[j]];
      high = s[j] > high ? s[j] : high;
      low = -s[j] > low ? -s[j] : low;
    }
    return;
  }
  for (int32_t l = 0; l < sums.count; ++l) {
    T top = kLeftOut<T>, bottom = kLeftOut<T>;
#pragma omp simd reduction(max : top, bottom)
    for (int64_t j = 0; j < n; ++j) {
      const T up = level[j] == l ? s[j] : kLeftOut<T>;
      const T down = level[j] == l ? -s[j] : kLeftOut<T>;
      top = up > top ? up : top;
      bottom = down > bottom ? down : bottom;
    }
    sums.high[l] = top;
    sums.low[l] = bottom;
  }
}

// Computes `above` and `below` of a chunk. Each score is exponentiated twice, once with each sign,
// whatever the number of levels.
template <class T>
void level_sums(const T* s, const int32_t* level, int64_t n, Softmax<T> softmax,
                const LevelSums<T>& sums) {
  T up[kChunk], down[kChunk];
  const T *high = sums.high, *low = sums.low;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    up[j] = softmax.share(s[j], high[level[j]]);
    down[j] = softmax.share(-s[j], low[level[j]]);
  }
  if (sums.count > kFewLevels) {
    double above[kLanesOfLevels][kMostLevels], below[kLanesOfLevels][kMostLevels];
    for (int64_t lane = 0; lane < kLanesOfLevels; ++lane) {
      for (int64_t l = 0; l < sums.count; ++l) above[lane][l] = below[lane][l] = 0;
    }
    for (int64_t j = 0; j < n; ++j) {
      above[j % kLanesOfLevels][level[j]] += up[j];
      below[j % kLanesOfLevels][level[j]] += down[j];
    }
    for (int64_t l = 0; l < sums.count; ++l) {
      sums.above[l] = (above[0][l] + above[1][l]) + (above[2][l] + above[3][l]);
      sums.below[l] = (below[0][l] + below[1][l]) + (below[2][l] + below[3][l]);
    }
    return;
  }
  for (int32_t l = 0; l < sums.count; ++l) {
    T above = 0, below = 0;
#pragma omp simd reduction(+ : above, below)
    for (int64_t j = 0; j < n; ++j) {
      above += level[j] == l ? up[j] : T(0);
      below += level[j] == l ? down[j] : T(0);
    }
    sums.above[l] = above;
    sums.below[l] = below;
  }
}

// Adds the scores of a block to the states of its rows. partial (rows, 4, levels): the maximum of
// s, the sum of exponentials relative to it, the maximum of -s, and the sum relative to that.
template <class T>
void levels_forward(const Block<T>& b, LevelsForward<T> args, int64_t begin, int64_t end) {
  const Softmax<T> softmax{args.scale};
  const int64_t count = args.values.count;
  T high[kMostLevels], low[kMostLevels];
  double above[kMostLevels], below[kMostLevels];
  const LevelSums<T> sums{count, high, low, above, below};
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    double* out = args.partial + row * 4 * count;
    const MaxSum up{out, out + count}, down{out + 2 * count, out + 3 * count};
    for_chunks(first_column(b, row), b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, args.values, row, at, n, level);
      level_extremes(s + at, level, n, sums);
      level_sums(s + at, level, n, softmax, sums);
      for (int64_t l = 0; l < count; ++l) {
        if (any_pair(high[l], above[l])) merge(up, l, high[l], above[l], args.scale);
        if (any_pair(low[l], below[l])) merge(down, l, low[l], below[l], args.scale);
      }
    });
  }
}

// Turns the scores of a block into score gradients, 0 for the columns that take no part.
template <class T>
void levels_score_grad(const Block<T>& b, LevelsScoreGrad<T> args, int64_t begin, int64_t end) {
  const Levels<T> levels{args.scale};
  const T *high = args.high, *up = args.up, *low = args.low, *down = args.down;
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t first = first_column(b, row);
    for (int64_t j = 0; j < first; ++j) s[j] = T(0);
    for_chunks(first, b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, args.values, row, at, n, level);
      T* chunk = s + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const int32_t l = level[j];
        chunk[j] = levels.score_grad(chunk[j], high[l], up[l], low[l], down[l]);
      }
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
