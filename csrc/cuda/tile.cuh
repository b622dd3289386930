// A tile of scores in the registers of the threads that share it: the row and column of each score,
// which pairs are left out, the targets of the others, and reductions over rows, columns and the
// whole tile. layout.h says which scores a thread holds, and what row blocks, column blocks and the
// elements `e` of a fragment are.
#pragma once

#include "arguments.h"
#include "epilogue.h"
#include "instructions.cuh"

namespace fastsim {

constexpr int kScratch = 8 * kTile;  // floats of scratch memory, which the reductions share

// The members that the tiles of both engines share. The Tile of each engine adds three functions.
// sync() is a barrier of all threads of the tile. acquire_staging() returns once `staging` may be
// written. store(s) writes score gradients to the panel.
template <class Shape_, class Element_>
struct TileBase {
  using Shape = Shape_;
  using Element = Element_;
  using Scores = float[Shape::row_blocks][Shape::column_blocks][4];

  const Grid& grid;
  int thread;                 // 0 to Shape::threads - 1
  int tile_row, tile_column;  // the tile's position in the block, in tiles
  char* staging;              // shared memory for kTile / parts rows of kPitch floats
  float* scratch;             // shared memory for kScratch floats

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
  // Hides the thread's index from the compiler. Otherwise the compiler would compute the common
  // terms of several loops over the scores once, and keep them in registers. The loops leave no
  // registers for that.
  FASTSIM_DEVICE void conceal_thread() { conceal(thread); }
  FASTSIM_DEVICE int lane() const { return thread % kWarp; }
  FASTSIM_DEVICE int warp() const { return thread / kWarp; }
  FASTSIM_DEVICE int first_lane() const { return warp() * kWarp; }
};

// Calls f(row block, e) for each of the thread's rows. Elements e and e + 1 are in the same row, so
// e is 0 or 2.
template <class Tile, class F>
FASTSIM_DEVICE void for_rows(const F& f) {
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    f(block, 0);
    f(block, 2);
  }
}

// A number for each of the thread's rows.
template <class T, class Tile>
struct PerRow {
  T values[Tile::Shape::row_blocks][2];
  FASTSIM_DEVICE T& operator()(int block, int e) { return values[block][e / 2]; }
};

// Calls f(score, row block, column block, e) for the thread's scores of row block i, up to the
// grid's last column. Before each `blocks_per_check` column blocks it checks whether columns are
// left. The check also splits the code: in one piece, the compiler would have more scores in flight
// than there are registers for.
template <class Tile, class F>
FASTSIM_DEVICE void for_block(const Tile& tile, typename Tile::Scores& s, int i, const F& f) {
  constexpr int group = Tile::Shape::blocks_per_check;
#pragma unroll
  for (int first = 0; first < Tile::Shape::column_blocks; first += group) {
    if (!tile.in_columns(tile.column0() + Tile::Shape::column_of(tile.first_lane(), first, 0))) {
      break;
    }
#pragma unroll
    for (int j = first; j < first + group; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        conceal(s[i][j][e]);  // so that no result of one loop is kept for the next
        f(s[i][j][e], i, j, e);
      }
    }
  }
}

// Does the same for all row blocks of the thread.
template <class Tile, class F>
FASTSIM_DEVICE void for_scores(const Tile& tile, typename Tile::Scores& s, const F& f) {
#pragma unroll
  for (int i = 0; i < Tile::Shape::row_blocks; ++i) for_block(tile, s, i, f);
}

// A number for each of the thread's two rows of a row block.
template <class T>
struct RowPair {
  T values[2];
  FASTSIM_DEVICE T& operator()(int e) { return values[e / 2]; }
};

// The numbers of the thread's two rows of row block i. `vector` is indexed by the rows of the whole
// matrix. A row past the edge has the number `fallback`, and so have all rows if `vector` is null.
template <class T, class Tile>
FASTSIM_DEVICE RowPair<T> load_rows(const Tile& tile, int i, const T* vector, T fallback) {
  const int upper = tile.row(i, 0), lower = tile.row(i, 2);
  return {vector && tile.in_rows(upper) ? vector[upper] : fallback,
          vector && tile.in_rows(lower) ? vector[lower] : fallback};
}

// Copies the numbers of the tile's columns to scratch memory, for all threads of the tile. A column
// past the edge has the number `fallback`. `vector` is indexed by the columns of the whole matrix.
// There are two slots, 0 and 1, which are valid until the next reduction. The caller synchronises
// once after all copies.
template <class Tile, class T>
FASTSIM_DEVICE const T* stage_columns(const Tile& tile, int slot, const T* vector, T fallback) {
  T* staged = reinterpret_cast<T*>(tile.scratch + slot * kScratch / 2);
  if (tile.thread < kTile) {
    const int column = tile.column0() + tile.thread;
    staged[tile.thread] = tile.in_columns(column) ? vector[column] : fallback;
  }
  return staged;
}

