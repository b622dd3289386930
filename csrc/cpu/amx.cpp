// The products of amx.h. Compiled for the processors that have the instructions, and once more
// over a small emulation of them (FASTSIM_AMX_EMULATED), which the tests run on any processor.
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
#include "amx_tiles.h"
#include "amx_parts.h"
#include "amx_pack.h"
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

// The product of two strips of each operand. Of many products of parts the sums begin at zero (what
// they are added to may be large, and would round each of their terms) and are taken while the next
// block is multiplied. Few products leave no time for that: theirs begin with what they are added to.
template <int left_parts, int right_parts, bool exact = false>
void multiply_block(const Operand& a, int64_t a_at, const Operand& b, int64_t b_at,
                    const Target& target, PendingSums& pending) {
  constexpr Terms<left_parts, right_parts, exact> terms;
  constexpr bool many = terms.count > 3, two = terms.count == 2;
  const bool scaled = target.scales.rows;
  const bool in_place = !many && target.whole() && !(target.add && scaled);
  const int64_t a_part = a.part(), b_part = b.part(), a_strip = a.strip(), b_strip = b.strip();
  const uint16_t *left = a.tiles + a_at * a_strip, *right = b.tiles + b_at * b_strip;
  float* const sums = in_place ? target.to : pending.next();
  const int64_t stride = in_place ? target.stride : kTileGroup, bytes = stride * sizeof(float);
  float* const low = sums + kTileSide * stride;
  const Operand& split = left_parts == 2 ? a : b;
  const int64_t group = (left_parts == 2 ? a_at : b_at) / 2;
  const bool* second = two && split.second ? split.second + group * split.next_group : nullptr;
  if (in_place && target.add) {
    tile_load(0, sums, bytes);
    tile_load(1, sums + kTileSide, bytes);
    tile_load(2, low, bytes);
    tile_load(3, low + kTileSide, bytes);
  } else {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
  }
  for (const uint16_t* end = left + a_part; left < end;
       left += kTileElements, right += kTileElements) {
#pragma GCC unroll 9
    for (int term = 0; term < terms.count; ++term) {
      if (two && term == 1 && second && !*second) break;
      const bool new_left = term == 0 || terms.left[term] != terms.left[term - 1];
      const bool new_right = term == 0 || terms.right[term] != terms.right[term - 1];
      const uint16_t* const a_tile = left + terms.left[term] * a_part;
      const uint16_t* const b_tile = right + terms.right[term] * b_part;
      if (new_left) tile_load(4, a_tile, 64);
      if (new_right) tile_load(6, b_tile, 64);
      tile_multiply(0, 4, 6);
      if (new_right) tile_load(7, b_tile + b_strip, 64);
      tile_multiply(1, 4, 7);
      if (new_left) tile_load(5, a_tile + a_strip, 64);
      tile_multiply(2, 5, 6);
      tile_multiply(3, 5, 7);
    }
    if constexpr (many) pending.take_some();
    if (second) second += split.next_step;
  }
  tile_store(0, sums, bytes);
  tile_store(1, sums + kTileSide, bytes);
  tile_store(2, low, bytes);
  tile_store(3, low + kTileSide, bytes);
  if (!in_place) {
    pending.put(target);
  } else if (scaled) {
    take_rows(sums, stride, target, 0, kTileGroup);
  }
}

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
  const UsesTiles in_use;
  const MultiplyBlock multiply_block = block_of(x.parts, y.parts, exact);
  PendingSums pending(x.steps);
  const int64_t group_bytes = 2 * y.strip() * int64_t(sizeof(uint16_t));
  const int64_t cached = kCachedBytes > group_bytes ? kCachedBytes / group_bytes : 1;
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
              bool add, bool in_blocks) {
  const UsesTiles in_use;
  const MultiplyBlock multiply_block = block_of(left.parts, right.parts);
  const InBlocks places{rows, width};
  PendingSums pending(left.steps);
  const auto multiply_at = [&](int64_t row, int64_t at) {
    const int64_t place = in_blocks ? places.place(row, at) : row * width + at;
    const int64_t stride = in_blocks ? places.wide(at) : width;
    const Target target{out + place, stride, rows - row, width - at, add, {}};
    multiply_block(left, row / kTileSide, right, at / kTileSide, target, pending);
  };
  // A group of the operand with more parts stays in the first cache, that of the other passes by.
  if (left.parts >= right.parts) {
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t at = 0; at < width; at += kTileGroup) multiply_at(row, at);
    }
  } else {
    for (int64_t at = 0; at < width; at += kTileGroup) {
      for (int64_t row = 0; row < rows; row += kTileGroup) multiply_at(row, at);
    }
  }
}

}  // namespace

extern const AmxKernels amx;
const AmxKernels amx = {FASTSIM_STRING(FASTSIM_ISA), norms, pack, pack_both,
                         scores, multiply};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
