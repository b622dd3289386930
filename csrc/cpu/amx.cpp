// The products of amx.h. Compiled for the processors that have the instructions, and once more
// over a small emulation of them (FASTSIM_AMX_EMULATED), which the tests run on any processor.
#include "amx.h"

#include <cstring>
#include <limits>

#define FASTSIM_STRING2(x) #x
#define FASTSIM_STRING(x) FASTSIM_STRING2(x)

namespace fastsim {
namespace FASTSIM_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

#include "amx_tiles.h"

// The first that no bfloat16 is nearest to but infinity.
constexpr uint32_t kPastLargest = 0x7f7f8000, kInfinity = 0x7f800000;

// The bits of the nearest bfloat16, in the upper half. Without `plain`, infinities and NaN may come
// and stay what they are, and what would round to infinity is cut off instead.
template <bool plain>
inline uint32_t nearest_part(uint32_t bits) {
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  if (plain) return rounded & 0xffff0000;
  const uint32_t size = bits & 0x7fffffff;
  const uint32_t cut = size > kInfinity ? bits | 0x400000 : bits;
  return (size >= kPastLargest ? cut : rounded) & 0xffff0000;
}

// Takes the next part off `values`: its bits into the lower half of `words`, or with `upper` into
// the upper half beside what is there.
template <bool upper, bool plain>
inline void take_part(float* values, uint32_t* words, int64_t count) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) {
    uint32_t bits;
    std::memcpy(&bits, values + k, sizeof bits);
    const uint32_t part = nearest_part<plain>(bits);
    float value;
    std::memcpy(&value, &part, sizeof value);
    const bool finite = plain || (bits & kInfinity) != kInfinity;
    values[k] = finite ? values[k] - value : 0.0f;
    words[k] = upper ? words[k] | part : part >> 16;
  }
}

inline void transpose(const uint32_t* from, uint32_t* to) {
  for (int r = 0; r < 16; ++r) {
#pragma omp simd
    for (int c = 0; c < 16; ++c) to[r * 16 + c] = from[c * 16 + r];
  }
}

// The tiles of all parts from the values of one.
template <bool pairs, bool transposed, bool plain>
void split_tile(float* values, int64_t parts, uint16_t* to, int64_t next) {
  alignas(64) uint32_t words[256];
  for (int64_t part = 0; part < parts; ++part) {
    uint32_t* out = reinterpret_cast<uint32_t*>(to + part * next);
    uint32_t* target = transposed ? words : out;
    for (int r = 0; r < 16; ++r) {
      float* row = values + r * 32;
      if constexpr (pairs) {
        take_part<false, plain>(row, target + r * 16, 16);
        take_part<true, plain>(row + 16, target + r * 16, 16);
      } else {
        alignas(64) uint32_t halves[32];
        take_part<false, plain>(row, halves, 32);
        uint16_t* packed = reinterpret_cast<uint16_t*>(target + r * 16);
#pragma omp simd
        for (int k = 0; k < 32; ++k) packed[k] = static_cast<uint16_t>(halves[k]);
      }
    }
    if constexpr (transposed) transpose(words, out);
  }
}

// One operand tile of each part, `next` apart, of `rows` x `columns` entries, zeros beyond them;
// false if one is not finite.
template <bool pairs, bool transposed>
bool pack_tile(const float* from, int64_t stride, int64_t rows, int64_t columns, int64_t parts,
               uint16_t* to, int64_t next) {
  constexpr int64_t tall = pairs ? 32 : 16, wide = pairs ? 16 : 32;
  alignas(64) float values[tall * wide];
  if (rows >= tall && columns >= wide) {
    for (int64_t r = 0; r < tall; ++r) {
      std::memcpy(values + r * wide, from + r * stride, wide * sizeof(float));
    }
  } else {
    std::memset(values, 0, sizeof values);
    for (int64_t r = 0; r < smaller(rows, tall); ++r) {
      std::memcpy(values + r * wide, from + r * stride, smaller(columns, wide) * sizeof(float));
    }
  }
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t k = 0; k < tall * wide; ++k) {
    uint32_t bits;
    std::memcpy(&bits, values + k, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const auto split = largest < kPastLargest ? split_tile<pairs, transposed, true>
                                            : split_tile<pairs, transposed, false>;
  split(values, parts, to, next);
  return largest < kInfinity;
}

// Strips of a matrix of `strip_count` rows (`rows`) or columns (`pairs`).
template <bool pairs, bool transposed>
bool pack_strips(const float* from, int64_t stride, int64_t strip_count, int64_t first,
                 int64_t depth, int64_t parts, uint16_t* to, Range strips) {
  const int64_t steps = tiles(depth, kTileDepth), next = steps * kTileElements;
  bool finite = true;
  for (int64_t strip = strips.begin; strip < strips.end; ++strip) {
    const int64_t at = strip * kTileSide;
    uint16_t* out = to + strip * parts * next;
    const int64_t count = strip_count - at;
    if (count <= 0) {
      std::memset(out, 0, parts * next * sizeof *out);
      continue;
    }
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t k = step * kTileDepth;
      const float* corner =
          pairs ? from + (first + k) * stride + at : from + at * stride + first + k;
      const int64_t rest = depth - k;
      finite &= pack_tile<pairs, transposed>(corner, stride, pairs ? rest : count,
                                             pairs ? count : rest, parts,
                                             out + step * kTileElements, next);
    }
  }
  return finite;
}

