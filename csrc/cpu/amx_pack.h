// Operand tiles of a matrix: each entry split into bfloat16 parts.
//
// Included by amx.cpp, inside the namespace of one instruction set.

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

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  __m256i halves;
  std::memcpy(&halves, from, sizeof halves);
  // The masked one: of the other GCC 12 warns that what its own header leaves out is not there.
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

// What the entries of a tile are: rows `stride` apart times the scales, null for 1.
template <class S>
struct Entries {
  const S* data;
  int64_t stride;
  const float *row_scale, *column_scale;

  Floats take(int64_t row, int64_t column) const {
    const Floats values = load(data + row * stride + column);
    const float scale = row_scale ? row_scale[row] : 1.0f;
    if (column_scale) return values * (scale * load(column_scale + column));
    return row_scale ? values * scale : values;
  }
};

inline uint32_t largest_of(const Words& words) {
  uint32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) most = words[lane] > most ? words[lane] : most;
  return most;
}

// One operand tile of each part, `next` apart. The largest size of an entry, as bits.
template <int parts, bool pairs, bool transposed, bool plain, class S>
uint32_t split_tile(const Entries<S>& from, uint16_t* to, int64_t next) {
  Words words[parts][kLanes], largest{};
#pragma GCC unroll 1
  for (int r = 0; r < kLanes; ++r) {
    Floats first = from.take(pairs ? 2 * r : r, 0);
    Floats second = from.take(pairs ? 2 * r + 1 : r, pairs ? 0 : kLanes);
    for (const Floats& values : {first, second}) {
      const Words size = same_bits<Words>(values) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
#pragma GCC unroll 3
    for (int part = 0; part < parts; ++part) {
      const Words row = take_row<pairs, plain>(first, second);
      if constexpr (transposed) {
        words[part][r] = row;
      } else {
        std::memcpy(to + part * next + r * kTileDepth, &row, sizeof row);
      }
    }
  }
  if constexpr (transposed) {
    for (int part = 0; part < parts; ++part) {
      transpose(words[part]);
      std::memcpy(to + part * next, words[part], sizeof words[part]);
    }
  }
  return largest_of(largest);
}

// False if an entry is not finite.
template <int parts, bool pairs, bool transposed, class S>
bool split(const Entries<S>& from, uint16_t* to, int64_t next) {
  const uint32_t largest = split_tile<parts, pairs, transposed, true>(from, to, next);
  if (largest < kPastLargest) return true;
  return split_tile<parts, pairs, transposed, false>(from, to, next) < kInfinity;
}

template <bool pairs, bool transposed, class S>
bool split(const Entries<S>& from, int64_t parts, uint16_t* to, int64_t next) {
  const auto run = parts == 1   ? split<1, pairs, transposed, S>
                   : parts == 2 ? split<2, pairs, transposed, S>
                                : split<3, pairs, transposed, S>;
  return run(from, to, next);
}

// Calls f(entries) of the `tall` x `wide` entries from `row`, `column` on, of which `rows` x
// `columns` are there and the others zeros.
template <int64_t tall, int64_t wide, class S, class F>
inline auto with_entries(const Packed& from, int64_t row, int64_t column, int64_t rows,
                         int64_t columns, const F& f) {
  const Entries<S> entries{
      static_cast<const S*>(from.matrix.data) + row * from.matrix.row_stride + column,
      from.matrix.row_stride, from.row_scale ? from.row_scale + row : nullptr,
      from.column_scale ? from.column_scale + column : nullptr};
  if (rows >= tall && columns >= wide) return f(entries);
  alignas(64) float values[tall * wide] = {}, of_rows[tall], of_columns[wide] = {};
  const auto copy = [](const float* scales, int64_t count, float* out) {
    for (int64_t k = 0; k < count; ++k) out[k] = scales ? scales[k] : 1.0f;
  };
  rows = smaller(rows, tall);
  columns = smaller(columns, wide);
  copy(entries.row_scale, rows, of_rows);
  copy(entries.column_scale, columns, of_columns);
  for (int64_t r = 0; r < rows; ++r) {
    load(entries.data + r * entries.stride, columns, values + r * wide);
    for (int64_t k = 0; k < columns; ++k) values[r * wide + k] *= of_rows[r] * of_columns[k];
  }
  return f(Entries<float>{values, wide, nullptr, nullptr});
}

// One operand tile of each part, `next` apart, of `rows` x `columns` entries from `row`, `column`
// on; false if one is not finite.
template <class S, bool pairs, bool transposed>
bool pack_tile(const Packed& from, int64_t row, int64_t column, int64_t rows, int64_t columns,
               int64_t parts, uint16_t* to, int64_t next) {
  return with_entries<pairs ? 32 : 16, pairs ? 16 : 32, S>(
      from, row, column, rows, columns, [&](const auto& entries) {
        return split<pairs, transposed>(entries, parts, to, next);
      });
}

// Strips of a matrix of `strip_count` rows (`rows`) or columns (`pairs`).
template <class S, bool pairs, bool transposed>
bool pack_strips(const Packed& from, int64_t strip_count, int64_t first, int64_t depth,
                 int64_t parts, uint16_t* to, Range strips) {
  const int64_t steps = tiles(depth, kTileDepth), next = steps * kTileElements;
  bool finite = true;
  const auto pack_step = [&](int64_t strip, int64_t step) {
    const int64_t at = strip * kTileSide, count = strip_count - at;
    const int64_t k = first + step * kTileDepth, rest = first + depth - k;
    uint16_t* out = to + strip * parts * next + step * kTileElements;
    finite &= pack_tile<S, pairs, transposed>(from, pairs ? k : at, pairs ? at : k,
                                              pairs ? rest : count, pairs ? count : rest, parts,
                                              out, next);
  };
  // Along the rows of the matrix, which lie apart.
  const int64_t filled = smaller(strips.end, tiles(strip_count, kTileSide));
  if (pairs) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t strip = strips.begin; strip < filled; ++strip) pack_step(strip, step);
    }
  } else {
    for (int64_t strip = strips.begin; strip < filled; ++strip) {
      for (int64_t step = 0; step < steps; ++step) pack_step(strip, step);
    }
  }
  for (int64_t strip = filled > strips.begin ? filled : strips.begin; strip < strips.end; ++strip) {
    std::memset(to + strip * parts * next, 0, parts * next * sizeof *to);
  }
  return finite;
}

template <class S>
bool pack_from(Pack form, const Packed& from, int64_t strip_count, int64_t first, int64_t depth,
               int64_t parts, uint16_t* to, Range strips) {
  const auto run = form == Pack::rows              ? pack_strips<S, false, false>
                   : form == Pack::rows_transposed ? pack_strips<S, false, true>
                   : form == Pack::pairs           ? pack_strips<S, true, false>
                                                   : pack_strips<S, true, true>;
  return run(from, strip_count, first, depth, parts, to, strips);
}

bool pack(Pack form, const Packed& from, int64_t strip_count, int64_t first, int64_t depth,
          int64_t parts, uint16_t* to, Range strips) {
  const auto run = from.matrix.dtype == Dtype::float16    ? pack_from<Float16>
                   : from.matrix.dtype == Dtype::bfloat16 ? pack_from<uint16_t>
                                                          : pack_from<float>;
  return run(form, from, strip_count, first, depth, parts, to, strips);
}
