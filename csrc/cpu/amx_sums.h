// Where the sums of a block of products go.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Where the sums of a block go: `to` (+)= them, times the rests of its rows and columns.
struct Target {
  float* to;
  int64_t stride, rows, columns;
  bool add;
  ScoreScales scales;

  bool whole() const { return rows >= kTileGroup && columns >= kTileGroup; }
};

template <bool add, bool scaled>
inline void take_rows(const float* sums, int64_t stride, const Target& target, int64_t begin,
                      int64_t end) {
  float* to = target.to + begin * target.stride;
  for (int64_t r = begin; r < end; ++r, to += target.stride) {
#pragma GCC unroll 2
    for (int at = 0; at < kTileGroup; at += kLanes) {
      Floats values = load(sums + r * stride + at);
      if constexpr (scaled) values *= target.scales.rows[r] * load(target.scales.columns + at);
      if constexpr (add) values += load(to + at);
      std::memcpy(to + at, &values, sizeof values);
    }
  }
}

// Rows of a whole block.
inline void take_rows(const float* sums, int64_t stride, const Target& target, int64_t begin,
                      int64_t end) {
  if (target.scales.rows) {
    target.add ? take_rows<true, true>(sums, stride, target, begin, end)
               : take_rows<false, true>(sums, stride, target, begin, end);
  } else {
    target.add ? take_rows<true, false>(sums, stride, target, begin, end)
               : take_rows<false, false>(sums, stride, target, begin, end);
  }
}

// Of a block whose memory ends before its sums do.
[[gnu::noinline]] void take_part(const float* sums, const Target& target) {
  for (int64_t r = 0; r < smaller(target.rows, kTileGroup); ++r) {
    float* to = target.to + r * target.stride;
    for (int64_t j = 0; j < smaller(target.columns, kTileGroup); ++j) {
      float value = sums[r * kTileGroup + j];
      if (target.scales.rows) value *= target.scales.rows[r] * target.scales.columns[j];
      to[j] = target.add ? to[j] + value : value;
    }
  }
}

// The sums of one block after another. What becomes of those of a block is done while the next is
// multiplied.
class PendingSums {
 public:
  // steps: of the products of a block.
  explicit PendingSums(int64_t steps) : rows_of_step_(tiles(kTileGroup, steps > 0 ? steps : 1)) {}
  ~PendingSums() { finish(); }

  // Memory for the sums of the next block.
  float* next() { return sums_[turn_]; }
  // Takes a share of the block before.
  void take_some() {
    const int64_t begin = taken_;
    if (begin >= kTileGroup) return;
    taken_ = smaller(begin + rows_of_step_, kTileGroup);
    take_rows(sums_[!turn_], kTileGroup, target_, begin, taken_);
  }
  // Where the sums go that are now in memory.
  void put(const Target& target) {
    if (!target.whole()) return take_part(next(), target);
    finish();
    target_ = target;
    taken_ = 0;
    turn_ = !turn_;
  }

 private:
  void finish() {
    if (taken_ < kTileGroup) take_rows(sums_[!turn_], kTileGroup, target_, taken_, kTileGroup);
  }

  alignas(64) float sums_[2][kTileGroup * kTileGroup];
  const int64_t rows_of_step_;
  Target target_{};
  int64_t taken_ = kTileGroup;
  bool turn_ = false;
};
