// A tile of scores in the registers of the threads that share it: where each score belongs, which
// pairs take part, what their targets are, and sums over rows, columns and the whole tile.
#pragma once

#include "arguments.h"
#include "epilogue.h"
#include "instructions.cuh"

namespace fastsim {

constexpr int kScratch = 8 * kTile;  // floats that the reductions share

// What the engines' tiles have in common. `Engine` adds: sync(), all threads of the tile;
// acquire_staging(), after which `staging` may be written; store(s), score gradients to the panel.
template <class Shape_, class Element_>
struct TileBase {
  using Shape = Shape_;
  using Element = Element_;
  using Scores = float[Shape::row_blocks][Shape::column_blocks][4];

  const Grid& grid;
  int thread;             // 0 to Shape::threads - 1
  int tile_row, tile_column;
  char* staging;          // kTile / parts rows of kPitch floats
  float* scratch;

  FASTSIM_DEVICE int row0() const { return grid.row0 + tile_row * kTile; }
  FASTSIM_DEVICE int column0() const { return grid.column0 + tile_column * kTile; }
  FASTSIM_DEVICE int row(int block, int e) const {
    return row0() + Shape::row_of(thread, block, e);
  }
  FASTSIM_DEVICE int column(int block, int e) const {
    return column0() + Shape::column_of(thread, block, e);
  }
  FASTSIM_DEVICE bool in_rows(int row) const { return row < grid.row1; }
  FASTSIM_DEVICE bool in_columns(int column) const { return column < grid.column1; }
  // Forgets what the compiler knows of the thread's place: it would keep what several loops over
  // the scores have in common in registers that they do not leave.
  FASTSIM_DEVICE void forget() { conceal(thread); }
  FASTSIM_DEVICE int lane() const { return thread % kWarp; }
  FASTSIM_DEVICE int warp() const { return thread / kWarp; }
  FASTSIM_DEVICE int first_lane() const { return warp() * kWarp; }
};

// f(block, e) for the thread's rows: elements e and e + 1 share one, so e is 0 or 2.
template <class Tile, class F>
FASTSIM_DEVICE void for_rows(const F& f) {
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    f(block, 0);
    f(block, 2);
  }
}

// The thread's rows, one number each.
template <class T, class Tile>
struct PerRow {
  T values[Tile::Shape::row_blocks][2];
  FASTSIM_DEVICE T& operator()(int block, int e) { return values[block][e / 2]; }
};

// f(score, row block, column block, e) for the thread's scores of one row block, as far as there
// are columns. Asked every few blocks, whose code is then by itself: in one piece the compiler
// would have more scores under way than there are registers for.
template <class Tile, class F>
FASTSIM_DEVICE void for_block(const Tile& tile, typename Tile::Scores& s, int i, const F& f) {
  constexpr int together = Tile::Shape::together;
#pragma unroll
  for (int first = 0; first < Tile::Shape::column_blocks; first += together) {
    if (!tile.in_columns(tile.column0() + Tile::Shape::column_of(tile.first_lane(), first, 0))) {
      break;
    }
#pragma unroll
    for (int j = first; j < first + together; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        conceal(s[i][j][e]);  // what loops have in common is not kept from one to the next
        f(s[i][j][e], i, j, e);
      }
    }
  }
}
template <class Tile, class F>
FASTSIM_DEVICE void for_scores(const Tile& tile, typename Tile::Scores& s, const F& f) {
#pragma unroll
  for (int i = 0; i < Tile::Shape::row_blocks; ++i) for_block(tile, s, i, f);
}

// A number for each of the two rows of a row block.
template <class T>
struct Two {
  T values[2];
  FASTSIM_DEVICE T& operator()(int e) { return values[e / 2]; }
};

// `from` at the rows of the whole matrix, `otherwise` past the edge or where there is none.
template <class T, class Tile>
FASTSIM_DEVICE Two<T> load_rows(const Tile& tile, int i, const T* from, T otherwise) {
  const int upper = tile.row(i, 0), lower = tile.row(i, 2);
  return {from && tile.in_rows(upper) ? from[upper] : otherwise,
          from && tile.in_rows(lower) ? from[lower] : otherwise};
}

