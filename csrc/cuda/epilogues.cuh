// What each loss does with a tile of scores: the functions of csrc/epilogue.h over the registers of
// its threads. A forward pass writes the partials of the tile, a score gradient replaces the
// scores by dL/ds.
#pragma once

#include "tile.cuh"

namespace fastsim {

// Above every pair left out and below every score: exponentials relative to it are 0 for the
// former, so that a row without any pair sums to 0 (and with a NaN to NaN).
constexpr float kFloor = -1e29f;

// A vector of the block's rows as if of the whole matrix.
template <class Tile>
FASTSIM_DEVICE const float* of_rows(const float* vector, const Tile& tile) {
  return vector ? vector - tile.grid.row0 : nullptr;
}

// ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----

template <class Tile>
FASTSIM_DEVICE void take_margin(Tile& tile, const Pairs& pairs, float margin,
                                typename Tile::Scores& s) {
  if (margin == 0.0f) return;
  at_own(tile, OwnColumn{pairs.positives}, s, [&](float& value, int, int) { value -= margin; });
}

template <class Tile>
FASTSIM_DEVICE void SoftmaxForward::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Softmax<float> softmax{*scale};
  leave_out(tile, pairs, s);
  if (positive) {
    take_margin(tile, pairs, margin, s);
    at_own(tile, OwnColumn{pairs.positives}, s, [&](float& value, int i, int e) {
      positive[tile.row(i, e) - tile.grid.row0] = value;
    });
  } else {
    PerRow<float, Tile> scores{}, sums{};
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int i, int j, int e) {
        const float t = target(value, j, e);
        scores(i, e) = fused(t, value, scores(i, e));
        sums(i, e) += t;
      });
    });
    reduce_rows(tile, scores, Sum{});
    reduce_rows(tile, sums, Sum{});
    store_rows(tile, scores, target_scores);
    store_rows(tile, sums, target_sums);
  }

  tile.forget();
  PerRow<float, Tile> top, sum{};
  for_rows<Tile>([&](int i, int e) { top(i, e) = kLeftOut<float>; });
  for_scores(tile, s, [&](float& value, int i, int, int e) {
    top(i, e) = fmaxf(top(i, e), value);
  });
  reduce_rows(tile, top, Largest{});
  store_rows(tile, top, row_top);
  for_rows<Tile>([&](int i, int e) { top(i, e) = fmaxf(top(i, e), kFloor); });
  for_scores(tile, s, [&](float& value, int i, int, int e) {
    sum(i, e) += softmax.share(value, top(i, e));
  });
  reduce_rows(tile, sum, Sum{});
  store_rows(tile, sum, row_sum);

  if (!column_top) return;
  float v[2 * Tile::Shape::column_blocks];
#pragma unroll
  for (float& value : v) value = kLeftOut<float>;
  for_scores(tile, s, [&](float& value, int, int j, int e) {
    float& most = v[2 * j + e % 2];
    most = fmaxf(most, value);
  });
  tile.forget();
  const float* tops = reduce_columns(tile, v, Largest{});
  store_columns(tile, tops, column_top);
#pragma unroll
  for (float& value : v) value = 0.0f;
  for_scores(tile, s, [&](float& value, int, int j, int e) {
    const float most = fmaxf(tops[Tile::Shape::column_of(tile.thread, j, e)], kFloor);
    v[2 * j + e % 2] += softmax.share(value, most);
  });
  store_columns(tile, reduce_columns(tile, v, Sum{}), column_sum);
}

