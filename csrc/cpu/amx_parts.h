// The bfloat16 parts of numbers, sixteen at a time, and how the words of them lie in a tile.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// The first that no bfloat16 is nearest to but infinity.
constexpr uint32_t kPastLargest = 0x7f7f8000, kInfinity = 0x7f800000;

// Sixteen at a time: the words of a tile's row.
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

// Of the halves of a, then of b, those of these numbers.
template <size_t... lane>
inline Words pick_halves(const Words& a, const Words& b, std::index_sequence<lane...>) {
  const Halves first = same_bits<Halves>(a), second = same_bits<Halves>(b);
#if defined(__clang__)
  return same_bits<Words>(__builtin_shufflevector(first, second, int(lane)...));
#else
  return same_bits<Words>(__builtin_shuffle(first, second, Halves{static_cast<uint16_t>(lane)...}));
#endif
}

// The upper halves of all words of a, then of b.
template <size_t... lane>
inline Words upper_halves(const Words& a, const Words& b, std::index_sequence<lane...>) {
  return pick_halves(a, b, std::index_sequence<(2 * lane + 1)...>());
}

// The halves of the first half of a, each followed by its fellow of the second half.
template <size_t... lane>
inline Words in_turns(const Words& a, std::index_sequence<lane...>) {
  return pick_halves(a, a, std::index_sequence<(lane / 2 + lane % 2 * kLanes)...>());
}

// Sixteen halves of a from `first` on, each followed by its fellow of b.
template <int first, size_t... lane>
inline Words in_pairs(const Words& a, const Words& b, std::index_sequence<lane...>) {
  return pick_halves(a, b, std::index_sequence<(first + lane / 2 + lane % 2 * 2 * kLanes)...>());
}

constexpr auto kOfHalves = std::make_index_sequence<2 * kLanes>();

// The bits of the nearest bfloat16 in the upper half; what is left of the values. Infinities and NaN
// stay what they are, with nothing left, and what would round to infinity is cut off instead.
inline Words take_part(Floats& values) {
  const Words bits = same_bits<Words>(values);
  const Words size = bits & 0x7fffffff, cut = size > kInfinity ? bits | 0x400000 : bits;
  Words part = bits + 0x7fff + ((bits >> 16) & 1);
  part = (size >= kPastLargest ? cut : part) & 0xffff0000;
  const Floats rest = values - same_bits<Floats>(part);
  values = (bits & kInfinity) != kInfinity ? rest : Floats{};
  return part;
}

// The nearest bfloat16 of each, none of which is as large as kPastLargest: of the first, then of the
// second. The processor's own instruction makes zeros of subnormal numbers, as its products would.
inline Words nearest(const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  return same_bits<Words>(
      _mm512_cvtne2ps_pbh(same_bits<__m512>(second), same_bits<__m512>(first)));
#else
  const auto rounded = [](const Floats& values) {
    const Words bits = same_bits<Words>(values);
    return bits + 0x7fff + ((bits >> 16) & 1);
  };
  return upper_halves(rounded(first), rounded(second), kOfHalves);
#endif
}

// Takes the next part off both: a row of a tile.
template <bool pairs, bool plain>
inline Words take_row(Floats& first, Floats& second) {
  if constexpr (!plain) {
    const Words low = take_part(first), high = take_part(second);
    return pairs ? low >> 16 | high : upper_halves(low, high, kOfHalves);
  }
  const Words row = nearest(first, second), both = in_turns(row, kOfHalves);
  first -= same_bits<Floats>(both << 16);
  second -= same_bits<Floats>(both & 0xffff0000);
  return pairs ? both : row;
}

// Exchanges the blocks of `size` lanes that two rows of a transposed square have to swap.
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

template <int size>
inline void exchange_blocks(Words* rows) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if (!(r & size)) exchange<size>(rows[r], rows[r + size], std::make_index_sequence<kLanes>());
  }
}

// Transposes 16 x 16 words. Not inlined: without AVX-512 it is long.
[[gnu::noinline]] void transpose(Words* rows) {
  exchange_blocks<8>(rows);
  exchange_blocks<4>(rows);
  exchange_blocks<2>(rows);
  exchange_blocks<1>(rows);
}
