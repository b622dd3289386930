// The products of amx.h. Compiled for processors that have AMX, over a small emulation of it
// (FASTSIM_AMX_EMULATED), which the tests run on any processor, and for those that have AVX512_BF16
// (FASTSIM_AMX_DOTS).
#include "amx.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "float16.h"

#define FASTSIM_STRING2(x) #x
#define FASTSIM_STRING(x) FASTSIM_STRING2(x)

namespace fastsim {
namespace FASTSIM_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// In this order.
#include "amx_parts.h"
#include "amx_pack.h"
#include "amx_pack_both.h"
#include "amx_sums.h"

template <class S>
double square(const S* row, int64_t width) {
  constexpr int64_t kChunk = 256;
  float chunk[kChunk];
  double sum = 0;
  for (int64_t at = 0; at < width; at += kChunk) {
    const int64_t count = smaller(kChunk, width - at);
    load(row + at, count, chunk);
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < count; ++k) sum += double(chunk[k]) * double(chunk[k]);
  }
  return sum;
}

void norms(const Matrix& x, int64_t width, float* inverse, float* powers, float* rest,
           Range rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t at = row * x.row_stride;
    const double norm = __builtin_sqrt(
        x.dtype == Dtype::float16    ? square(static_cast<const Float16*>(x.data) + at, width)
        : x.dtype == Dtype::bfloat16 ? square(static_cast<const uint16_t*>(x.data) + at, width)
                                     : square(static_cast<const float*>(x.data) + at, width));
    inverse[row] = powers[row] = rest[row] = 0;
    if (norm < double(std::numeric_limits<float>::min())) continue;  // as in unit_rows
    inverse[row] = float(1 / norm);
    powers[row] = 1;
    rest[row] = std::numeric_limits<float>::quiet_NaN();
    if (!(norm <= std::numeric_limits<double>::max())) continue;
    int exponent;
    const double fraction = std::frexp(norm, &exponent);  // in [0.5, 1)
    powers[row] = float(std::ldexp(1.0, 1 - exponent));
    rest[row] = float(0.5 / fraction);
  }
}

// The products of parts that a sum takes: those whose indices add up to less than the number of
// parts, or with `exact` all of them. The others are smaller than the rounding of what is kept. In
// an order in which one operand after the other stays in its tiles; the largest product comes last.
template <int left_parts, int right_parts, bool exact = false>
struct Terms {
  static constexpr int kMost = exact                       ? left_parts + right_parts
                               : left_parts > right_parts ? left_parts
                                                           : right_parts;
  int count = 0;
  int left[9] = {}, right[9] = {};

  constexpr Terms() {
    for (int at = right_parts - 1; at >= 0; --at) {
      const int b = left_parts == 1 ? right_parts - 1 - at : at;
      const int before = count ? left[count - 1] : 0;
      const auto take = [&](int a) {
        left[count] = a;
        right[count++] = b;
      };
      const int end = left_parts < kMost - b ? left_parts : kMost - b;
      if (before < end) take(before);
      for (int a = end - 1; a >= 0; --a) {
        if (a != before) take(a);
      }
    }
  }
};

#if defined(FASTSIM_AMX_DOTS)
#include "amx_dots.h"
#else
#include "amx_tiles.h"
#endif

using MultiplyBlock = void (*)(const Operand&, int64_t, const Operand&, int64_t, const Target&,
                               PendingSums&);

// The product for operands of so many parts.
MultiplyBlock block_of(int64_t left_parts, int64_t right_parts, bool exact = false) {
  constexpr MultiplyBlock table[3][3] = {
      {multiply_block<1, 1>, multiply_block<1, 2>, multiply_block<1, 3>},
      {multiply_block<2, 1>, multiply_block<2, 2>, multiply_block<2, 3>},
      {multiply_block<3, 1>, multiply_block<3, 2>, multiply_block<3, 3>}};
  if (exact && left_parts == 2 && right_parts == 2) return multiply_block<2, 2, true>;
  return table[left_parts - 1][right_parts - 1];
}

// Bytes of an operand that stay in the second-level cache beside what passes by.
constexpr int64_t kCachedBytes = 400 << 10;

void scores(const Operand& x, int64_t rows, const Operand& y, int64_t columns, bool exact,
            const ScoreScales& scales, float* scores, int64_t stride, bool add, Range groups) {
  const UsesInstructions in_use;
  const MultiplyBlock multiply_block = block_of(x.parts, y.parts, exact);
  PendingSums pending(x.steps);
  const int64_t group_bytes = 2 * y.strip() * int64_t(sizeof(uint16_t));
  const bool several = group_bytes > 0 && kCachedBytes > group_bytes;  // rows of no numbers have 0
  const int64_t cached = several ? kCachedBytes / group_bytes : 1;
  for (int64_t first = groups.begin; first < groups.end; first += cached) {
    const int64_t last = smaller(first + cached, groups.end);
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t column = group * kTileGroup;
        Target target{scores + row * stride + column, stride, rows - row, columns - column, add, {}};
        if (scales.rows) target.scales = {scales.rows + row, scales.columns + column};
        multiply_block(x, row / kTileSide, y, 2 * group, target, pending);
      }
    }
  }
}

void multiply(const Operand& left, int64_t rows, const Operand& right, int64_t width, float* out,
              bool add, bool in_blocks, Range groups) {
  const UsesInstructions in_use;
  const MultiplyBlock multiply_block = block_of(left.parts, right.parts);
  const InBlocks places{rows, width};
  PendingSums pending(left.steps);
  const int64_t begin = groups.begin * kTileGroup, end = smaller(groups.end * kTileGroup, width);
  const auto multiply_at = [&](int64_t row, int64_t at) {
    const int64_t place = in_blocks ? places.place(row, at) : row * width + at;
    const int64_t stride = in_blocks ? places.wide(at) : width;
    const Target target{out + place, stride, rows - row, width - at, add, {}};
    multiply_block(left, row / kTileSide, right, at / kTileSide, target, pending);
  };
  // A group of the operand with more parts stays in the first cache, that of the other passes by.
  if (left.parts >= right.parts) {
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t at = begin; at < end; at += kTileGroup) multiply_at(row, at);
    }
  } else {
    for (int64_t at = begin; at < end; at += kTileGroup) {
      for (int64_t row = 0; row < rows; row += kTileGroup) multiply_at(row, at);
    }
  }
}

}  // namespace

extern const AmxKernels amx;
const AmxKernels amx = {FASTSIM_STRING(FASTSIM_ISA), kMostParts, norms, pack, pack_both,
                        add_left_out, largest_of_squares, scores, multiply};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
