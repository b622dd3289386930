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
// not depend on how the whole is cut. Each thread has a share of its own, in a few pieces. When it
// has done them it takes pieces that others have not begun: a thread that is held up, by another
// program or a slower core, does not hold up the rest. Beside a program that keeps one of two cores
// busy, InfoNCE of 2,048 x 384 takes 68 ms, and 90 where each thread does all of its own share.
// least: what a thread should have at least; piece: what a piece should, where that is more.
template <class F>
void share_out(int64_t count, int64_t least, const F& f, int64_t piece = 1) {
  constexpr int64_t kMostPieces = 4;  // smaller ones are slower, larger ones leave less to take
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tiles(count, least));
  if (threads < 2) {
    if (count > 0) f(int64_t(0), count);
    return;
  }
  const int64_t smallest = std::max(least, piece);
  const int64_t pieces = std::clamp<int64_t>(count / (smallest * threads), 1, kMostPieces);
  std::vector<std::atomic<int64_t>> begun(threads);
  const auto bound = [&](int64_t at) { return count * at / (threads * pieces); };
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    for (int64_t k = 0; k < threads; ++k) {
      const int64_t owner = (first + k) % threads;
      for (int64_t next; (next = begun[owner].fetch_add(1)) < pieces;) {
        const int64_t at = owner * pieces + next;
        f(bound(at), bound(at + 1));
      }
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
