// The three matrix products of the engine on unpacked row-major operands, single precision or
// double, for one thread's share of the output. A register tile of kTileRows x kTileColumns is
// summed over the whole depth of a block before it touches memory, so every output has one fixed
// order of summation whatever the threads.
#pragma once

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The register tile: kTileRows x kVectors sums, kVectors of the right operand and one broadcast
// scalar of the left fill 29 of 32 vector registers, or 15 of 16. Taller and narrower tiles would
// load more a product: 12 x 2 vectors take 14 loads for 24 products, 6 x 4 take 10.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectors = 4;
#else
constexpr int kVectorBytes = 16, kVectors = 2;
#endif
constexpr int64_t kDepth = 512;        // of a block whose right operand stays in cache
constexpr int64_t kColumnBlock = 96;   // columns of a panel packed at a time, transposed product
constexpr int64_t kLine = 64;          // bytes of a line of the cache
constexpr int64_t kAhead = 8;          // steps of the depth between a prefetch and its use

template <class T>
using Vector __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias)) = T;

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <class T>
constexpr int64_t kTileColumns = kVectors * kLanes<T>;

template <class T>
constexpr int64_t kLineOf = kLine / sizeof(T);  // numbers of a line

template <class T>
constexpr int64_t kTileLines = (kTileColumns<T> + kLineOf<T> - 1) / kLineOf<T>;  // of a row

enum Cache { kFirst = 3, kSecond = 2 };  // as __builtin_prefetch counts them

// What a tile asks for while it is summed, so that it is there when it is needed: in the first
// cache the rows of the left operand of the next tile, in the second what comes after the column
// of tiles, a row as wide as a tile for every kLineOf<T> steps of the depth, `later_step` apart.
template <class T>
struct Next {
  const T* left;
  const T* later;
  int64_t later_step;
};

// c[r][:] (+)= sum_k a[r * a_row + k * a_step] * b[k * b_step][:] for `rows` rows, one tile wide.
// Everything is unrolled, or the sums would live in memory. Vector times scalar is a broadcast from
// memory, which takes none of the multiplier's ports (V{} + a would be an addition: it changes -0).
template <class T, int rows, bool add>
[[gnu::noinline]] void tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                            int64_t depth, T* c, int64_t c_row, Next<T> next) {
  using V = Vector<T>;
  // Memory is asked for a few lines at a time, between parts of the depth: more at once than the
  // processor can wait for would hold up the sums.
  constexpr int kParts = kTileLines<T>;
  constexpr int64_t kSteps = kLineOf<T> / kParts;
  constexpr int kLefts = (rows + kParts - 1) / kParts;
  const int64_t left_row = a_step == 1 ? a_row : kLineOf<T>;  // else its rows lie packed together
  const T *later = next.later, *written = c, *last = c + (rows - 1) * c_row;
  V sum[rows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = V{};
  }
  int64_t rest = depth;
#pragma GCC unroll 1
  while (rest > 0) {
    const T* left_line = next.left;
#pragma GCC unroll 1
    for (int part = 0; part < kParts && rest > 0; ++part, rest -= kSteps) {
#pragma GCC unroll 6
      for (int r = 0; r < kLefts; ++r) __builtin_prefetch(left_line + r * left_row);
      left_line += kLefts * left_row;
      __builtin_prefetch(later + part * kLineOf<T>, 0, kSecond);
      __builtin_prefetch(written + part * kLineOf<T>, 1, kFirst);
#pragma GCC unroll 1
      for (int64_t k = smaller(rest, kSteps); k > 0; --k) {
        V right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          right[v] = *reinterpret_cast<const V*>(b + v * kLanes<T>);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kTileLines<T>; ++v) {
          __builtin_prefetch(b + kAhead * b_step + v * kLineOf<T>);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
          const T left = a[r * a_row];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
          // No load moves up across this: one scalar is alive at a time, and no sum gives way to it.
          __asm__ volatile("" ::: "memory");
        }
        a += a_step;
        b += b_step;
      }
    }
    next.left += kLineOf<T> * a_step;
    later += next.later_step;
    written = written == last ? last : written + c_row;
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V* out = reinterpret_cast<V*>(c + r * c_row + v * kLanes<T>);
      *out = add ? *out + sum[r][v] : sum[r][v];
    }
  }
}