// Numbers of the tile's columns in scratch memory for everyone, `otherwise` past the edge: slot 0
// or 1, until the next reduction. The caller synchronises once all are staged.
template <class Tile, class T>
FASTSIM_DEVICE const T* stage_columns(const Tile& tile, int slot, const T* from, T otherwise) {
  T* held = reinterpret_cast<T*>(tile.scratch + slot * kScratch / 2);
  if (tile.thread < kTile) {
    const int column = tile.column0() + tile.thread;
    held[tile.thread] = tile.in_columns(column) ? from[column] : otherwise;
  }
  return held;
}

// ---- pairs ----

// The column of a row's positive.
struct OwnColumn {
  const int64_t* positives;
  FASTSIM_DEVICE int operator()(int row) const { return static_cast<int>(positives[row]); }
};

// Marks the scores of pairs that take no part; most tiles have none.
template <class Tile>
FASTSIM_DEVICE void leave_out(Tile& tile, const Pairs& pairs, typename Tile::Scores& s) {
  const int row_end = tile.row0() + kTile, column_end = tile.column0() + kTile;
  const bool edge = row_end > tile.grid.row1 || column_end > tile.grid.column1;
  const bool lower = pairs.skip == Skip::lower, diagonal = pairs.skip == Skip::diagonal;
  if (edge || (lower && tile.column0() < row_end) ||
      (diagonal && tile.column0() < row_end && tile.row0() < column_end)) {
    tile.forget();
    for_scores(tile, s, [&](float& value, int i, int j, int e) {
      const int row = tile.row(i, e), column = tile.column(j, e);
      const bool skipped = (diagonal && row == column) || (lower && column <= row);
      if (!tile.in_rows(row) || !tile.in_columns(column) || skipped) value = kLeftOut<float>;
    });
  }
  if (!pairs.row_ids) return;
  tile.forget();
  // Scratch memory is free: this comes first, and a group's turn was waited for by all of it.
  const int64_t* held = stage_columns<Tile, int64_t>(tile, 0, pairs.column_ids, 0);
  tile.sync();
#pragma unroll
  for (int i = 0; i < Tile::Shape::row_blocks; ++i) {
    Two<int64_t> id = load_rows<int64_t>(tile, i, pairs.row_ids, 0);
    Two<int64_t> own = load_rows<int64_t>(tile, i, pairs.positives, -1);
    for_block(tile, s, i, [&](float& value, int, int j, int e) {
      const int place = Tile::Shape::column_of(tile.thread, j, e);
      if (held[place] == id(e) && tile.column0() + place != own(e)) value = kLeftOut<float>;
    });
  }
}

// f(score, row block, e) for the scores of the rows' own columns that this thread has; few tiles
// have any.
template <class Tile, class Own, class F>
FASTSIM_DEVICE void at_own(Tile& tile, const Own& own, typename Tile::Scores& s, const F& f) {
  tile.forget();
  for_rows<Tile>([&](int block, int e) {
    const int row = tile.row(block, e);
    const int offset = tile.in_rows(row) ? own(row) - tile.column0() : -1;
    if (offset < 0 || offset >= kTile) return;
#pragma unroll
    for (int j = 0; j < Tile::Shape::column_blocks; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (Tile::Shape::column_of(tile.thread, j, odd) == offset) f(s[block][j][e + odd], block, e);
      }
    }
  });
}

