// The kernels of amx.h. Compiled three times: for processors with AMX, with a small emulation of
// AMX (FASTSIM_AMX_EMULATED) that tests run on any processor, and for processors with AVX512_BF16
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

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The order matters: each of these uses the ones before it.
#include "amx_parts.h"
#include "amx_pack.h"
#include "amx_pack_both.h"
#include "amx_sums.h"

// The sum of the squares of a row (width,), in float64.
template <class S>
double squared_norm(const S* row, int64_t width) {
  constexpr int64_t kChunk = 256;
  float chunk[kChunk];
  double sum = 0;
  for (int64_t at = 0; at < width; at += kChunk) {
    const int64_t count = min_of(kChunk, width - at);
    load(row + at, count, chunk);
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < count; ++k) sum += double(chunk[k]) * double(chunk[k]);
  }
  return sum;
}

void norms(const Matrix& x, int64_t width, float* inverse, float* powers, float* rest,
           Range rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t start = row * x.row_stride;
    const double norm = __builtin_sqrt(
        x.dtype == Dtype::float16
            ? squared_norm(static_cast<const Float16*>(x.data) + start, width)
        : x.dtype == Dtype::bfloat16
            ? squared_norm(static_cast<const uint16_t*>(x.data) + start, width)
            : squared_norm(static_cast<const float*>(x.data) + start, width));
    inverse[row] = powers[row] = rest[row] = 0;
    // Such a norm counts as 0, as in unit_rows.
    if (norm < double(std::numeric_limits<float>::min())) continue;
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

void add_row_dots(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows,
                  int64_t columns, double* sums) {
  for (int64_t i = 0; i < rows; ++i, a += a_stride, b += b_stride) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) sum += double(a[j]) * double(b[j]);
    sums[i] += sum;
  }
}

// The products of parts that make up a product of two operands: those whose indices add up to less
// than the larger number of parts, or with `exact` all of them. The others are smaller than the
// rounding error of these. Most products share the part of one operand with the one before, whose
// tiles then need not be loaded again. Of two products, that of the first parts comes first; of
// more than three, it comes last, since it is the largest.
template <int left_parts, int right_parts, bool exact = false>
struct Terms {
  // The sums of two indices are less than this.
  static constexpr int kIndexSums = exact                      ? left_parts + right_parts
                                    : left_parts > right_parts ? left_parts
                                                               : right_parts;
  int count = 0;
  int left[9] = {}, right[9] = {};  // the indices of the parts

  constexpr Terms() {
    for (int k = right_parts - 1; k >= 0; --k) {
      const int b = left_parts == 1 ? right_parts - 1 - k : k;
      const int last = count ? left[count - 1] : 0;
      const auto append = [&](int a) {
        left[count] = a;
        right[count++] = b;
      };
      const int end = left_parts < kIndexSums - b ? left_parts : kIndexSums - b;
      if (last < end) append(last);
      for (int a = end - 1; a >= 0; --a) {
        if (a != last) append(a);
      }
    }
  }
};

#if defined(FASTSIM_AMX_DOTS)
#include "amx_dots.h"
#else
#include "amx_tiles.h"
#endif

using MultiplySquare = void (*)(const Operand&, int64_t, const Operand&, int64_t, const Target&,
                                PendingSums&);

// The function that multiplies operands of so many parts.
MultiplySquare multiply_square_of(int64_t left_parts, int64_t right_parts, bool exact = false) {
  constexpr MultiplySquare table[3][3] = {
      {multiply_square<1, 1>, multiply_square<1, 2>, multiply_square<1, 3>},
      {multiply_square<2, 1>, multiply_square<2, 2>, multiply_square<2, 3>},
      {multiply_square<3, 1>, multiply_square<3, 2>, multiply_square<3, 3>}};
  if (exact && left_parts == 2 && right_parts == 2) return multiply_square<2, 2, true>;
  return table[left_parts - 1][right_parts - 1];
}

// The bytes of one operand that stay in the L2 cache while the other passes through it.
constexpr int64_t kCachedBytes = 400 << 10;

void scores(const Operand& x, int64_t rows, const Operand& y, int64_t columns, bool exact,
            const ScoreScales& scales, float* scores, int64_t stride, bool add, Range groups) {
  const InstructionSetup setup;
  const MultiplySquare multiply_square = multiply_square_of(x.parts, y.parts, exact);
  PendingSums pending(x.steps);
  const int64_t group_bytes = 2 * y.strip_size() * int64_t(sizeof(uint16_t));
  // group_bytes is 0 for rows of width 0.
  const bool several_fit = group_bytes > 0 && kCachedBytes > group_bytes;
  const int64_t cached_groups = several_fit ? kCachedBytes / group_bytes : 1;
  for (int64_t first = groups.begin; first < groups.end; first += cached_groups) {
    const int64_t last = min_of(first + cached_groups, groups.end);
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t column = group * kTileGroup;
        Target target{scores + row * stride + column, stride, rows - row, columns - column, add,
                      {}};
        if (scales.rows) target.scales = {scales.rows + row, scales.columns + column};
        multiply_square(x, row / kTileSide, y, 2 * group, target, pending);
      }
    }
  }
}

void multiply(const Operand& left, int64_t rows, const Operand& right, int64_t width, float* out,
              bool add, bool in_squares, Range groups) {
  const InstructionSetup setup;
  const MultiplySquare multiply_square = multiply_square_of(left.parts, right.parts);
  const SquareLayout layout{rows, width};
  PendingSums pending(left.steps);
  const int64_t begin = groups.begin * kTileGroup, end = min_of(groups.end * kTileGroup, width);
  const auto multiply_at = [&](int64_t row, int64_t column) {
    const int64_t offset = in_squares ? layout.offset(row, column) : row * width + column;
    const int64_t stride = in_squares ? layout.square_columns(column) : width;
    const Target target{out + offset, stride, rows - row, width - column, add, {}};
    multiply_square(left, row / kTileSide, right, column / kTileSide, target, pending);
  };
  // A group of the operand with more parts stays in the L1 cache while the other operand passes
  // through it.
  if (left.parts >= right.parts) {
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t column = begin; column < end; column += kTileGroup) multiply_at(row, column);
    }
  } else {
    for (int64_t column = begin; column < end; column += kTileGroup) {
      for (int64_t row = 0; row < rows; row += kTileGroup) multiply_at(row, column);
    }
  }
}

}  // namespace

extern const AmxKernels amx;
const AmxKernels amx = {FASTSIM_STRING(FASTSIM_ISA), kMostParts, norms, pack, pack_both,
                        add_dropped, add_row_dots, largest_of_squares, scores, multiply};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
