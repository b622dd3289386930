// The epilogues: each computes the part of a loss that depends on one tile of scores. They apply
// the functions of csrc/epilogue.h to the scores in the registers of the tile's threads. A forward
// pass writes the partial results of the tile. A pass for score gradients replaces each score by
// dL/ds and stores the tile to the panel.
#pragma once

#include "tile.cuh"

namespace fastsim {

// The least maximum that exponentials are taken relative to. It is larger than kLeftOut, so that
// the exponential of a pair that is left out is 0, and smaller than every score. So the sum of a
// row whose pairs are all left out is 0, and a NaN in a row still makes its sum NaN.
constexpr float kFloor = -1e29f;

// A vector over the rows of the block, shifted so that it is indexed by the rows of the whole
// matrix. A null pointer stays null.
template <class Tile>
FASTSIM_DEVICE const float* shift_rows(const float* vector, const Tile& tile) {
  return vector ? vector - tile.grid.row0 : nullptr;
}

// ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----

// Subtracts the margin from the scores of the positives.
template <class Tile>
FASTSIM_DEVICE void subtract_margin(Tile& tile, const Pairs& pairs, float margin,
                                    typename Tile::Scores& s) {
  if (margin == 0.0f) return;
  for_column_of_row(tile, PositiveColumn{pairs.positives}, s,
                    [&](float& value, int, int) { value -= margin; });
}

template <class Tile>
FASTSIM_DEVICE void SoftmaxForward::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Softmax<float> softmax{*scale};
  leave_out(tile, pairs, s);
  if (positive) {
    subtract_margin(tile, pairs, margin, s);
    for_column_of_row(tile, PositiveColumn{pairs.positives}, s, [&](float& value, int i, int e) {
      positive[tile.row(i, e) - tile.grid.row0] = value;
    });
  } else {
    PerRow<float, Tile> weighted_scores{}, target_totals{};
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int i, int j, int e) {
        const float t = target(value, j, e);
        weighted_scores(i, e) = fused(t, value, weighted_scores(i, e));
        target_totals(i, e) += t;
      });
    });
    reduce_rows(tile, weighted_scores, Sum{});
    reduce_rows(tile, target_totals, Sum{});
    store_rows(tile, weighted_scores, target_scores);
    store_rows(tile, target_totals, target_sums);
  }

  tile.conceal_thread();
  PerRow<float, Tile> top, sum{};
  for_rows<Tile>([&](int i, int e) { top(i, e) = kLeftOut<float>; });
  for_scores(tile, s, [&](float& value, int i, int, int e) {
    top(i, e) = fmaxf(top(i, e), value);
  });
  reduce_rows(tile, top, Maximum{});
  store_rows(tile, top, row_top);
  for_rows<Tile>([&](int i, int e) { top(i, e) = fmaxf(top(i, e), kFloor); });
  for_scores(tile, s, [&](float& value, int i, int, int e) {
    sum(i, e) += softmax.share(value, top(i, e));
  });
  reduce_rows(tile, sum, Sum{});
  store_rows(tile, sum, row_sum);

  if (!column_top) return;
  float v[2 * Tile::Shape::column_blocks];  // a number for each of the thread's columns
#pragma unroll
  for (float& value : v) value = kLeftOut<float>;
  for_scores(tile, s, [&](float& value, int, int j, int e) {
    float& maximum = v[2 * j + e % 2];
    maximum = fmaxf(maximum, value);
  });
  tile.conceal_thread();
  const float* tile_tops = reduce_columns(tile, v, Maximum{});
  store_columns(tile, tile_tops, column_top);
#pragma unroll
  for (float& value : v) value = 0.0f;
  for_scores(tile, s, [&](float& value, int, int j, int e) {
    const float maximum = fmaxf(tile_tops[Tile::Shape::column_of(tile.thread, j, e)], kFloor);
    v[2 * j + e % 2] += softmax.share(value, maximum);
  });
  store_columns(tile, reduce_columns(tile, v, Sum{}), column_sum);
}