template <class Tile>
FASTSIM_DEVICE void SoftmaxScoreGrad::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Softmax<float> softmax{*scale};
  // Past the edge a maximum above every score: its exponential is 0, never infinite.
  constexpr float kAbove = -kLeftOut<float>;
  leave_out(tile, pairs, s);
  take_margin(tile, pairs, margin, s);
  tile.forget();
  if (pairs.dense.data || pairs.row_groups) {
    with_targets(tile, pairs, [&](int block, auto target) {
      Two<float> top = load_rows(tile, block, of_rows(row_top, tile), kAbove);
      Two<float> weight = load_rows(tile, block, of_rows(row_weight, tile), 0.0f);
      Two<float> share = load_rows(tile, block, of_rows(target_weight, tile), 0.0f);
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const float t = target(value, j, e);
        value = fused(weight(e), softmax.share(value, top(e)), -share(e) * t);
      });
    });
    return tile.store(s);
  }
  const float *tops = nullptr, *weights = nullptr;
  if (column_top) {
    tile.sync();
    tops = stage_columns<Tile, float>(tile, 0, column_top - tile.grid.column0, kAbove);
    weights = stage_columns<Tile, float>(tile, 1, column_weight - tile.grid.column0, 0.0f);
    tile.sync();
  }
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    Two<float> top = load_rows(tile, block, of_rows(row_top, tile), kAbove);
    Two<float> weight = load_rows(tile, block, of_rows(row_weight, tile), 0.0f);
    if (column_top) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const int place = Tile::Shape::column_of(tile.thread, j, e);
        value = fused(weight(e), softmax.share(value, top(e)),
                      weights[place] * softmax.share(value, tops[place]));
      });
    } else {
      for_block(tile, s, block, [&](float& value, int, int, int e) {
        value = weight(e) * softmax.share(value, top(e));
      });
    }
  }
  at_own(tile, OwnColumn{pairs.positives}, s, [&](float& value, int i, int e) {
    value -= target_weight[tile.row(i, e) - tile.grid.row0];
  });
  tile.store(s);
}

// ---- elementwise losses ----

template <class Tile>
FASTSIM_DEVICE void SigmoidBoth::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Sigmoid<float> sigmoid{*scale, *bias};
  leave_out(tile, pairs, s);
  PerRow<float, Tile> losses{}, score_grads{};
  with_targets(tile, pairs, [&](int block, auto target) {
    Two<float> weight = load_rows(tile, block, of_rows(weights, tile), 0.0f);
    // All 1 + e of the thread's part of a row multiplied, less 1: below 2^32 for 32 scores. Its
    // logarithm is the sum of theirs, and small numbers keep all their digits.
    Two<float> product{};
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      float share, d;
      const float l = sigmoid.without_logarithm(value, target(value, j, e), share, d);
      const bool out = value <= kLeftOut<float>;
      losses(i, e) += out ? 0.0f : l;
      score_grads(i, e) += out ? 0.0f : d;
      product(e) = out ? product(e) : fused(product(e), share, product(e) + share);
      value = out ? 0.0f : weight(e) * sigmoid.scale * d;
    });
    losses(block, 0) += log1pf(product(0));
    losses(block, 2) += log1pf(product(2));
  });
  if (loss) {
    reduce_rows(tile, losses, Sum{});
    reduce_rows(tile, score_grads, Sum{});
    store_rows(tile, losses, loss);
    store_rows(tile, score_grads, score_grad);
  }
  if (weights) tile.store(s);
}

template <class Tile>
FASTSIM_DEVICE void SquaredErrorBoth::operator()(Tile& tile, typename Tile::Scores& s) const {
  const SquaredError<float> error{};
  leave_out(tile, pairs, s);
  PerRow<float, Tile> losses{};
  with_targets(tile, pairs, [&](int block, auto target) {
    Two<float> weight = load_rows(tile, block, of_rows(weights, tile), 0.0f);
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      float l, d;
      error(value, target(value, j, e), l, d);
      const bool out = value <= kLeftOut<float>;
      losses(i, e) += out ? 0.0f : l;
      value = out ? 0.0f : weight(e) * d;
    });
  });
  if (loss) {
    reduce_rows(tile, losses, Sum{});
    store_rows(tile, losses, loss);
  }
  if (weights) tile.store(s);
}

// ---- CoSENT over a matrix ----

template <class Tile>
FASTSIM_DEVICE void LevelsForward::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Softmax<float> softmax{*scale};
  leave_out(tile, pairs, s);
  const int64_t index = int64_t{tile.tile_row} * tile.grid.tile_columns + tile.tile_column;
  float* out = partials + index * 4 * count;
  const bool writes = tile.thread == 0 && tile.tile_row < tile.grid.tile_rows;