FASTSIM_DEVICE float element(const Matrix& m, int row, int column) {
  const int64_t at = row * m.row_stride + column * m.column_stride;
  switch (m.dtype) {
    case Dtype::int8: return static_cast<const int8_t*>(m.data)[at];
    case Dtype::uint8: return static_cast<const uint8_t*>(m.data)[at];
    case Dtype::int16: return static_cast<const int16_t*>(m.data)[at];
    case Dtype::int32: return static_cast<float>(static_cast<const int32_t*>(m.data)[at]);
    case Dtype::int64: return static_cast<float>(static_cast<const int64_t*>(m.data)[at]);
    case Dtype::float16: return __half2float(static_cast<const __half*>(m.data)[at]);
    case Dtype::bfloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[at]);
    case Dtype::float32: return static_cast<const float*>(m.data)[at];
    case Dtype::float64: return static_cast<float>(static_cast<const double*>(m.data)[at]);
  }
  return 0.0f;
}

// The rows of a part of the dense targets as floats in the staging memory.
template <class Tile>
FASTSIM_DEVICE void stage_targets(Tile& tile, const Matrix& dense, int part) {
  constexpr int height = kTile / Tile::Shape::parts;
  float* staged = reinterpret_cast<float*>(tile.staging);
  tile.acquire_staging();
#pragma unroll 1
  for (int i = tile.thread; i < height * kTile; i += Tile::Shape::threads) {
    const int r = i / kTile, c = i % kTile;
    const int row = tile.row0() + part * height + r, column = tile.column0() + c;
    const bool inside = tile.in_rows(row) && tile.in_columns(column);
    staged[r * kPitch + c] = inside ? element(dense, row, column) : 0.0f;
  }
  tile.sync();
}

// f(row block, target), for each row block in turn; target(score, column block, e) is 0 for a
// pair left out.
template <class Tile, class F>
FASTSIM_DEVICE void with_targets(Tile& tile, const Pairs& pairs, const F& f) {
  using Shape = typename Tile::Shape;
  tile.forget();
  if (pairs.dense.data) {
    constexpr int height = Shape::row_blocks / Shape::parts;
    const float* staged = reinterpret_cast<const float*>(tile.staging);
#pragma unroll
    for (int i = 0; i < Shape::row_blocks; ++i) {
      const int part = i / height;
      if (i % height == 0) stage_targets(tile, pairs.dense, part);
      f(i, [&](float score, int j, int e) {
        const int r = Shape::row_of(tile.thread, i, e) - part * (kTile / Shape::parts);
        const float t = staged[r * kPitch + Shape::column_of(tile.thread, j, e)];
        return score <= kLeftOut<float> ? 0.0f : t;
      });
    }
    return;
  }
  tile.sync();
  const int64_t* held = stage_columns<Tile, int64_t>(tile, 0, pairs.column_groups, 0);
  tile.sync();
#pragma unroll
  for (int i = 0; i < Shape::row_blocks; ++i) {
    Two<int64_t> group = load_rows<int64_t>(tile, i, pairs.row_groups, 0);
    f(i, [&](float score, int j, int e) {
      const bool same = held[Shape::column_of(tile.thread, j, e)] == group(e);
      return score <= kLeftOut<float> ? 0.0f : same ? 1.0f : pairs.negative_target;
    });
  }
}

// ---- reductions ----

struct Largest {
  // A NaN is no maximum; it shows in the sums.
  FASTSIM_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  FASTSIM_DEVICE float operator()(float a, float b) const { return a + b; }
};

// The thread's share of each row -> the whole row, in every thread that has the row.
template <class Tile, class T, class Op>
FASTSIM_DEVICE void reduce_rows(Tile& tile, PerRow<T, Tile>& v, const Op& op) {
  for_rows<Tile>([&](int block, int e) {
    v(block, e) = op(v(block, e), lane_exchange(v(block, e), 1));
    v(block, e) = op(v(block, e), lane_exchange(v(block, e), 2));
  });
  constexpr int warps = Tile::Shape::column_warps;
  if constexpr (warps > 1) {
    T* held = reinterpret_cast<T*>(tile.scratch);
    const int place = tile.warp() % warps;
    tile.sync();
    for_rows<Tile>([&](int block, int e) {
      const int row = Tile::Shape::row_of(tile.thread, block, e);
      if (tile.lane() % 4 == 0) held[place * kTile + row] = v(block, e);
    });
    tile.sync();
    for_rows<Tile>([&](int block, int e) {
      const int row = Tile::Shape::row_of(tile.thread, block, e);
      T total = held[row];
      for (int w = 1; w < warps; ++w) total = op(total, held[w * kTile + row]);
      v(block, e) = total;
    });
  }
}

