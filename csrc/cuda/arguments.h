// What the host tells the kernels. Plain data and declarations: ops.cpp, which sees torch, and the
// kernels, which do not, meet here.
//
// A `block` is rows [row0, row1) against columns [column0, column1) of the score matrix. Vectors
// of a loss and partial results belong to the block; pairs are indexed by the whole matrix. Partial
// results of rows are (columns of tiles, rows of the block), those of columns (rows of tiles,
// columns of the block): each tile has a place of its own, so nothing is added atomically.
#pragma once

#include <cstdint>

#include "layout.h"
#include "matrix.h"

#if defined(__CUDACC__)
#define FASTSIM_DEVICE __device__ __forceinline__
#else
#define FASTSIM_DEVICE inline
#endif

namespace fastsim {

// The product that makes the scores: operands float16; float32 in tf32; float32 in full.
enum class Product { half, tf32, full };

// Unit rows padded with zeros to whole lines of 128 bytes.
struct Operands {
  const void *x, *y;
  int x_rows, y_rows;
  int64_t row_bytes;  // of both
  Product product;
};

// The tiles of a block. `diagonal`: only those on the diagonal. `lower`: pairs with column <= row
// take no part, so tiles below the diagonal have no product.
struct Grid {
  int row0, row1, column0, column1;
  int tile_rows, tile_columns;
  bool diagonal, lower;

  // Places in units of `tall` tiles of a column.
  FASTSIM_BOTH int64_t count(int tall) const {
    const int64_t high = (tile_rows + tall - 1) / tall;
    return high * (diagonal ? tall : tile_columns);
  }
  FASTSIM_BOTH Place place(int64_t index, int tall) const {
    if (diagonal) return {static_cast<int>(index / tall), static_cast<int>(index)};
    constexpr int kBand = 16;  // tiles
    return tile_place(index, (tile_rows + tall - 1) / tall, tile_columns, kBand / tall);
  }
  FASTSIM_BOTH bool has_product(const Place& place, int tall) const {
    const int64_t row = row0 + static_cast<int64_t>(place.row) * tall * kTile;
    return !lower || column0 + (place.column + int64_t{1}) * kTile > row + 1;
  }
};

struct Panel {
  void* data = nullptr;
  int64_t stride = 0;
};

struct Launch {
  Operands operands;
  Grid grid;
  Panel panel;
  void* stream;
};

// fastsim.pairs.Pairs. Null: not given.
struct Pairs {
  const int64_t *positives, *row_ids, *column_ids, *row_groups, *column_groups;
  Matrix dense;
  float negative_target;
  Skip skip;
};

// ---- epilogues: what a loss does with a tile of scores (epilogues.cuh) ----
// Numbers are read from the device, so that nothing waits for them. Score gradients replace the
// scores and go to the panel.

#define FASTSIM_EPILOGUE \
  template <class Tile>  \
  FASTSIM_DEVICE void operator()(Tile& tile, typename Tile::Scores& s) const;

struct SoftmaxForward {
  Pairs pairs;
  const float* scale;
  float margin;
  float *row_top, *row_sum;
  float* positive;                     // the score of each row's positive, or
  float *target_scores, *target_sums;  // the partial sums of t s and of t
  float *column_top, *column_sum;      // null: rows alone
  FASTSIM_EPILOGUE
};

struct SoftmaxScoreGrad {
  Pairs pairs;
  const float* scale;
  float margin;
  const float *row_top, *row_weight, *target_weight;
  const float *column_top, *column_weight;  // null: rows alone
  FASTSIM_EPILOGUE
};

// State, score gradients or both: null what is not wanted.
struct SigmoidBoth {
  Pairs pairs;
  const float *scale, *bias;
  const float* weights;
  float *loss, *score_grad;
  FASTSIM_EPILOGUE
};

struct SquaredErrorBoth {
  Pairs pairs;
  const float* weights;
  float* loss;
  FASTSIM_EPILOGUE
};

// (tiles, 4, count): maximum of s, sum of exponentials, the same of -s.
struct LevelsForward {
  Pairs pairs;
  const float* scale;
  const float* levels;
  int count;
  float* partials;
  FASTSIM_EPILOGUE
};

struct LevelsScoreGrad {
  Pairs pairs;
  const float* scale;
  const float* levels;
  int count;
  const float *high, *up, *low, *down;
  FASTSIM_EPILOGUE
};

struct ClosestForward {
  Pairs pairs;
  const float* ceiling;  // null: none
  float* top;
  int32_t* column;
  FASTSIM_EPILOGUE
};

// The score of row i and column i.
struct Diagonal {
  float* out;
  FASTSIM_EPILOGUE
};

#undef FASTSIM_EPILOGUE

template <class Epilogue>
void launch_tiles(const Launch& launch, const Epilogue& epilogue);

// ---- passes over rows and lists (rows.cu, scan.cu) ----

// x / |x| in rows of `width`, zeros past x's; `inverse` keeps 1 / |x| or 0. Without `inverse` x
// is copied as it is. `product`: whose operands they become; full leaves float32 alone.
void launch_unit_rows(const Matrix& x, int64_t rows, int64_t depth, void* unit, int64_t width,
                      float* inverse, Product product, void* stream);

// dx = factor r (g - (u . g) u) for g = dL/du, u = r x, in x's dtype or float32; `dots` keeps
// u . g.
void launch_unit_rows_backward(const float* grad_unit, const Matrix& x, int64_t rows,
                               int64_t depth, const float* inverse, const float* factor,
                               void* grad, bool single, float* dots, void* stream);

// (tiles, count) maxima and sums of exponentials into (count,), in the order of the tiles;
// `running`: together with what is there.
void launch_merge(const float* tops, const float* sums, int64_t tiles, int64_t count,
                  const float* scale, bool running, float* top, float* sum, void* stream);

// Running log-sum-exps (2, count): of the logits forward, of their negatives backward.
// `scratch`: (2, scan_parts(count), 2).
int64_t scan_parts(int64_t count);
void launch_scan(const float* logits, int64_t count, double* scratch, double* out, void* stream);

// Makes a device the current one as long as it lives. Where it is already, nothing is set:
// cudaSetDevice makes a context, even for the device that is current.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_;
};

}  // namespace fastsim
