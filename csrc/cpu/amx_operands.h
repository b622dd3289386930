// Packs the operands of bfloat16 products, on all threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "amx.h"
#include "arguments.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {

// The kernels of this processor; an error if it has none.
inline const AmxKernels& amx_in_use() {
  const AmxKernels* found = amx_kernels();
  STD_TORCH_CHECK(found, "fastsim: no AMX here");
  return *found;
}

inline int64_t check_parts(int64_t parts) {
  STD_TORCH_CHECK(parts >= 1 && parts <= kAllParts, "fastsim: parts: wanted 1 to ", kAllParts,
                  ", got ", parts);
  return parts;
}

// The rows of x (N, D), to be packed times their powers (amx.h); null: 1.
inline ScaledMatrix scaled_matrix(const Tensor& x, const float* powers = nullptr) {
  const Dtype dtype = dtype_of(x);
  const bool row_major = x.stride(1) == 1 || x.size(1) == 1;
  if (!row_major || (dtype != Dtype::float32 && dtype != Dtype::float16 &&
                     dtype != Dtype::bfloat16)) {
    refuse("rows", x, "row-major ones of float32, float16 or bfloat16");
  }
  return {matrix(x), powers, nullptr};
}

// `count`, rounded up to a multiple of kTileGroup.
inline int64_t padded(int64_t count) { return ceil_div(count, kTileGroup) * kTileGroup; }

// The number of elements of an operand of `count` rows (or columns) and this depth.
inline int64_t operand_elements(int64_t count, int64_t depth, int64_t parts) {
  return 2 * ceil_div(count, kTileGroup) * parts * ceil_div(depth, kTileDepth) * kTileElements;
}

// Packs all strips of an operand of `count` rows (or columns), whose depth is entries
// [first, first + depth) of the matrix. Returns false if an entry is not finite.
inline bool pack_all(TileLayout layout, const ScaledMatrix& from, int64_t count, int64_t first,
                     int64_t depth, int64_t parts, uint16_t* to) {
  std::atomic<bool> finite{true};
  over(2 * ceil_div(count, kTileGroup), kTileSide * depth * parts, [&](int64_t begin, int64_t end) {
    if (!amx_in_use().pack(layout, from, count, first, depth, parts, to, {begin, end})) {
      finite = false;
    }
  });
  return finite;
}

// Packs a matrix (depth, width) as the right operand of gradient products, in blocks of kBlockDepth
// rows that follow one another. Together they have operand_elements(width, depth, parts) elements.
inline void pack_right(const ScaledMatrix& from, int64_t depth, int64_t width, int64_t parts,
                       uint16_t* to) {
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t rows = std::min(kBlockDepth, depth - k);
    pack_all(TileLayout::row_pairs, from, width, k, rows, parts, to);
    to += operand_elements(width, rows, parts);
  }
}

// Writes the norms of the rows (power x) of an operand, given their inverses (null: all are 1), and
// zeros up to the next kTileGroup.
inline void norms_of_operand(const float* inverse, int64_t count, float* norms) {
  for (int64_t i = 0; i < count; ++i) {
    norms[i] = !inverse ? 1.0f : inverse[i] == 0 ? 0.0f : 1 / inverse[i];
  }
  std::fill(norms + count, norms + padded(count), 0.0f);
}

// Writes the mean (width,) of some unit rows (inverse power x), by which residuals are multiplied.
// `kEnough` rows are enough. They are unit rows, since with others the long rows would make the
// residuals of short rows larger than these are.
inline void mean_row(const ScaledMatrix& rows, const float* inverse, int64_t count, int64_t width,
                     float* mean) {
  constexpr int64_t kEnough = 64;
  const int64_t samples = std::min(count, kEnough);
  const Scratch<float> row(width);
  std::fill_n(mean, width, 0.0f);
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t sample = i * count / samples;
    kernels().of<float>().token_rows(rows.matrix, &sample, 1, width, false, row);
    const float power = rows.row_scale ? rows.row_scale[sample] : 1.0f;
    const float factor = power * (inverse ? inverse[sample] : 1.0f) / float(samples);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) mean[k] += factor * row[k];
  }
}

}  // namespace fastsim