// Row results to their partials, each by one thread.
template <class Tile, class T>
FASTSIM_DEVICE void store_rows(const Tile& tile, PerRow<T, Tile>& v, T* partials) {
  if (tile.lane() % 4 != 0 || tile.warp() % Tile::Shape::column_warps != 0) return;
  const int64_t first = int64_t{tile.tile_column} * (tile.grid.row1 - tile.grid.row0);
  for_rows<Tile>([&](int block, int e) {
    const int row = tile.row(block, e);
    if (tile.in_rows(row)) partials[first + row - tile.grid.row0] = v(block, e);
  });
}

// Of 2 half values a lane keeps one half and gives its partner the other.
template <int half, int mask, int count, class Op>
FASTSIM_DEVICE void reduce_half(int lane, float (&v)[count], const Op& op) {
  const bool upper = lane & mask;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    const float given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
    v[i] = op(kept, lane_exchange(given, mask));
  }
}

// The thread's share of its columns -> (kTile,) whole columns, in scratch memory for everyone.
template <class Tile, class Op>
FASTSIM_DEVICE const float* reduce_columns(Tile& tile,
                                           float (&v)[2 * Tile::Shape::column_blocks],
                                           const Op& op) {
  constexpr int count = 2 * Tile::Shape::column_blocks, warps = Tile::Shape::row_warps;
  reduce_half<count / 2, 16>(tile.lane(), v, op);
  reduce_half<count / 4, 8>(tile.lane(), v, op);
  reduce_half<count / 8, 4>(tile.lane(), v, op);
  const int place = tile.warp() / Tile::Shape::column_warps;
  const int first = kept_value(tile.lane(), count);
  tile.sync();
#pragma unroll
  for (int i = 0; i < count / 8; ++i) {
    const int column = Tile::Shape::column_of(tile.thread, (first + i) / 2, (first + i) % 2);
    tile.scratch[place * kTile + column] = v[i];
  }
  tile.sync();
  float* totals = tile.scratch + warps * kTile;
  if (tile.thread < kTile) {
    float total = tile.scratch[tile.thread];
    for (int w = 1; w < warps; ++w) total = op(total, tile.scratch[w * kTile + tile.thread]);
    totals[tile.thread] = total;
  }
  tile.sync();
  return totals;
}

template <class Tile>
FASTSIM_DEVICE void store_columns(const Tile& tile, const float* totals, float* partials) {
  const int column = tile.column0() + tile.thread;
  if (tile.thread >= kTile || !tile.in_columns(column) || tile.tile_row >= tile.grid.tile_rows) {
    return;
  }
  const int64_t first = int64_t{tile.tile_row} * (tile.grid.column1 - tile.grid.column0);
  partials[first + column - tile.grid.column0] = totals[tile.thread];
}

// The thread's share of two numbers -> those of the whole tile, in every thread.
template <class Tile, class Op>
FASTSIM_DEVICE void reduce_tile(Tile& tile, float& a, float& b, const Op& op) {
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) {
    a = op(a, lane_exchange(a, mask));
    b = op(b, lane_exchange(b, mask));
  }
  tile.sync();
  if (tile.lane() == 0) {
    tile.scratch[2 * tile.warp()] = a;
    tile.scratch[2 * tile.warp() + 1] = b;
  }
  tile.sync();
  a = tile.scratch[0];
  b = tile.scratch[1];
  for (int w = 1; w < Tile::Shape::threads / kWarp; ++w) {
    a = op(a, tile.scratch[2 * w]);
    b = op(b, tile.scratch[2 * w + 1]);
  }
}

}  // namespace fastsim