template <class T>
using Tile = void (*)(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                      int64_t depth, T* c, int64_t c_row, Next<T> next);

template <class T, bool add>
constexpr Tile<T> kTiles[kTileRows] = {tile<T, 1, add>, tile<T, 2, add>, tile<T, 3, add>,
                                       tile<T, 4, add>, tile<T, 5, add>, tile<T, 6, add>};

template <class T>
Tile<T> tile_of(int64_t rows, bool add) {
  return add ? kTiles<T, true>[rows - 1] : kTiles<T, false>[rows - 1];
}

// A left operand: element (r, k) of group g lies at data[g * group + r * row + k * step], a group
// being kTileRows rows.
template <class T>
struct Left {
  const T* data;
  int64_t row, step, group;
};

// Rows of a row-major matrix.
template <class T>
Left<T> rows_of(const T* data, int64_t stride) {
  return {data, stride, 1, kTileRows * stride};
}

// What a column of tiles leaves in the second cache: a tile's width of `depth` rows, `step` apart.
template <class T>
struct Later {
  const T* data = nullptr;
  int64_t step = 0;
};

// A column of tiles: all `rows` of a against `columns` <= kTileColumns of b. A narrower b is
// padded with zeros in `padded` (depth, kTileColumns) unless it is wide enough to be read past.
template <class T>
void column_of_tiles(const Left<T>& a, int64_t rows, const T* b, int64_t b_step, int64_t columns,
                     int64_t depth, T* c, int64_t c_row, bool add, T* padded, Later<T> later = {}) {
  constexpr int64_t wide = kTileColumns<T>;
  const bool whole = columns == wide;
  if (!whole && b_step != wide) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < wide; ++j) padded[k * wide + j] = j < columns ? b[k * b_step + j] : T(0);
    }
    b = padded;
    b_step = wide;
  }
  const T* left = a.data;
  int64_t asked = 0;  // rows of what comes later
  for (int64_t top = 0; top < rows; top += kTileRows) {
    const int64_t count = smaller(kTileRows, rows - top);
    const T* next_left = top + kTileRows < rows ? left + a.group : a.data;
    const bool asks = later.data && asked < depth;
    const Next<T> next{next_left, asks ? later.data + asked * later.step : next_left,
                       asks ? later.step : 0};
    asked += (depth + kLineOf<T> - 1) / kLineOf<T>;
    T* out = c + top * c_row;
    if (whole) {
      tile_of<T>(count, add)(left, a.row, a.step, b, b_step, depth, out, c_row, next);
    } else {
      T scratch[kTileRows * wide];
      tile_of<T>(count, false)(left, a.row, a.step, b, b_step, depth, scratch, wide, next);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t j = 0; j < columns; ++j) {
          T& to = out[r * c_row + j];
          to = add ? to + scratch[r * wide + j] : scratch[r * wide + j];
        }
      }
    }
    left = next_left;
  }
}

template <class T>
struct Padded {
  T values[kDepth * kTileColumns<T>];
};

// y (rows, width) as column panels (rows / wide, width, wide), the last one padded with zeros:
// the right operand of `score_panels`.
template <class T>
void pack_panels(const T* y, int64_t rows, int64_t width, T* packed, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const T* from = y + panel * wide * width;
    T* to = packed + panel * wide * width;
    const int64_t count = smaller(wide, rows - panel * wide);
    for (int64_t k0 = 0; k0 < width; k0 += 16) {
      const int64_t k1 = smaller(k0 + 16, width);
      for (int64_t j = 0; j < wide; ++j) {
        for (int64_t k = k0; k < k1; ++k) to[k * wide + j] = j < count ? from[j * width + k] : T(0);
      }
    }
  }
}