template <class Tile>
FASTSIM_DEVICE void SoftmaxScoreGrad::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Softmax<float> softmax{*scale};
  // The maximum of a row or column past the edge. It is larger than every score, so that the
  // exponentials there are 0, never infinite.
  constexpr float kEdgeMaximum = -kLeftOut<float>;
  leave_out(tile, pairs, s);
  subtract_margin(tile, pairs, margin, s);
  tile.conceal_thread();
  if (pairs.dense.data || pairs.row_groups) {
    with_targets(tile, pairs, [&](int block, auto target) {
      RowPair<float> top = load_rows(tile, block, shift_rows(row_top, tile), kEdgeMaximum);
      RowPair<float> weight = load_rows(tile, block, shift_rows(row_weight, tile), 0.0f);
      RowPair<float> target_factor = load_rows(tile, block, shift_rows(target_weight, tile), 0.0f);
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const float t = target(value, j, e);
        value = fused(weight(e), softmax.share(value, top(e)), -target_factor(e) * t);
      });
    });
    return tile.store(s);
  }
  const float *staged_tops = nullptr, *staged_weights = nullptr;
  if (column_top) {
    tile.sync();
    staged_tops = stage_columns<Tile, float>(tile, 0, column_top - tile.grid.column0, kEdgeMaximum);
    staged_weights = stage_columns<Tile, float>(tile, 1, column_weight - tile.grid.column0, 0.0f);
    tile.sync();
  }
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    RowPair<float> top = load_rows(tile, block, shift_rows(row_top, tile), kEdgeMaximum);
    RowPair<float> weight = load_rows(tile, block, shift_rows(row_weight, tile), 0.0f);
    if (column_top) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const int offset = Tile::Shape::column_of(tile.thread, j, e);
        value = fused(weight(e), softmax.share(value, top(e)),
                      staged_weights[offset] * softmax.share(value, staged_tops[offset]));
      });
    } else {
      for_block(tile, s, block, [&](float& value, int, int, int e) {
        value = weight(e) * softmax.share(value, top(e));
      });
    }
  }
  for_column_of_row(tile, PositiveColumn{pairs.positives}, s, [&](float& value, int i, int e) {
    value -= target_weight[tile.row(i, e) - tile.grid.row0];
  });
  tile.store(s);
}

// ---- elementwise losses ----

template <class Tile>
FASTSIM_DEVICE void SigmoidPass::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Sigmoid<float> sigmoid{*scale, *bias};
  leave_out(tile, pairs, s);
  PerRow<float, Tile> losses{}, score_grads{};
  with_targets(tile, pairs, [&](int block, auto target) {
    RowPair<float> weight = load_rows(tile, block, shift_rows(weights, tile), 0.0f);
    // `product` is, for each row, the product of 1 + exp(-|z|) over the thread's scores, minus 1.
    // Its log1p is the sum of the logarithms of the factors. It is below 2^32 for 32 scores. As 1
    // is subtracted, small numbers keep all their digits.
    RowPair<float> product{};
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      float exp_abs, d;
      const float l = sigmoid.without_logarithm(value, target(value, j, e), exp_abs, d);
      const bool left_out = value <= kLeftOut<float>;
      losses(i, e) += left_out ? 0.0f : l;
      score_grads(i, e) += left_out ? 0.0f : d;
      product(e) = left_out ? product(e) : fused(product(e), exp_abs, product(e) + exp_abs);
      value = left_out ? 0.0f : weight(e) * sigmoid.scale * d;
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
FASTSIM_DEVICE void SquaredErrorPass::operator()(Tile& tile, typename Tile::Scores& s) const {
  const SquaredError<float> error{};
  leave_out(tile, pairs, s);
  PerRow<float, Tile> losses{};
  with_targets(tile, pairs, [&](int block, auto target) {
    RowPair<float> weight = load_rows(tile, block, shift_rows(weights, tile), 0.0f);
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      float l, d;
      error(value, target(value, j, e), l, d);
      const bool left_out = value <= kLeftOut<float>;
      losses(i, e) += left_out ? 0.0f : l;
      value = left_out ? 0.0f : weight(e) * d;
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
        const bool in_level = target(value, j, e) == level && !(value <= kLeftOut<float>);
        high = in_level ? fmaxf(high, value) : high;
        low = in_level ? fmaxf(low, -value) : low;
      });
    });
    reduce_tile(tile, high, low, Maximum{});
    float high_sum = 0.0f, low_sum = 0.0f;
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const bool in_level = target(value, j, e) == level && !(value <= kLeftOut<float>);
        high_sum += in_level ? softmax.share(value, high) : 0.0f;
        low_sum += in_level ? softmax.share(-value, low) : 0.0f;
      });
    });
    reduce_tile(tile, high_sum, low_sum, Sum{});
    if (writes) {
      out[l] = high;
      out[count + l] = high_sum;
      out[2 * count + l] = low;
      out[3 * count + l] = low_sum;
    }
  }
}

