// Packs a matrix into the tiles of an operand: splits each entry into bfloat16 parts.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Converts `count` numbers to float32. uint16_t stands for bfloat16.
inline void load(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

inline void load(const Float16* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) to[k] = static_cast<float>(from[k]);
}

inline void load(const uint16_t* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) {
    const uint32_t bits = static_cast<uint32_t>(from[k]) << 16;
    std::memcpy(to + k, &bits, sizeof bits);
  }
}

// Sixteen numbers as float32.
inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  __m256i halves;
  std::memcpy(&halves, from, sizeof halves);
  // This is the masked intrinsic: for the other one, GCC 12 warns of an uninitialised value in its
  // own header.
  return same_bits<Floats>(_mm512_maskz_cvtph_ps(0xffff, halves));
#else
  alignas(64) float values[kLanes];
  load(from, kLanes, values);
  return same_bits<Floats>(values);
#endif
}

inline Floats load(const uint16_t* from) {
  uint16_t halves __attribute__((vector_size(32)));
  std::memcpy(&halves, from, sizeof halves);
  return same_bits<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// The entries of a tile before they are split: rows `stride` apart in memory, times the scales of
// rows and columns; null: 1.
template <class S>
struct Entries {
  const S* data;
  int64_t stride;
  const float *row_scale, *column_scale;

  // The sixteen entries of this row from `column` on.
  Floats load_scaled(int64_t row, int64_t column) const {
    const Floats values = load(data + row * stride + column);
    const float scale = row_scale ? row_scale[row] : 1.0f;
    if (column_scale) return values * (scale * load(column_scale + column));
    return row_scale ? values * scale : values;
  }
};

inline uint32_t largest_lane(const Words& words) {
  uint32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    largest = words[lane] > largest ? words[lane] : largest;
  }
  return largest;
}