// scores (+)= x y^T with y packed, for the given rows of x and panels of y.
template <class T>
void score_panels(const T* x, int64_t width, const T* packed, int64_t columns, T* scores,
                  int64_t stride, bool add, Range rows, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    const T* right = packed + at * width;
    const Later<T> later{panel + 1 < panels.end ? right + wide * width : nullptr, wide};
    column_of_tiles(rows_of(x + rows.begin * width, width), rows.end - rows.begin, right, wide,
                    smaller(wide, columns - at), width, scores + rows.begin * stride + at, stride,
                    add, static_cast<T*>(nullptr), later);
  }
}

// out (+)= panel y in the given rows, with panel (rows, depth) and y (depth, width).
template <class T>
void multiply_rows(const T* panel, int64_t stride, int64_t depth, const T* y, int64_t width,
                   T* out, bool add, Range rows) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local Padded<T> padded;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = smaller(kDepth, depth - k);
    for (int64_t at = 0; at < width; at += wide) {
      column_of_tiles(rows_of(panel + rows.begin * stride + k, stride), rows.end - rows.begin,
                      y + k * width + at, width, smaller(wide, width - at), deep,
                      out + rows.begin * width + at, width, add || k > 0, padded.values);
    }
  }
}

// The left operand of the transposed product: `columns` columns of a panel over `depth` of its rows,
// in groups of kTileRows, each (depth, kTileRows). The rows of a panel lie pages apart.
template <class T>
void pack_columns(const T* panel, int64_t stride, int64_t columns, int64_t depth, T* packed) {
  constexpr int64_t kRows = 16;  // read at a time: all their columns stay in cache
  for (int64_t k0 = 0; k0 < depth; k0 += kRows) {
    const int64_t k1 = smaller(k0 + kRows, depth);
    for (int64_t at = 0; at < columns; at += kTileRows) {
      const T* from = panel + at;
      T* to = packed + at * depth;
      if (columns - at >= kTileRows) {
        for (int64_t k = k0; k < k1; ++k) {
          __builtin_memcpy(to + k * kTileRows, from + k * stride, kTileRows * sizeof(T));
        }
      } else {
        for (int64_t k = k0; k < k1; ++k) {
          for (int64_t r = 0; r < columns - at; ++r) to[k * kTileRows + r] = from[k * stride + r];
        }
      }
    }
  }
}

// out (+)= panel^T x in the given columns of the panel, with panel (depth, columns) and x (depth, width).
template <class T>
void multiply_columns(const T* panel, int64_t stride, int64_t depth, const T* x, int64_t width,
                      T* out, bool add, Range columns) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local Padded<T> padded;
  static thread_local T packed[kDepth * kColumnBlock];
  for (int64_t first = columns.begin; first < columns.end; first += kColumnBlock) {
    const int64_t count = smaller(kColumnBlock, columns.end - first);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t deep = smaller(kDepth, depth - k);
      pack_columns(panel + k * stride + first, stride, count, deep, packed);
      const Left<T> left{packed, 1, kTileRows, kTileRows * deep};
      for (int64_t at = 0; at < width; at += wide) {
        // The last columns of tiles ask for what is packed next, as wide as they are.
        constexpr int64_t kAsking = (kColumnBlock + wide - 1) / wide * wide;
        const int64_t asked = kAsking - (width + wide - 1) / wide * wide + at;
        const int64_t ahead = first + kColumnBlock + asked;
        const bool more = asked >= 0 && ahead < columns.end;
        column_of_tiles(left, count, x + k * width + at, width, smaller(wide, width - at), deep,
                        out + first * width + at, width, add || k > 0, padded.values,
                        Later<T>{more ? panel + k * stride + ahead : nullptr, stride});
      }
    }
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
