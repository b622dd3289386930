// Operands of products on a matrix unit, packed on all threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "amx.h"
#include "arguments.h"
#include "passes.h"
#include "scratch.h"

namespace fastsim {

inline const AmxKernels& amx_in_use() {
  const AmxKernels* found = amx_kernels();
  STD_TORCH_CHECK(found, "fastsim: no AMX here");
  return *found;
}

inline int64_t check_parts(int64_t parts) {
  STD_TORCH_CHECK(parts >= 1 && parts <= 3, "fastsim: parts: wanted one to three, got ", parts);
  return parts;
}

// What is packed of rows; powers: theirs (amx.h), or null.
inline Packed packed_matrix(const Tensor& x, const float* powers = nullptr) {
  const Dtype dtype = dtype_of(x);
  const bool row_major = x.stride(1) == 1 || x.size(1) == 1;
  if (!row_major || (dtype != Dtype::float32 && dtype != Dtype::float16 &&
                     dtype != Dtype::bfloat16)) {
    refuse("rows", x, "row-major ones of float32, float16 or bfloat16");
  }
  return {matrix(x), powers, nullptr};
}

// To the next kTileGroup.
inline int64_t padded(int64_t count) { return tiles(count, kTileGroup) * kTileGroup; }

// Elements of an operand of `count` rows (or columns) of that depth.
inline int64_t operand_elements(int64_t count, int64_t depth, int64_t parts) {
  return 2 * tiles(count, kTileGroup) * parts * tiles(depth, kTileDepth) * kTileElements;
}

// Packs all strips of (a block of) a matrix; false if an entry is not finite.
inline bool pack_all(Pack form, const Packed& from, int64_t count, int64_t first, int64_t depth,
                     int64_t parts, uint16_t* to) {
  std::atomic<bool> finite{true};
  over(2 * tiles(count, kTileGroup), kTileSide * depth * parts, [&](int64_t begin, int64_t end) {
    if (!amx_in_use().pack(form, from, count, first, depth, parts, to, {begin, end})) {
      finite = false;
    }
  });
  return finite;
}

// Packs a matrix (depth, width) as the right operand of gradient products: operand_elements of
// these in all, kBlockDepth rows after another.
inline void pack_right(const Packed& from, int64_t depth, int64_t width, int64_t parts,
                       uint16_t* to) {
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t rows = std::min(kBlockDepth, depth - k);
    pack_all(Pack::pairs, from, width, k, rows, parts, to);
    to += operand_elements(width, rows, parts);
  }
}

// The norms of (power x) of `count` rows with these inverse ones (null: all are 1), and zeros up to
// the next kTileGroup.
inline void norms_of_operand(const float* inverse, int64_t count, float* norms) {
  for (int64_t i = 0; i < count; ++i) {
    norms[i] = !inverse ? 1.0f : inverse[i] == 0 ? 0.0f : 1 / inverse[i];
  }
  std::fill(norms + count, norms + padded(count), 0.0f);
}

// A mean of unit rows (inverse power x), to multiply residuals: so many of them will do. Of unit rows,
// since long ones would make of the residuals of short ones more than these are.
inline void mean_row(const Packed& rows, const float* inverse, int64_t count, int64_t width,
                     float* mean) {
  constexpr int64_t kEnough = 64;
  const int64_t taken = std::min(count, kEnough);
  const Scratch<float> row(width);
  std::fill_n(mean, width, 0.0f);
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t at = i * count / taken;
    kernels().of<float>().token_rows(rows.matrix, &at, 1, width, false, row);
    const float power = rows.row_scale ? rows.row_scale[at] : 1.0f;
    const float factor = power * (inverse ? inverse[at] : 1.0f) / float(taken);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) mean[k] += factor * row[k];
  }
}

}  // namespace fastsim
