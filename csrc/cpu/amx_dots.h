// A block of products without a matrix unit: by AVX512_BF16, whose instruction adds the products of
// two pairs of bfloat16 numbers to each lane. An AMD processor makes twice as many products a second
// with it as with float32 numbers.
//
// Included by amx.cpp, inside the namespace of one instruction set.

constexpr int64_t kMostParts = 1;

struct UsesInstructions {
  UsesInstructions() {}  // which need no setting
};

constexpr int kRowsTogether = 8;  // of a block: 16 sums of 16 lanes
constexpr int kHalves = kTileGroup / kLanes;

inline __m512i load_pairs(const uint16_t* from) {
  __m512i pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

// sum + a . b, lane by lane, each of two pairs.
inline __m512 with_dots(__m512 sum, __m512i a, __m512i b) {
#if defined(__clang__)  // 16 of which crashes at the intrinsic; GCC spills around assembly
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return _mm512_dpbf16_ps(sum, same_bits<__m512bh>(a), same_bits<__m512bh>(b));
#endif
}

using Sums = __m512[kRowsTogether][kHalves];

// A step of depth: the rows of one part times the columns of one part.
inline void add_step(const uint16_t* left, const uint16_t* right, int64_t b_strip, Sums& sums) {
#pragma GCC unroll 2
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    const __m512i first = load_pairs(right + pair * kTileDepth);
    const __m512i second = load_pairs(right + pair * kTileDepth + b_strip);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      int32_t bits;
      std::memcpy(&bits, left + r * kTileDepth + 2 * pair, sizeof bits);
      const __m512i both = _mm512_set1_epi32(bits);
      sums[r][0] = with_dots(sums[r][0], both, first);
      sums[r][1] = with_dots(sums[r][1], both, second);
    }
  }
}

// Takes the sums of rows of a whole block, from `row` on, where they belong.
inline void take_sums(const Sums& sums, const Target& target, int64_t row) {
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kHalves; ++v) {
      float* const to = target.to + (row + r) * target.stride + v * kLanes;
      __m512 values = sums[r][v];
      if (target.scales.rows) {
        const __m512 of_row = _mm512_set1_ps(target.scales.rows[row + r]);
        values = _mm512_mul_ps(
            values, _mm512_mul_ps(of_row, _mm512_loadu_ps(target.scales.columns + v * kLanes)));
      }
      if (target.add) values = _mm512_add_ps(values, _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, values);
    }
  }
}

// The product of two strips of each operand.
template <int left_parts, int right_parts, bool exact = false>
void multiply_block(const Operand& a, int64_t a_at, const Operand& b, int64_t b_at,
                    const Target& target, PendingSums& pending) {
  constexpr Terms<left_parts, right_parts, exact> terms;
  constexpr bool two = terms.count == 2;
  const Operand& split = left_parts == 2 ? a : b;
  const int64_t group = (left_parts == 2 ? a_at : b_at) / 2;
  const bool* const second = two && split.second ? split.second + group * split.next_group : nullptr;
  const int64_t a_part = a.part(), b_part = b.part(), b_strip = b.strip();
#pragma GCC unroll 1
  for (int64_t row = 0; row < kTileGroup; row += kRowsTogether) {
    const int64_t a_strip = (a_at + row / kTileSide) * a.strip();
    const uint16_t* left = a.tiles + a_strip + row % kTileSide * kTileDepth;
    const uint16_t* right = b.tiles + b_at * b_strip;
    const bool* needed = second;
    Sums sums = {};
#pragma GCC unroll 1
    for (int64_t step = 0; step < a.steps; ++step) {
#pragma GCC unroll 1
      for (int term = 0; term < terms.count; ++term) {
        if (two && term == 1 && needed && !*needed) break;
        add_step(left + terms.left[term] * a_part, right + terms.right[term] * b_part, b_strip,
                 sums);
      }
      left += kTileElements;
      right += kTileElements;
      if (needed) needed += split.next_step;
    }
    if (target.whole()) {
      take_sums(sums, target, row);
    } else {
      std::memcpy(pending.next() + row * kTileGroup, sums, sizeof sums);
    }
  }
  if (!target.whole()) pending.put(target);
}