// ---- pairs ----

// The column of a row's positive.
struct PositiveColumn {
  const int64_t* positives;
  FASTSIM_DEVICE int operator()(int row) const { return static_cast<int>(positives[row]); }
};

// Sets the scores of pairs that are left out, and all scores past the edge, to kLeftOut. Most tiles
// have no such scores.
template <class Tile>
FASTSIM_DEVICE void leave_out(Tile& tile, const Pairs& pairs, typename Tile::Scores& s) {
  const int row_end = tile.row0() + kTile, column_end = tile.column0() + kTile;
  const bool edge = row_end > tile.grid.row1 || column_end > tile.grid.column1;
  const bool lower = pairs.skip == Skip::lower, diagonal = pairs.skip == Skip::diagonal;
  if (edge || (lower && tile.column0() < row_end) ||
      (diagonal && tile.column0() < row_end && tile.row0() < column_end)) {
    tile.conceal_thread();
    for_scores(tile, s, [&](float& value, int i, int j, int e) {
      const int row = tile.row(i, e), column = tile.column(j, e);
      const bool skipped = (diagonal && row == column) || (lower && column <= row);
      if (!tile.in_rows(row) || !tile.in_columns(column) || skipped) value = kLeftOut<float>;
    });
  }
  if (!pairs.row_ids) return;
  tile.conceal_thread();
  // Scratch memory is free without a barrier: leaving out is the first step of an epilogue, and all
  // threads of a consumer warp group have waited for its turn since they last used the memory.
  const int64_t* ids = stage_columns<Tile, int64_t>(tile, 0, pairs.column_ids, 0);
  tile.sync();
#pragma unroll
  for (int i = 0; i < Tile::Shape::row_blocks; ++i) {
    RowPair<int64_t> id = load_rows<int64_t>(tile, i, pairs.row_ids, 0);
    RowPair<int64_t> positive = load_rows<int64_t>(tile, i, pairs.positives, -1);
    for_block(tile, s, i, [&](float& value, int, int j, int e) {
      const int offset = Tile::Shape::column_of(tile.thread, j, e);
      if (ids[offset] == id(e) && tile.column0() + offset != positive(e)) value = kLeftOut<float>;
    });
  }
}

// Calls f(score, row block, e) for each of the thread's scores that is in the column
// column_of_row(row) of its row. Few tiles have such scores.
template <class Tile, class ColumnOfRow, class F>
FASTSIM_DEVICE void for_column_of_row(Tile& tile, const ColumnOfRow& column_of_row,
                                      typename Tile::Scores& s, const F& f) {
  tile.conceal_thread();
  for_rows<Tile>([&](int block, int e) {
    const int row = tile.row(block, e);
    const int offset = tile.in_rows(row) ? column_of_row(row) - tile.column0() : -1;
    if (offset < 0 || offset >= kTile) return;
#pragma unroll
    for (int j = 0; j < Tile::Shape::column_blocks; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (Tile::Shape::column_of(tile.thread, j, odd) == offset) {
          f(s[block][j][e + odd], block, e);
        }
      }
    }
  });
}

// An element of the caller's matrix as a float.
FASTSIM_DEVICE float element(const Matrix& m, int row, int column) {
  const int64_t index = row * m.row_stride + column * m.column_stride;
  switch (m.dtype) {
    case Dtype::int8: return static_cast<const int8_t*>(m.data)[index];
    case Dtype::uint8: return static_cast<const uint8_t*>(m.data)[index];
    case Dtype::int16: return static_cast<const int16_t*>(m.data)[index];
    case Dtype::int32: return static_cast<float>(static_cast<const int32_t*>(m.data)[index]);
    case Dtype::int64: return static_cast<float>(static_cast<const int64_t*>(m.data)[index]);
    case Dtype::float16: return __half2float(static_cast<const __half*>(m.data)[index]);
    case Dtype::bfloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[index]);
    case Dtype::float32: return static_cast<const float*>(m.data)[index];
    case Dtype::float64: return static_cast<float>(static_cast<const double*>(m.data)[index]);
  }
  return 0.0f;
}

// Copies the dense targets of one part of the tile (kTile / parts rows) as floats to staging
// memory.
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

// Calls f(row block, target) for each row block in turn. target(score, column block, e) is the
// target of a pair, 0 for a pair that is left out.
template <class Tile, class F>
FASTSIM_DEVICE void with_targets(Tile& tile, const Pairs& pairs, const F& f) {
  using Shape = typename Tile::Shape;
  tile.conceal_thread();
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
  const int64_t* staged_groups = stage_columns<Tile, int64_t>(tile, 0, pairs.column_groups, 0);
  tile.sync();
#pragma unroll
  for (int i = 0; i < Shape::row_blocks; ++i) {
    RowPair<int64_t> group = load_rows<int64_t>(tile, i, pairs.row_groups, 0);
    f(i, [&](float score, int j, int e) {
      const bool same = staged_groups[Shape::column_of(tile.thread, j, e)] == group(e);
      return score <= kLeftOut<float> ? 0.0f : same ? 1.0f : pairs.negative_target;
    });
  }
}