template <class Tile>
FASTSIM_DEVICE void LevelsScoreGrad::operator()(Tile& tile, typename Tile::Scores& s) const {
  const Levels<float> rule{*scale};
  leave_out(tile, pairs, s);
  // The scores are replaced in place: a score belongs to one level, so it is replaced once.
#pragma unroll 1
  for (int l = 0; l < count; ++l) {
    const float level = levels[l], top = high[l], bottom = low[l], rise = up[l], fall = down[l];
    with_targets(tile, pairs, [&](int block, auto target) {
      for_block(tile, s, block, [&](float& value, int, int j, int e) {
        const bool in_level = target(value, j, e) == level && !(value <= kLeftOut<float>);
        const float score_grad = rule.score_grad(value, top, rise, bottom, fall);
        value = in_level ? score_grad : value;
      });
    });
  }
  for_scores(tile, s, [&](float& value, int, int, int) {
    value = value <= kLeftOut<float> ? 0.0f : value;
  });
  tile.store(s);
}

// ---- selection ----

// A column that may be chosen for a row, and its score.
struct Candidate {
  float score;
  int column;
};

// Chooses the candidate with the larger score; of equal scores the one with the smaller column.
struct CloserCandidate {
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
  for_column_of_row(tile, PositiveColumn{pairs.positives}, s,
                    [&](float& value, int, int) { value = kLeftOut<float>; });
  PerRow<Candidate, Tile> best;
  for_rows<Tile>([&](int i, int e) { best(i, e) = {kLeftOut<float>, INT32_MAX}; });
  tile.conceal_thread();
#pragma unroll
  for (int block = 0; block < Tile::Shape::row_blocks; ++block) {
    RowPair<float> limit = load_rows(tile, block, shift_rows(ceiling, tile), 0.0f);
    // A NaN is never chosen. It reaches the loss through the mean negative.
    for_block(tile, s, block, [&](float& value, int i, int j, int e) {
      const bool better = rule.admits(value, limit(e)) && value > best(i, e).score;
      best(i, e).score = better ? value : best(i, e).score;
      best(i, e).column = better ? tile.column(j, e) : best(i, e).column;
    });
  }
  reduce_rows(tile, best, CloserCandidate{});
  PerRow<float, Tile> best_score;
  PerRow<int32_t, Tile> best_column;
  for_rows<Tile>([&](int i, int e) {
    best_score(i, e) = best(i, e).score;
    best_column(i, e) = best(i, e).column;
  });
  store_rows(tile, best_score, top);
  store_rows(tile, best_column, column);
}

// The column on the diagonal of a row.
struct DiagonalColumn {
  FASTSIM_DEVICE int operator()(int row) const { return row; }
};

template <class Tile>
FASTSIM_DEVICE void Diagonal::operator()(Tile& tile, typename Tile::Scores& s) const {
  for_column_of_row(tile, DiagonalColumn{}, s,
                    [&](float& value, int i, int e) { out[tile.row(i, e)] = value; });
}

}  // namespace fastsim
