// Stores the sums of a square of products.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Where the sums of a square are stored. They are multiplied by the scales, and with `add` they are
// added to the numbers there. rows, columns: those of the matrix from the square's first on.
struct Target {
  float* to;
  int64_t stride, rows, columns;
  bool add;
  ScoreScales scales;

  // Whether the square does not reach over an edge of the matrix.
  bool is_full() const { return rows >= kTileGroup && columns >= kTileGroup; }
};

template <bool add, bool scaled>
inline void store_rows(const float* sums, int64_t stride, const Target& target, int64_t begin,
                       int64_t end) {
  float* to = target.to + begin * target.stride;
  for (int64_t r = begin; r < end; ++r, to += target.stride) {
#pragma GCC unroll 2
    for (int j = 0; j < kTileGroup; j += kLanes) {
      Floats values = load(sums + r * stride + j);
      if constexpr (scaled) values *= target.scales.rows[r] * load(target.scales.columns + j);
      if constexpr (add) values += load(to + j);
      std::memcpy(to + j, &values, sizeof values);
    }
  }
}

// Stores rows [begin, end) of a full square. stride: of the sums.
inline void store_rows(const float* sums, int64_t stride, const Target& target, int64_t begin,
                       int64_t end) {
  if (target.scales.rows) {
    target.add ? store_rows<true, true>(sums, stride, target, begin, end)
               : store_rows<false, true>(sums, stride, target, begin, end);
  } else {
    target.add ? store_rows<true, false>(sums, stride, target, begin, end)
               : store_rows<false, false>(sums, stride, target, begin, end);
  }
}

// Stores the part of a square that lies within the matrix.
[[gnu::noinline]] void store_edge(const float* sums, const Target& target) {
  for (int64_t r = 0; r < min_of(target.rows, kTileGroup); ++r) {
    float* to = target.to + r * target.stride;
    for (int64_t j = 0; j < min_of(target.columns, kTileGroup); ++j) {
      float value = sums[r * kTileGroup + j];
      if (target.scales.rows) value *= target.scales.rows[r] * target.scales.columns[j];
      to[j] = target.add ? to[j] + value : value;
    }
  }
}

// The sums of one square after another. Those of a full square are stored while the next square is
// multiplied.
class PendingSums {
 public:
  // steps: the steps of depth of each product.
  explicit PendingSums(int64_t steps)
      : rows_of_step_(ceil_div(kTileGroup, steps > 0 ? steps : 1)) {}
  ~PendingSums() { finish(); }

  // Memory for the sums of the next square.
  float* next() { return sums_[current_]; }
  // Stores a share of the square before: in each step of a product, a few of its rows.
  void store_some() {
    const int64_t begin = stored_rows_;
    if (begin >= kTileGroup) return;
    stored_rows_ = min_of(begin + rows_of_step_, kTileGroup);
    store_rows(sums_[!current_], kTileGroup, target_, begin, stored_rows_);
  }
  // The sums in the memory of `next` are complete and belong to this target.
  void complete(const Target& target) {
    if (!target.is_full()) return store_edge(next(), target);
    finish();
    target_ = target;
    stored_rows_ = 0;
    current_ = !current_;
  }

 private:
  // Stores the rest of the square before.
  void finish() {
    if (stored_rows_ < kTileGroup) {
      store_rows(sums_[!current_], kTileGroup, target_, stored_rows_, kTileGroup);
    }
  }

  alignas(64) float sums_[2][kTileGroup * kTileGroup];
  const int64_t rows_of_step_;
  Target target_{};
  int64_t stored_rows_ = kTileGroup;
  bool current_ = false;
};