bool pack(Pack form, const float* from, int64_t stride, int64_t strip_count, int64_t first,
          int64_t depth, int64_t parts, uint16_t* to, Range strips) {
  const auto run = form == Pack::rows              ? pack_strips<false, false>
                   : form == Pack::rows_transposed ? pack_strips<false, true>
                   : form == Pack::pairs           ? pack_strips<true, false>
                                                   : pack_strips<true, true>;
  return run(from, stride, strip_count, first, depth, parts, to, strips);
}

// The products of parts that a sum takes: those whose indices add up to less than the number of
// parts. The others are smaller than the rounding of what is kept. In an order in which one operand
// after the other stays in its tiles; the largest product comes last.
template <int left_parts, int right_parts>
struct Terms {
  static constexpr int kMost = left_parts > right_parts ? left_parts : right_parts;
  int count = 0;
  int left[9] = {}, right[9] = {};

  constexpr Terms() {
    for (int b = right_parts - 1; b >= 0; --b) {
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

// c (32 x 32, rows c_row apart) = the product of two strips of each operand.
template <int left_parts, int right_parts>
inline void multiply_block(const Operand& a, int64_t a_at, const Operand& b, int64_t b_at,
                           float* c, int64_t c_row) {
  constexpr Terms<left_parts, right_parts> terms;
  const int64_t bytes = c_row * sizeof(float);
  const int64_t a_part = a.part(), b_part = b.part(), a_strip = a.strip(), b_strip = b.strip();
  const uint16_t *left = a.tiles + a_at * a_strip, *right = b.tiles + b_at * b_strip;
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
  for (const uint16_t* end = left + a_part; left < end;
       left += kTileElements, right += kTileElements) {
#pragma GCC unroll 9
    for (int term = 0; term < terms.count; ++term) {
      if (term == 0 || terms.left[term] != terms.left[term - 1]) {
        tile_load(4, left + terms.left[term] * a_part, 64);
        tile_load(5, left + a_strip + terms.left[term] * a_part, 64);
      }
      if (term == 0 || terms.right[term] != terms.right[term - 1]) {
        tile_load(6, right + terms.right[term] * b_part, 64);
        tile_load(7, right + b_strip + terms.right[term] * b_part, 64);
      }
      tile_multiply(0, 4, 6);
      tile_multiply(1, 4, 7);
      tile_multiply(2, 5, 6);
      tile_multiply(3, 5, 7);
    }
  }
  float* low = c + kTileSide * c_row;
  tile_store(0, c, bytes);
  tile_store(1, c + kTileSide, bytes);
  tile_store(2, low, bytes);
  tile_store(3, low + kTileSide, bytes);
}

// The product for operands of so many parts.
auto block_of(int64_t left_parts, int64_t right_parts) {
  if (left_parts == 3) return multiply_block<3, 3>;
  if (left_parts == 1) return multiply_block<1, 1>;
  return right_parts == 1 ? multiply_block<2, 1> : multiply_block<2, 2>;
}
using MultiplyBlock = decltype(block_of(1, 1));

// c (+)= the same, for the block's first `rows` x `columns`, whose memory ends there. A sum begins
// at zero in any case: what it is added to may be large, and would round each of its terms.
void multiply_into(const Operand& a, int64_t a_at, const Operand& b, int64_t b_at,
                   MultiplyBlock multiply_block, float* c, int64_t c_row, bool add, int64_t rows,
                   int64_t columns) {
  if (!add && rows >= kTileGroup && columns >= kTileGroup) {
    return multiply_block(a, a_at, b, b_at, c, c_row);
  }
  alignas(64) float sums[kTileGroup * kTileGroup];
  multiply_block(a, a_at, b, b_at, sums, kTileGroup);
  const auto take = [&](int64_t count) {
    for (int64_t r = 0; r < smaller(rows, kTileGroup); ++r) {
      float* to = c + r * c_row;
      const float* sum = sums + r * kTileGroup;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) to[j] = add ? to[j] + sum[j] : sum[j];
    }
  };
  columns >= kTileGroup ? take(kTileGroup) : take(columns);
}

// Columns whose share of the operand stays in the second-level cache beside the rows that pass by.
constexpr int64_t kCachedBytes = 400 << 10;

void scores(const Operand& x, int64_t rows, const Operand& y, int64_t columns, float* scores,
            int64_t stride, Range groups) {
  const UsesTiles in_use;
  const MultiplyBlock block_product = block_of(x.parts, y.parts);
  const int64_t group_bytes = 2 * y.strip() * int64_t(sizeof(uint16_t));
  const int64_t cached = kCachedBytes > group_bytes ? kCachedBytes / group_bytes : 1;
  for (int64_t first = groups.begin; first < groups.end; first += cached) {
    const int64_t last = smaller(first + cached, groups.end);
    for (int64_t row = 0; row < rows; row += kTileGroup) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t column = group * kTileGroup;
        multiply_into(x, row / kTileSide, y, 2 * group, block_product, scores + row * stride + column,
                      stride, false, rows - row, columns - column);
      }
    }
  }
}

