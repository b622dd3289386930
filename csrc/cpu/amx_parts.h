// Splits float32 numbers into bfloat16 parts, sixteen numbers at a time, and arranges the parts as
// rows of a tile.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Bits of float32 numbers: the smallest one that rounds to infinity in bfloat16, and infinity.
constexpr uint32_t kPastLargest = 0x7f7f8000, kInfinity = 0x7f800000;

// Vectors of 64 bytes, the size of a row of a tile: 16 words, each a pair of bfloat16 numbers.
using Floats __attribute__((vector_size(64))) = float;
using Words __attribute__((vector_size(64))) = uint32_t;
using Halves __attribute__((vector_size(64))) = uint16_t;

template <class To, class From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

constexpr int kLanes = 16;

// The 16-bit numbers with these indices. They are counted through a, then through b.
template <size_t... index>
inline Words pick_halves(const Words& a, const Words& b, std::index_sequence<index...>) {
  const Halves first = same_bits<Halves>(a), second = same_bits<Halves>(b);
#if defined(__clang__)
  return same_bits<Words>(__builtin_shufflevector(first, second, int(index)...));
#else
  return same_bits<Words>(
      __builtin_shuffle(first, second, Halves{static_cast<uint16_t>(index)...}));
#endif
}

// The upper halves of all words of a, then of b.
template <size_t... index>
inline Words upper_halves(const Words& a, const Words& b, std::index_sequence<index...>) {
  return pick_halves(a, b, std::index_sequence<(2 * index + 1)...>());
}

// Interleaves the first sixteen 16-bit numbers of a with the last sixteen.
template <size_t... index>
inline Words interleave_halves(const Words& a, std::index_sequence<index...>) {
  return pick_halves(a, a, std::index_sequence<(index / 2 + index % 2 * kLanes)...>());
}

// Interleaves sixteen 16-bit numbers of a with those of b; both begin at number `first`.
template <int first, size_t... index>
inline Words interleave(const Words& a, const Words& b, std::index_sequence<index...>) {
  return pick_halves(
      a, b, std::index_sequence<(first + index / 2 + index % 2 * 2 * kLanes)...>());
}

constexpr auto kHalfIndices = std::make_index_sequence<2 * kLanes>();

// Splits off the next part: returns the bits of the bfloat16 number nearest to each value, in the
// upper half of a word, and subtracts that number from the value. The part of an infinity or a NaN
// is the same infinity or a NaN, and leaves 0. A number that would round to infinity is truncated
// instead.
inline Words split_off_part(Floats& values) {
  const Words bits = same_bits<Words>(values);
  const Words size = bits & 0x7fffffff, cut = size > kInfinity ? bits | 0x400000 : bits;
  Words part = bits + 0x7fff + ((bits >> 16) & 1);
  part = (size >= kPastLargest ? cut : part) & 0xffff0000;
  const Floats rest = values - same_bits<Floats>(part);
  values = (bits & kInfinity) != kInfinity ? rest : Floats{};
  return part;
}

// The bfloat16 numbers nearest to the values of `first`, followed by those of `second`. Every value
// has to be smaller than kPastLargest. The processor's instruction turns subnormal numbers into
// zeros, as its products would.
inline Words nearest_bfloat16(const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  return same_bits<Words>(
      _mm512_cvtne2ps_pbh(same_bits<__m512>(second), same_bits<__m512>(first)));
#else
  const auto rounded = [](const Floats& values) {
    const Words bits = same_bits<Words>(values);
    return bits + 0x7fff + ((bits >> 16) & 1);
  };
  return upper_halves(rounded(first), rounded(second), kHalfIndices);
#endif
}

// Splits off the next part of 32 values and returns it as a row of a tile: `first` followed by
// `second`, or with `row_pairs` both interleaved. plain: every value is smaller than kPastLargest.
template <bool row_pairs, bool plain>
inline Words split_off_row(Floats& first, Floats& second) {
  if constexpr (!plain) {
    const Words low = split_off_part(first), high = split_off_part(second);
    return row_pairs ? low >> 16 | high : upper_halves(low, high, kHalfIndices);
  }
  const Words row = nearest_bfloat16(first, second);
  const Words interleaved = interleave_halves(row, kHalfIndices);
  first -= same_bits<Floats>(interleaved << 16);
  second -= same_bits<Floats>(interleaved & 0xffff0000);
  return row_pairs ? interleaved : row;
}

// One step of a transposition, for two rows a and b that are `size` rows apart. In runs of `size`
// lanes, counted from 0, the odd runs of a change places with the even runs of b.
template <int size, size_t... lane>
inline void exchange(Words& a, Words& b, std::index_sequence<lane...>) {
#if defined(__clang__)
  const Words low =
      __builtin_shufflevector(a, b, int(lane & size ? kLanes + lane - size : lane)...);
  b = __builtin_shufflevector(a, b, int(lane & size ? kLanes + lane : lane + size)...);
#else
  const Words low =
      __builtin_shuffle(a, b, Words{uint32_t(lane & size ? kLanes + lane - size : lane)...});
  b = __builtin_shuffle(a, b, Words{uint32_t(lane & size ? kLanes + lane : lane + size)...});
#endif
  a = low;
}

// The same for all pairs of rows that are `size` rows apart.
template <int size>
inline void exchange_all(Words* rows) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if (!(r & size)) exchange<size>(rows[r], rows[r + size], std::make_index_sequence<kLanes>());
  }
}

// Transposes 16 x 16 words in place. Not inlined: without AVX-512 it is long.
[[gnu::noinline]] void transpose(Words* rows) {
  exchange_all<8>(rows);
  exchange_all<4>(rows);
  exchange_all<2>(rows);
  exchange_all<1>(rows);
}
