// Work shared out over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "block.h"

namespace fastsim {

// Elements, and multiply-adds of a product, that a thread should have before it is worth waking.
constexpr int64_t kGrain = 1 << 15, kProductGrain = 1 << 19;

inline int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Parts of `count`, as even as multiples of `step` are, no larger than `most`.
inline int64_t even_part(int64_t count, int64_t most, int64_t step) {
  const int64_t parts = std::max<int64_t>(1, tiles(count, most));
  return std::min(count, tiles(tiles(count, parts), step) * step);
}

// Calls f(begin, end) for pieces of [0, count), at once in several threads; what comes of it must
// not depend on how the whole is cut. Each thread has a share of its own. A piece is half of what is
// left of it: few pieces are faster, and the last ones are so small that no thread waits long for
// another. A thread that has done its own takes pieces that others have not begun, so that one that is
// held up, by another program or a slower core, does not hold up the rest.
// least: what a thread should have at least; piece: what a piece should, where that is more.
template <class F>
void share_out(int64_t count, int64_t least, const F& f, int64_t piece = 1) {
  constexpr int64_t kMostPieces = 6;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tiles(count, least));
  if (threads < 2) {
    if (count > 0) f(int64_t(0), count);
    return;
  }
  const int64_t smallest = std::max(least, piece);
  int64_t pieces = 1;
  while (pieces < kMostPieces && (count / threads) >> pieces >= smallest) ++pieces;
  std::vector<std::atomic<int64_t>> begun(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    for (int64_t k = 0; k < threads; ++k) {
      const int64_t owner = (first + k) % threads;
      const int64_t begin = count * owner / threads, end = count * (owner + 1) / threads;
      // Where a piece begins, and the one before it ends.
      const auto start = [&](int64_t at) { return at < pieces ? end - ((end - begin) >> at) : end; };
      for (int64_t next; (next = begun[owner].fetch_add(1)) < pieces;) f(start(next), start(next + 1));
    }
  });
}

// The same of `count` rows or columns; cost: the elements of one.
template <class F>
void over(int64_t count, int64_t cost, const F& f) {
  share_out(count, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost)), f);
}

// The same of rows of a product, whole register tiles of them: f(rows). cost: the multiply-adds of a
// row, of no depth none; piece: tiles.
template <class F>
void over_tiles(int64_t rows, int64_t cost, const F& f, int64_t piece = 1) {
  const auto run = [&](int64_t begin, int64_t end) {
    f(Range{begin * kTileRows, std::min(rows, end * kTileRows)});
  };
  const int64_t of_tile = kTileRows * std::max<int64_t>(1, cost);
  share_out(tiles(rows, kTileRows), 1 + kProductGrain / of_tile, run, piece);
}

}  // namespace fastsim
