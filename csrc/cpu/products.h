// The three matrix products of the engine on unpacked row-major operands, single precision or
// double, for one thread's share of the output. A register tile of kTileRows x kTileColumns is
// summed over the whole depth of a block before it touches memory, so every output has one fixed
// order of summation whatever the threads.
//
// Included by kernels.cpp, inside the namespace of one instruction set.

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2;
#else
constexpr int kVectorBytes = 16, kVectors = 2;
#endif
constexpr int64_t kDepth = 512;         // of a block whose right operand stays in cache
constexpr int64_t kColumnBlock = 96;    // columns of a panel that stay in cache, transposed product

template <class T>
using Vector __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias)) = T;

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <class T>
constexpr int64_t kTileColumns = kVectors * kLanes<T>;

// c[r][:] (+)= sum_k a[r * a_row + k * a_step] * b[k * b_step][:] for `rows` rows, one tile wide.
template <class T, int rows>
[[gnu::noinline]] void tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step, int64_t depth,
          T* c, int64_t c_row, bool add) {
  using V = Vector<T>;
  V sum[rows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      right[v] = *reinterpret_cast<const V*>(b + v * kLanes<T>);
    }
    for (int r = 0; r < rows; ++r) {
      const T left = a[r * a_row];
      for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
    }
    a += a_step;
    b += b_step;
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      V* out = reinterpret_cast<V*>(c + r * c_row + v * kLanes<T>);
      *out = add ? *out + sum[r][v] : sum[r][v];
    }
  }
}

template <class T>
void tile_of(int64_t rows, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
             int64_t depth, T* c, int64_t c_row, bool add) {
  switch (rows) {
    case 1: return tile<T, 1>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
    case 2: return tile<T, 2>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
    case 3: return tile<T, 3>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
    case 4: return tile<T, 4>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
    case 5: return tile<T, 5>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
    default: return tile<T, 6>(a, a_row, a_step, b, b_step, depth, c, c_row, add);
  }
}

// A column of tiles: all `rows` of a against `columns` <= kTileColumns of b. A narrower b is
// padded with zeros in `padded` (depth, kTileColumns) unless it is wide enough to be read past.
template <class T>
void column_of_tiles(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b,
                     int64_t b_step, int64_t columns, int64_t depth, T* c, int64_t c_row,
                     bool add, T* padded) {
  constexpr int64_t wide = kTileColumns<T>;
  const bool whole = columns == wide;
  if (!whole && b_step != wide) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < wide; ++j) padded[k * wide + j] = j < columns ? b[k * b_step + j] : T(0);
    }
    b = padded;
    b_step = wide;
  }
  for (int64_t top = 0; top < rows; top += kTileRows) {
    const int64_t count = all_reduce_min(kTileRows, rows - top);
    const T* left = a + top * a_row;
    T* out = c + top * c_row;
    if (whole) {
      tile_of(count, left, a_row, a_step, b, b_step, depth, out, c_row, add);
      continue;
    }
    T scratch[kTileRows * wide];
    tile_of(count, left, a_row, a_step, b, b_step, depth, scratch, wide, false);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        T& to = out[r * c_row + j];
        to = add ? to + scratch[r * wide + j] : scratch[r * wide + j];
      }
    }
  }
}

template <class T>
struct Padded {
  T values[kDepth * kTileColumns<T>];
};

// y (rows, width) as column panels (rows / wide, width, wide), the last one padded with zeros:
// the right operand of `score_panels`.
template <class T>
void pack_panels(const T* y, int64_t rows, int64_t width, T* packed, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const T* from = y + panel * wide * width;
    T* to = packed + panel * wide * width;
    const int64_t count = all_reduce_min(wide, rows - panel * wide);
    for (int64_t k0 = 0; k0 < width; k0 += 16) {
      const int64_t k1 = all_reduce_min(k0 + 16, width);
      for (int64_t j = 0; j < wide; ++j) {
        for (int64_t k = k0; k < k1; ++k) to[k * wide + j] = j < count ? from[j * width + k] : T(0);
      }
    }
  }
}

// scores = x y^T with y packed, for the given rows of x and panels of y.
template <class T>
void score_panels(const T* x, int64_t width, const T* packed, int64_t columns, T* scores,
                  int64_t stride, Range rows, Range panels) {
  constexpr int64_t wide = kTileColumns<T>;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t at = panel * wide;
    column_of_tiles(x + rows.begin * width, width, int64_t(1), rows.end - rows.begin,
                    packed + at * width, wide, all_reduce_min(wide, columns - at), width,
                    scores + rows.begin * stride + at, stride, false, static_cast<T*>(nullptr));
  }
}

// out (+)= panel y in the given rows, with panel (rows, depth) and y (depth, width).
template <class T>
void multiply_rows(const T* panel, int64_t stride, int64_t depth, const T* y, int64_t width,
                   T* out, bool add, Range rows) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local Padded<T> padded;
  for (int64_t k = 0; k < depth; k += kDepth) {
    for (int64_t at = 0; at < width; at += wide) {
      column_of_tiles(panel + rows.begin * stride + k, stride, int64_t(1), rows.end - rows.begin,
                      y + k * width + at, width, all_reduce_min(wide, width - at),
                      all_reduce_min(kDepth, depth - k), out + rows.begin * width + at, width, add || k > 0, padded.values);
    }
  }
}

// out (+)= panel^T x in the given columns of the panel, with panel (depth, columns) and x (depth, width).
template <class T>
void multiply_columns(const T* panel, int64_t stride, int64_t depth, const T* x, int64_t width,
                      T* out, bool add, Range columns) {
  constexpr int64_t wide = kTileColumns<T>;
  static thread_local Padded<T> padded;
  for (int64_t first = columns.begin; first < columns.end; first += kColumnBlock) {
    const int64_t count = all_reduce_min(kColumnBlock, columns.end - first);
    for (int64_t k = 0; k < depth; k += kDepth) {
      for (int64_t at = 0; at < width; at += wide) {
        column_of_tiles(panel + k * stride + first, int64_t(1), stride, count, x + k * width + at,
                        width, all_reduce_min(wide, width - at), all_reduce_min(kDepth, depth - k),
                        out + first * width + at, width, add || k > 0, padded.values);
      }
    }
  }
}
