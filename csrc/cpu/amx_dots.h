// A square of products without a matrix unit, by AVX512_BF16. Its instruction multiplies two pairs
// of bfloat16 numbers in each SIMD lane and adds both products to the lane's float32 sum. An AMD
// processor makes twice as many products per second with it as with float32 numbers.
//
// Included by amx.cpp, inside the namespace of one instruction set.

constexpr int64_t kMostParts = 1;

struct InstructionSetup {
  InstructionSetup() {}  // these instructions need no setup
};

constexpr int kRowsTogether = 8;  // rows of a square whose sums are in registers: 16 vectors
constexpr int kHalves = kTileGroup / kLanes;

inline __m512i load_pairs(const uint16_t* from) {
  __m512i pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

// sum + a . b in each lane, where a and b hold a pair of bfloat16 numbers.
inline __m512 add_dots(__m512 sum, __m512i a, __m512i b) {
  // Clang 16 crashes at the intrinsic; GCC spills registers around assembly.
#if defined(__clang__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return _mm512_dpbf16_ps(sum, same_bits<__m512bh>(a), same_bits<__m512bh>(b));
#endif
}

using Sums = __m512[kRowsTogether][kHalves];

// Adds the products of one step of depth: kRowsTogether rows of a tile `left` times the columns of
// the tile `right` and of the tile one strip after it.
inline void add_step(const uint16_t* left, const uint16_t* right, int64_t right_strip,
                     Sums& sums) {
#pragma GCC unroll 2
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    const __m512i first = load_pairs(right + pair * kTileDepth);
    const __m512i second = load_pairs(right + pair * kTileDepth + right_strip);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      int32_t bits;
      std::memcpy(&bits, left + r * kTileDepth + 2 * pair, sizeof bits);
      const __m512i row_pair = _mm512_set1_epi32(bits);
      sums[r][0] = add_dots(sums[r][0], row_pair, first);
      sums[r][1] = add_dots(sums[r][1], row_pair, second);
    }
  }
}

// Stores the sums of kRowsTogether rows of a full square, from `row` on.
inline void store_sums(const Sums& sums, const Target& target, int64_t row) {
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kHalves; ++v) {
      float* const to = target.to + (row + r) * target.stride + v * kLanes;
      __m512 values = sums[r][v];
      if (target.scales.rows) {
        const __m512 row_scale = _mm512_set1_ps(target.scales.rows[row + r]);
        values = _mm512_mul_ps(
            values, _mm512_mul_ps(row_scale, _mm512_loadu_ps(target.scales.columns + v * kLanes)));
      }
      if (target.add) values = _mm512_add_ps(values, _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, values);
    }
  }
}

// Multiplies strips a_first and a_first + 1 of one operand by strips b_first and b_first + 1 of the
// other.
template <int left_parts, int right_parts, bool exact = false>
void multiply_square(const Operand& a, int64_t a_first, const Operand& b, int64_t b_first,
                     const Target& target, PendingSums& pending) {
  constexpr Terms<left_parts, right_parts, exact> terms;
  constexpr bool two = terms.count == 2;
  const Operand& split = left_parts == 2 ? a : b;  // the operand of two parts, if `two`
  const int64_t group = (left_parts == 2 ? a_first : b_first) / 2;
  const bool* const group_uses_second =
      two && split.uses_second ? split.uses_second + group * split.group_stride : nullptr;
  const int64_t a_part = a.part_size(), b_part = b.part_size(), b_strip = b.strip_size();
#pragma GCC unroll 1
  for (int64_t row = 0; row < kTileGroup; row += kRowsTogether) {
    const int64_t strip = (a_first + row / kTileSide) * a.strip_size();
    const uint16_t* left = a.tiles + strip + row % kTileSide * kTileDepth;
    const uint16_t* right = b.tiles + b_first * b_strip;
    const bool* uses_second = group_uses_second;
    Sums sums = {};
#pragma GCC unroll 1
    for (int64_t step = 0; step < a.steps; ++step) {
#pragma GCC unroll 1
      for (int term = 0; term < terms.count; ++term) {
        if (two && term == 1 && uses_second && !*uses_second) break;
        add_step(left + terms.left[term] * a_part, right + terms.right[term] * b_part, b_strip,
                 sums);
      }
      left += kTileElements;
      right += kTileElements;
      if (uses_second) uses_second += split.step_stride;
    }
    if (target.is_full()) {
      store_sums(sums, target, row);
    } else {
      std::memcpy(pending.next() + row * kTileGroup, sums, sizeof sums);
    }
  }
  if (!target.is_full()) pending.complete(target);
}