// Two strips of the panel's block as an operand.
struct PanelBlock {
  alignas(64) uint16_t tiles[2 * 3 * kBlockDepth * kTileSide];
};

inline int64_t block_elements(int64_t parts, int64_t width, int64_t depth) {
  return tiles(width, kTileGroup) * 2 * parts * tiles(depth, kTileDepth) * kTileElements;
}

void multiply_rows(const float* panel, int64_t stride, int64_t rows, int64_t depth,
                   const uint16_t* right, int64_t parts, int64_t width, float* out, bool add,
                   Range groups) {
  const UsesTiles in_use;
  static thread_local PanelBlock block;
  const MultiplyBlock block_product = block_of(parts, parts);
  const int64_t full = block_elements(parts, width, kBlockDepth);
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t count = smaller(kBlockDepth, depth - k), steps = tiles(count, kTileDepth);
    const Operand left{block.tiles, parts, steps}, other{right + k / kBlockDepth * full, parts, steps};
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const int64_t row = group * kTileGroup;
      pack(Pack::rows, panel + row * stride, stride, rows - row, k, count, parts, block.tiles,
           {0, 2});
      for (int64_t at = 0; at < width; at += kTileGroup) {
        multiply_into(left, 0, other, at / kTileSide, block_product, out + row * width + at, width,
                      add || k > 0, rows - row, width - at);
      }
    }
  }
}

// out (columns, width) (+)= sums^T, with sums (width, 32) as blocks of 32 x 32.
void add_transposed(const float* sums, int64_t columns, int64_t width, float* out, bool add) {
  for (int64_t at = 0; at < width; at += kTileGroup, sums += kTileGroup * kTileGroup) {
    const int64_t wide = smaller(kTileGroup, width - at);
    for (int64_t j = 0; j < smaller(columns, kTileGroup); ++j) {
      float* to = out + j * width + at;
#pragma omp simd
      for (int64_t d = 0; d < wide; ++d) {
        const float sum = sums[d * kTileGroup + j];
        to[d] = add ? to[d] + sum : sum;
      }
    }
  }
}

// Groups of columns that share the other operand's block while it is in cache.
constexpr int64_t kSharing = 8;

void multiply_columns(const float* panel, int64_t stride, int64_t columns, int64_t depth,
                      const uint16_t* right, int64_t parts, int64_t width, float* out, bool add,
                      Range groups) {
  const UsesTiles in_use;
  static thread_local PanelBlock block;
  const MultiplyBlock block_product = block_of(parts, parts);
  const int64_t full = block_elements(parts, width, kBlockDepth);
  const int64_t area = tiles(width, kTileGroup) * kTileGroup * kTileGroup;
  float* sums = new float[kSharing * area];
  for (int64_t first = groups.begin; first < groups.end; first += kSharing) {
    const int64_t last = smaller(first + kSharing, groups.end);
    for (int64_t k = 0; k < depth; k += kBlockDepth) {
      const int64_t count = smaller(kBlockDepth, depth - k), steps = tiles(count, kTileDepth);
      const Operand other{right + k / kBlockDepth * full, parts, steps};
      const Operand mine{block.tiles, parts, steps};
      for (int64_t group = first; group < last; ++group) {
        const int64_t column = group * kTileGroup;
        pack(Pack::pairs, panel + column, stride, columns - column, k, count, parts, block.tiles,
             {0, 2});
        float* to = sums + (group - first) * area;
        for (int64_t at = 0; at < width; at += kTileGroup, to += kTileGroup * kTileGroup) {
          multiply_into(other, at / kTileSide, mine, 0, block_product, to, kTileGroup, k > 0, kTileGroup,
                        kTileGroup);
        }
      }
    }
    for (int64_t group = first; group < last; ++group) {
      const int64_t column = group * kTileGroup;
      add_transposed(sums + (group - first) * area, columns - column, width, out + column * width,
                     add);
    }
  }
  delete[] sums;
}

}  // namespace

extern const AmxKernels amx;
const AmxKernels amx = {FASTSIM_STRING(FASTSIM_ISA), pack, scores, multiply_rows, multiply_columns};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
