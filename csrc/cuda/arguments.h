// What the host passes to the kernels: plain data and declarations. Both ops.cpp, which includes
// torch's headers, and the kernels, which do not, include this file.
//
// A `block` is the part [row0, row1) x [column0, column1) of the score matrix. The vectors of a
// loss and the partial results are indexed within the block. The vectors and the dense targets of
// Pairs are indexed by the row and column of the whole matrix.
//
// Partial results by row have the shape (columns of tiles, rows of the block), partial results by
// column (rows of tiles, columns of the block). Each tile writes to memory that no other tile
// writes to, so nothing is added atomically.
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

// The product that makes the scores. half: of float16 operands. tf32: of float32 operands, in TF32.
// full: of float32 operands, in float32.
enum class Product { half, tf32, full };

// The unit rows of both sides: x has x_rows rows, y has y_rows. Each row is padded with zeros to
// whole lines of 128 bytes.
struct Operands {
  const void *x, *y;
  int x_rows, y_rows;
  int64_t row_bytes;  // bytes of a row of x or y, padding included
  Product product;
};

// The tiles of a block. `diagonal`: only tiles on the diagonal are computed. `lower`: pairs with
// column <= row are left out, so tiles below the diagonal need no product.
struct Grid {
  int row0, row1, column0, column1;
  int tile_rows, tile_columns;
  bool diagonal, lower;

  // A stack is `height` tiles, one below another. One thread block computes a stack of height 1, a
  // cluster a higher one. stack_count() is the number of stacks, stack_position() the position of
  // the stack with an index, and has_product() says whether any pair of a stack takes part.
  FASTSIM_HOST_DEVICE int stack_rows(int height) const { return (tile_rows + height - 1) / height; }
  FASTSIM_HOST_DEVICE int64_t stack_count(int height) const {
    return int64_t{stack_rows(height)} * (diagonal ? height : tile_columns);
  }
  FASTSIM_HOST_DEVICE Position stack_position(int64_t index, int height) const {
    if (diagonal) return {static_cast<int>(index / height), static_cast<int>(index)};
    constexpr int kBand = 16;  // rows of tiles
    return tile_position(index, stack_rows(height), tile_columns, kBand / height);
  }
  FASTSIM_HOST_DEVICE bool has_product(const Position& stack, int height) const {
    const int64_t row = row0 + static_cast<int64_t>(stack.row) * height * kTile;
    return !lower || column0 + (stack.column + int64_t{1}) * kTile > row + 1;
  }
};

// Memory for the score gradients of the block, row-major. `stride` counts elements. Without `data`
// there is no panel.
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

// The fields of fastsim.pairs.Pairs. A field that the caller leaves out is null.
struct Pairs {
  const int64_t *positives, *row_ids, *column_ids, *row_groups, *column_groups;
  Matrix dense;
  float negative_target;
  Skip skip;
};

// ---- epilogues: what a loss does with a tile of scores (epilogues.cuh) ----
// Scalars such as the scale are read from device memory, so that the host does not wait for them.
// Score gradients replace the scores in the registers and are stored to the panel.

#define FASTSIM_EPILOGUE \
  template <class Tile>  \
  FASTSIM_DEVICE void operator()(Tile& tile, typename Tile::Scores& s) const;

struct SoftmaxForward {
  Pairs pairs;
  const float* scale;
  float margin;
  float *row_top, *row_sum;  // partial maxima and sums of exponentials
  float* positive;           // the score of each row's positive; null if there are targets
  float *target_scores, *target_sums;  // partial sums of t s and of t; not used with `positive`
  float *column_top, *column_sum;  // the same by column; null if no sums over columns are needed
  FASTSIM_EPILOGUE
};

struct SoftmaxScoreGrad {
  Pairs pairs;
  const float* scale;
  float margin;
  const float *row_top, *row_weight, *target_weight;
  const float *column_top, *column_weight;  // null if the loss has no sums over columns
  FASTSIM_EPILOGUE
};

// Computes the state (the partial sums `loss` and `score_grad`), the score gradients (for which
// `weights` has the weight of each row in the loss) or both. Without the state, `loss` and
// `score_grad` are null; without the score gradients, `weights` is null.
struct SigmoidPass {
  Pairs pairs;
  const float *scale, *bias;
  const float* weights;
  float *loss, *score_grad;
  FASTSIM_EPILOGUE
};

// Computes the state, the score gradients or both, as SigmoidPass does.
struct SquaredErrorPass {
  Pairs pairs;
  const float* weights;
  float* loss;
  FASTSIM_EPILOGUE
};

// `partials` has the shape (tiles, 4, count). For each of `count` levels a tile has four numbers:
// the maximum of s and its sum of exponentials, the maximum of -s and its sum of exponentials.
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
  const float* ceiling;  // the largest score that each row may choose; null if it may choose any
  float* top;            // partial results: the largest score of each row
  int32_t* column;       // partial results: the column of that score
  FASTSIM_EPILOGUE
};

// Writes the score of row i and column i to out[i].
struct Diagonal {
  float* out;
  FASTSIM_EPILOGUE
};

#undef FASTSIM_EPILOGUE

template <class Epilogue>
void launch_tiles(const Launch& launch, const Epilogue& epilogue);

// ---- passes over rows and lists (rows.cu, scan.cu) ----

// Writes the unit rows x / |x| of x (rows, depth) to `unit` (rows, width), padded with zeros, and
// the inverse norms 1 / |x| to `inverse` (rows,), where a zero row has 0. Where `inverse` is null,
// the rows are copied and not normalised. The results are operands of `product`: float16 for half,
// rounded to TF32 for tf32, float32 without rounding for full.
void launch_unit_rows(const Matrix& x, int64_t rows, int64_t depth, void* unit, int64_t width,
                      float* inverse, Product product, void* stream);

// Writes the gradient dx = factor r (g - (u . g) u) of each row x to `grad` (rows, depth). Here r
// is the inverse norm, u = r x the unit row and g = dL/du its row of `grad_unit` (rows, depth).
// `grad` has x's dtype, or float32 if `float32_grad` is set. `dots` (rows,) receives u . g.
void launch_unit_rows_backward(const float* grad_unit, const Matrix& x, int64_t rows, int64_t depth,
                               const float* inverse, const float* factor, void* grad,
                               bool float32_grad, float* dots, void* stream);

// Merges partial maxima `tops` and sums of exponentials `sums`, both (tiles, count), into `top` and
// `sum` (count,), in the order of the tiles. `accumulate`: `top` and `sum` have earlier results,
// which are merged with these.
void launch_merge(const float* tops, const float* sums, int64_t tiles, int64_t count,
                  const float* scale, bool accumulate, float* top, float* sum, void* stream);

// Writes running log-sum-exps to `out` (2, count): first those of the logits, from the first to the
// last, then those of the negated logits, from the last to the first. `scratch` has the shape
// (2, parts, 2), where scan_parts() is the number of parts of the list.
int64_t scan_parts(int64_t count);
void launch_scan(const float* logits, int64_t count, double* scratch, double* out, void* stream);

// Makes `device` the current device as long as the object lives. If it is the current device
// already, cudaSetDevice is not called, because it would create a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, previous_;
};

}  // namespace fastsim