#pragma unroll 1
  for (int l = 0; l < count; ++l) {
    const float level = levels[l];
    float high = kLeftOut<float>, low = kLeftOut<float>;
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        // A NaN compares false with kLeftOut, so it stays in its level.
        const bool here = target(value, j, e) == level && !(value <= kLeftOut<float>);
        high = here ? fmaxf(high, value) : high;
        low = here ? fmaxf(low, -value) : low;
      });
    });
    reduce_tile(tile, high, low, Largest{});
    float above = 0.0f, below = 0.0f;
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const bool here = target(value, j, e) == level && !(value <= kLeftOut<float>);
        above += here ? softmax.share(value, high) : 0.0f;
        below += here ? softmax.share(-value, low) : 0.0f;
      });
    });
    reduce_tile(tile, above, below, Sum{});
    if (writes) {
      out[l] = high;
      out[count + l] = above;
      out[2 * count + l] = low;
      out[3 * count + l] = below;
    }
  }
}

template <class Tile>
FASTSIM_DEVICE void LevelsScoreGrad::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Levels<float> score_grads{*scale};
  leave_out(tile, pairs, s);
  // In place: a score is of one level, so it is replaced once.
#pragma unroll 1
  for (int l = 0; l < count; ++l) {
    const float level = levels[l], top = high[l], bottom = low[l], rise = up[l], fall = down[l];
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const bool here = target(value, j, e) == level && !(value <= kLeftOut<float>);
        const float score_grad = score_grads.score_grad(value, top, rise, bottom, fall);
        value = here ? score_grad : value;
      });
    });
  }
  for_scores(tile, s, [&](float& value, int, int, int) {
    value = value <= kLeftOut<float> ? 0.0f : value;
  });
  tile.store(s);
}

// ---- selection ----

struct Candidate {
  float score;
  int column;
};

// The larger score, the smaller column among equals.
struct Closer {
  FASTSIM_DEVICE Candidate operator()(const Candidate& a, const Candidate& b) const {
    const bool second = b.score > a.score || (b.score == a.score && b.column < a.column);
    return second ? b : a;
  }
};

template <>
FASTSIM_DEVICE Candidate lane_exchange(Candidate value, int mask) {
  return {lane_exchange(value.score, mask), lane_exchange(value.column, mask)};
}

template <class Tile>
FASTSIM_DEVICE void ClosestForward::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Closest<float> rule{ceiling != nullptr};
  leave_out(tile, pairs, s);
  at_own(tile, OwnColumn{pairs.positives}, s,
         [&](float& value, int, int) { value = kLeftOut<float>; });
  PerRow<Candidate, Tile> best;
  for_rows<Tile>([&](int i, int e) { best(i, e) = {kLeftOut<float>, INT32_MAX}; });
  tile.forget();
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    Two<float> limit = load_rows(tile, block, of_rows(ceiling, tile), 0.0f);
    // A NaN is no candidate; it reaches the loss through the mean negative.
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      const bool better = rule.admits(value, limit(e)) && value > best(i, e).score;
      best(i, e).score = better ? value : best(i, e).score;
      best(i, e).column = better ? tile.column(j, e) : best(i, e).column;
    });
  }
  reduce_rows(tile, best, Closer{});
  PerRow<float, Tile> score;
  PerRow<int32_t, Tile> place;
  for_rows<Tile>([&](int i, int e) {
    score(i, e) = best(i, e).score;
    place(i, e) = best(i, e).column;
  });
  store_rows(tile, score, top);
  store_rows(tile, place, column);
}

struct SameColumn {
  FASTSIM_DEVICE int operator()(int row) const { return row; }
};

template <class Tile>
FASTSIM_DEVICE void Diagonal::operator()(Tile& tile, typename Tile::Scores& s) const {
  at_own(tile, SameColumn{}, s, [&](float& value, int i, int e) { out[tile.row(i, e)] = value; });
}

}  // namespace fastsim