// ---- reductions ----

struct Maximum {
  // A NaN is never the maximum. It shows in the sums.
  FASTSIM_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  FASTSIM_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Reduces the values of each row over the threads that share the row. Before the call a thread has
// the value of the scores that it holds. After it, each thread has the value of the tile's whole
// row.
template <class Tile, class T, class Op>
FASTSIM_DEVICE void reduce_rows(Tile& tile, PerRow<T, Tile>& v, const Op& op) {
  for_rows<Tile>([&](int block, int e) {
    v(block, e) = op(v(block, e), lane_exchange(v(block, e), 1));
    v(block, e) = op(v(block, e), lane_exchange(v(block, e), 2));
  });
  constexpr int warps = Tile::Shape::column_warps;
  if constexpr (warps > 1) {
    T* warp_values = reinterpret_cast<T*>(tile.scratch);
    const int column_warp = tile.warp() % warps;
    tile.sync();
    for_rows<Tile>([&](int block, int e) {
      const int row = Tile::Shape::row_of(tile.thread, block, e);
      if (tile.lane() % 4 == 0) warp_values[column_warp * kTile + row] = v(block, e);
    });
    tile.sync();
    for_rows<Tile>([&](int block, int e) {
      const int row = Tile::Shape::row_of(tile.thread, block, e);
      T total = warp_values[row];
      for (int w = 1; w < warps; ++w) total = op(total, warp_values[w * kTile + row]);
      v(block, e) = total;
    });
  }
}

// Writes the values of the tile's rows to `partials` (columns of tiles, rows of the block). One
// thread writes each row.
template <class Tile, class T>
FASTSIM_DEVICE void store_rows(const Tile& tile, PerRow<T, Tile>& v, T* partials) {
  if (tile.lane() % 4 != 0 || tile.warp() % Tile::Shape::column_warps != 0) return;
  const int64_t first = int64_t{tile.tile_column} * (tile.grid.row1 - tile.grid.row0);
  for_rows<Tile>([&](int block, int e) {
    const int row = tile.row(block, e);
    if (tile.in_rows(row)) partials[first + row - tile.grid.row0] = v(block, e);
  });
}

// One step of a reduction over the lanes of a warp. A lane has 2 * half values. It sends one half
// of them to its partner, the lane lane ^ mask, and combines the other half with the values that it
// receives.
template <int half, int mask, int count, class Op>
FASTSIM_DEVICE void reduce_half(int lane, float (&v)[count], const Op& op) {
  const bool upper = lane & mask;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    const float to_send = upper ? v[i] : v[i + half], to_keep = upper ? v[i + half] : v[i];
    v[i] = op(to_keep, lane_exchange(to_send, mask));
  }
}

// Reduces the values of each column over the threads that share the column. `v` has the values of
// the thread's scores, one for each of its columns. Returns the values (kTile,) of the tile's whole
// columns, in scratch memory, for all threads.
template <class Tile, class Op>
FASTSIM_DEVICE const float* reduce_columns(Tile& tile,
                                           float (&v)[2 * Tile::Shape::column_blocks],
                                           const Op& op) {
  constexpr int count = 2 * Tile::Shape::column_blocks, warps = Tile::Shape::row_warps;
  reduce_half<count / 2, 16>(tile.lane(), v, op);
  reduce_half<count / 4, 8>(tile.lane(), v, op);
  reduce_half<count / 8, 4>(tile.lane(), v, op);
  const int row_warp = tile.warp() / Tile::Shape::column_warps;
  const int first = first_lane_value(tile.lane(), count);
  tile.sync();
#pragma unroll
  for (int i = 0; i < count / 8; ++i) {
    const int column = Tile::Shape::column_of(tile.thread, (first + i) / 2, (first + i) % 2);
    tile.scratch[row_warp * kTile + column] = v[i];
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

// Writes the values of the tile's columns to `partials` (rows of tiles, columns of the block). One
// thread writes each column.
template <class Tile>
FASTSIM_DEVICE void store_columns(const Tile& tile, const float* totals, float* partials) {
  const int column = tile.column0() + tile.thread;
  if (tile.thread >= kTile || !tile.in_columns(column) || tile.tile_row >= tile.grid.tile_rows) {
    return;
  }
  const int64_t first = int64_t{tile.tile_row} * (tile.grid.column1 - tile.grid.column0);
  partials[first + column - tile.grid.column0] = totals[tile.thread];
}

// Reduces two numbers over all threads of the tile. Every thread gets both results.
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