// Writes one tile for each part, `part_size` apart, in the layout that `row_pairs` and `transposed`
// name. Returns the bits of the largest absolute value. plain: as for `split_off_row`.
template <int parts, bool row_pairs, bool transposed, bool plain, class S>
uint32_t split_tile(const Entries<S>& from, uint16_t* to, int64_t part_size) {
  Words words[parts][kLanes], largest{};
#pragma GCC unroll 1
  for (int r = 0; r < kLanes; ++r) {
    Floats first = from.load_scaled(row_pairs ? 2 * r : r, 0);
    Floats second = from.load_scaled(row_pairs ? 2 * r + 1 : r, row_pairs ? 0 : kLanes);
    for (const Floats& values : {first, second}) {
      const Words size = same_bits<Words>(values) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
#pragma GCC unroll 3
    for (int part = 0; part < parts; ++part) {
      const Words row = split_off_row<row_pairs, plain>(first, second);
      if constexpr (transposed) {
        words[part][r] = row;
      } else {
        std::memcpy(to + part * part_size + r * kTileDepth, &row, sizeof row);
      }
    }
  }
  if constexpr (transposed) {
    for (int part = 0; part < parts; ++part) {
      transpose(words[part]);
      std::memcpy(to + part * part_size, words[part], sizeof words[part]);
    }
  }
  return largest_lane(largest);
}

// Writes one tile for each part. Returns false if an entry is not finite. A tile with a number that
// is too large for the plain split is split again.
template <int parts, bool row_pairs, bool transposed, class S>
bool split(const Entries<S>& from, uint16_t* to, int64_t part_size) {
  const uint32_t largest = split_tile<parts, row_pairs, transposed, true>(from, to, part_size);
  if (largest < kPastLargest) return true;
  return split_tile<parts, row_pairs, transposed, false>(from, to, part_size) < kInfinity;
}

template <bool row_pairs, bool transposed, class S>
bool split(const Entries<S>& from, int64_t parts, uint16_t* to, int64_t part_size) {
  const auto run = parts == 1   ? split<1, row_pairs, transposed, S>
                   : parts == 2 ? split<2, row_pairs, transposed, S>
                                : split<3, row_pairs, transposed, S>;
  return run(from, to, part_size);
}

// Returns f(entries) for the `tall` x `wide` entries that begin at this row and column. The matrix
// has `rows` rows and `columns` columns from there on; entries beyond them are zeros.
template <int64_t tall, int64_t wide, class S, class F>
inline auto with_entries(const ScaledMatrix& from, int64_t row, int64_t column, int64_t rows,
                         int64_t columns, const F& f) {
  const Entries<S> entries{
      static_cast<const S*>(from.matrix.data) + row * from.matrix.row_stride + column,
      from.matrix.row_stride, from.row_scale ? from.row_scale + row : nullptr,
      from.column_scale ? from.column_scale + column : nullptr};
  if (rows >= tall && columns >= wide) return f(entries);
  alignas(64) float values[tall * wide] = {}, row_scales[tall], column_scales[wide] = {};
  const auto copy = [](const float* scales, int64_t count, float* out) {
    for (int64_t k = 0; k < count; ++k) out[k] = scales ? scales[k] : 1.0f;
  };
  rows = min_of(rows, tall);
  columns = min_of(columns, wide);
  copy(entries.row_scale, rows, row_scales);
  copy(entries.column_scale, columns, column_scales);
  for (int64_t r = 0; r < rows; ++r) {
    load(entries.data + r * entries.stride, columns, values + r * wide);
    for (int64_t k = 0; k < columns; ++k) {
      values[r * wide + k] *= row_scales[r] * column_scales[k];
    }
  }
  return f(Entries<float>{values, wide, nullptr, nullptr});
}

// Packs one tile for each part, `part_size` apart, as `with_entries` and `split` do.
template <class S, bool row_pairs, bool transposed>
bool pack_tile(const ScaledMatrix& from, int64_t row, int64_t column, int64_t rows,
               int64_t columns, int64_t parts, uint16_t* to, int64_t part_size) {
  return with_entries<row_pairs ? 32 : 16, row_pairs ? 16 : 32, S>(
      from, row, column, rows, columns, [&](const auto& entries) {
        return split<row_pairs, transposed>(entries, parts, to, part_size);
      });
}

// As AmxKernels::pack. The rows of the operand are rows of the matrix, or with `row_pairs` its
// columns.
template <class S, bool row_pairs, bool transposed>
bool pack_strips(const ScaledMatrix& from, int64_t operand_rows, int64_t first, int64_t depth,
                 int64_t parts, uint16_t* to, Range strips) {
  const int64_t steps = ceil_div(depth, kTileDepth), part_size = steps * kTileElements;
  bool finite = true;
  const auto pack_step = [&](int64_t strip, int64_t step) {
    const int64_t start = strip * kTileSide, count = operand_rows - start;
    const int64_t k = first + step * kTileDepth, depth_left = first + depth - k;
    uint16_t* out = to + strip * parts * part_size + step * kTileElements;
    finite &= pack_tile<S, row_pairs, transposed>(
        from, row_pairs ? k : start, row_pairs ? start : k, row_pairs ? depth_left : count,
        row_pairs ? count : depth_left, parts, out, part_size);
  };
  // The inner loop runs along the rows of the matrix, since these lie far apart in memory.
  const int64_t filled = min_of(strips.end, ceil_div(operand_rows, kTileSide));
  if (row_pairs) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t strip = strips.begin; strip < filled; ++strip) pack_step(strip, step);
    }
  } else {
    for (int64_t strip = strips.begin; strip < filled; ++strip) {
      for (int64_t step = 0; step < steps; ++step) pack_step(strip, step);
    }
  }
  for (int64_t strip = filled > strips.begin ? filled : strips.begin; strip < strips.end; ++strip) {
    std::memset(to + strip * parts * part_size, 0, parts * part_size * sizeof *to);
  }
  return finite;
}

template <class S>
bool pack_from(TileLayout layout, const ScaledMatrix& from, int64_t operand_rows, int64_t first,
               int64_t depth, int64_t parts, uint16_t* to, Range strips) {
  const auto run = layout == TileLayout::rows              ? pack_strips<S, false, false>
                   : layout == TileLayout::rows_transposed ? pack_strips<S, false, true>
                   : layout == TileLayout::row_pairs       ? pack_strips<S, true, false>
                                                           : pack_strips<S, true, true>;
  return run(from, operand_rows, first, depth, parts, to, strips);
}

bool pack(TileLayout layout, const ScaledMatrix& from, int64_t operand_rows, int64_t first,
          int64_t depth, int64_t parts, uint16_t* to, Range strips) {
  const auto run = from.matrix.dtype == Dtype::float16    ? pack_from<Float16>
                   : from.matrix.dtype == Dtype::bfloat16 ? pack_from<uint16_t>
                                                          : pack_from<float>;
  return run(layout, from, operand_rows, first, depth, parts, to, strips);
}
