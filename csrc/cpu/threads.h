// Divides work among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "block.h"

namespace fastsim {

// The least number of elements, and of multiply-adds of a product, that are worth waking a thread
// for. In a virtual machine that may take 30 to 50 us, three times as long as a core takes for half
// of a product of 64 x 64 x 384.
constexpr int64_t kGrain = 1 << 15, kProductGrain = 3 << 19;

// count / size, rounded up.
inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The size of the parts that `count` is cut into: as even as multiples of `step` can be, and at
// most `largest`, where that is a multiple of `step`.
inline int64_t even_part(int64_t count, int64_t largest, int64_t step) {
  const int64_t parts = std::max<int64_t>(1, ceil_div(count, largest));
  return std::min(count, ceil_div(ceil_div(count, parts), step) * step);
}

// Calls f(begin, end) for pieces of [0, count), in several threads at once. The result must not
// depend on how the range is cut. Each thread owns an equal share. Each piece is half of what is
// left of a share: a few pieces are faster than many, and the last ones are so small that no thread
// waits long for another. A thread that has finished its own share takes pieces that other threads
// have not begun, so that a thread held up by another program or a slower core does not hold up the
// rest.
//
// min_share: the least size of a thread's share. min_piece: the least size of a piece, if that is
// more.
template <class F>
void share_out(int64_t count, int64_t min_share, const F& f, int64_t min_piece = 1) {
  constexpr int64_t kMostPieces = 6;
  const int64_t threads =
      std::min<int64_t>(torch::stable::get_num_threads(), ceil_div(count, min_share));
  if (threads < 2) {
    if (count > 0) f(int64_t(0), count);
    return;
  }
  const int64_t smallest = std::max(min_share, min_piece);
  int64_t pieces = 1;
  while (pieces < kMostPieces && (count / threads) >> pieces >= smallest) ++pieces;
  std::vector<std::atomic<int64_t>> begun(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    for (int64_t k = 0; k < threads; ++k) {
      const int64_t owner = (first + k) % threads;
      const int64_t begin = count * owner / threads, end = count * (owner + 1) / threads;
      // Where piece `at` begins and the piece before it ends.
      const auto start = [&](int64_t at) {
        return at < pieces ? end - ((end - begin) >> at) : end;
      };
      for (int64_t next; (next = begun[owner].fetch_add(1)) < pieces;) {
        f(start(next), start(next + 1));
      }
    }
  });
}

// Calls f(begin, end) for pieces of `count` rows or columns, as `share_out` does. cost: the number
// of elements of one of them.
template <class F>
void over(int64_t count, int64_t cost, const F& f) {
  share_out(count, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost)), f);
}

// Calls f(rows) for pieces of the rows of a product, as `share_out` does. A piece consists of whole
// register tiles. cost: the multiply-adds of a row, 0 if the product has no depth. min_piece: in
// tiles.
template <class F>
void over_tiles(int64_t rows, int64_t cost, const F& f, int64_t min_piece = 1) {
  const auto run = [&](int64_t begin, int64_t end) {
    f(Range{begin * kTileRows, std::min(rows, end * kTileRows)});
  };
  const int64_t tile_cost = kTileRows * std::max<int64_t>(1, cost);
  share_out(ceil_div(rows, kTileRows), 1 + kProductGrain / tile_cost, run, min_piece);
}

}  // namespace fastsim
