// Operands of products on a matrix unit, packed on all threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "amx.h"
#include "arguments.h"
#include "passes.h"

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
  if (x.stride(1) != 1 || (dtype != Dtype::float32 && dtype != Dtype::float16 &&
                           dtype != Dtype::bfloat16)) {
    refuse("rows", x, "row-major ones of float32, float16 or bfloat16");
  }
  return {matrix(x), powers, nullptr};
}

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

}  // namespace fastsim
