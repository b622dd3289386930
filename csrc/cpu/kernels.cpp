// The epilogues of csrc/epilogue.h over rows and columns of a block, one pass at a time while the
// row lies in cache. Compiled once per instruction set (setup.py); ops.cpp picks one at load.
// Everything lives in a namespace of that set, so no inline function is shared between them.
#include <limits>

#include "block.h"
#include "epilogue.h"

#ifndef FASTSIM_ISA
#define FASTSIM_ISA generic
#endif
#define FASTSIM_STRING2(x) #x
#define FASTSIM_STRING(x) FASTSIM_STRING2(x)

namespace fastsim {
namespace FASTSIM_ISA {
namespace {

// Scores handled between two additions to a double: enough to vectorise, few enough that the
// chunk stays in the first-level cache and float rounding does not build up.
constexpr int64_t kChunk = 1024;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#include "products.h"

template <class F>
inline void for_chunks(int64_t begin, int64_t end, const F& f) {
  for (int64_t at = begin; at < end; at += kChunk) f(at, least(kChunk, end - at));
}

// ---- reading and writing the caller's dtypes ----

template <class S>
struct Convert {
  template <class T>
  static T to(S value) {
    return static_cast<T>(value);
  }
};

struct BFloat16 {
  uint16_t bits;
};

template <>
struct Convert<BFloat16> {
  template <class T>
  static T to(BFloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return static_cast<T>(out);
  }
};

// To nearest, ties to even; a NaN stays one.
inline BFloat16 round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0 : rounded)};
}

template <class S, class T>
void convert(const Matrix& m, int64_t row, int64_t column, int64_t count, T* out) {
  const S* from = static_cast<const S*>(m.data) + row * m.row_stride;
  if (m.column_stride == 1) {
    for (int64_t j = 0; j < count; ++j) out[j] = Convert<S>::template to<T>(from[column + j]);
  } else {
    for (int64_t j = 0; j < count; ++j) {
      out[j] = Convert<S>::template to<T>(from[(column + j) * m.column_stride]);
    }
  }
}

template <class T>
void load(const Matrix& m, int64_t row, int64_t column, int64_t count, T* out) {
  switch (m.dtype) {
    case Dtype::int8: return convert<int8_t>(m, row, column, count, out);
    case Dtype::uint8: return convert<uint8_t>(m, row, column, count, out);
    case Dtype::int16: return convert<int16_t>(m, row, column, count, out);
    case Dtype::int32: return convert<int32_t>(m, row, column, count, out);
    case Dtype::int64: return convert<int64_t>(m, row, column, count, out);
    case Dtype::float16: return convert<_Float16>(m, row, column, count, out);
    case Dtype::bfloat16: return convert<BFloat16>(m, row, column, count, out);
    case Dtype::float32: return convert<float>(m, row, column, count, out);
    case Dtype::float64: return convert<double>(m, row, column, count, out);
  }
}

template <class T>
void store(const T* from, int64_t count, void* to, Dtype dtype, int64_t at) {
  if (dtype == Dtype::float16) {
    _Float16* out = static_cast<_Float16*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = static_cast<_Float16>(from[k]);
  } else if (dtype == Dtype::bfloat16) {
    BFloat16* out = static_cast<BFloat16*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = round_to_bfloat16(static_cast<float>(from[k]));
  } else {
    T* out = static_cast<T*>(to) + at;
    for (int64_t k = 0; k < count; ++k) out[k] = from[k];
  }
}

// ---- unit rows ----

template <class T>
double dot(const T* a, const T* b, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < count; ++k) sum += double(a[k]) * double(b[k]);
  return sum;
}

// x / |x|, a row shorter than the smallest normal number as zeros; `inverse` keeps 1 / |x| or 0.
template <class T>
void unit_rows(const Matrix& x, int64_t width, T* unit, T* inverse, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* out = unit + row * width;
    load(x, row, 0, width, out);
    const double norm = __builtin_sqrt(dot(out, out, width));
    const T factor = norm < std::numeric_limits<T>::min() ? T(0) : T(1 / norm);
    inverse[row] = factor;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] *= factor;
  }
}

// x = outer * (g - along * x)
template <class T>
void subtract_along(T* x, const T* g, T along, T outer, int64_t count) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) x[k] = outer * (g[k] - along * x[k]);
}

// dx = factor r (g - (u . g) u) for g = dL/du, u = r x; `dots` keeps u . g.
template <class T>
void unit_rows_backward(const T* grad_unit, const Matrix& x, int64_t width, const T* inverse,
                        T factor, void* grad, Dtype dtype, T* dots, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* g = grad_unit + row * width;
    const T r = inverse[row];
    T chunk[kChunk];
    double sum = 0;
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      load(x, row, at, n, chunk);
      sum += dot(chunk, g + at, n);
    });
    dots[row] = T(sum * r);
    for_chunks(0, width, [&](int64_t at, int64_t n) {
      if (width > kChunk) load(x, row, at, n, chunk);
      subtract_along(chunk, g + at, dots[row] * r, factor * r, n);
      store(chunk, n, grad, dtype, row * width + at);
    });
  }
}

// ---- which pairs take part, and their targets ----

// Marks the row's pairs that take no part, and returns the positive's column in the block or -1.
template <class T>
int64_t mark_left_out(const Block<T>& b, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = b.positives ? b.positive(row) : -1;
  if (b.row_ids) {
    const int64_t id = b.row_ids[row];
    const T kept = positive >= 0 ? s[positive] : T(0);
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] = b.column_ids[j] == id ? kLeftOut<T> : s[j];
    if (positive >= 0) s[positive] = kept;
  }
  const int64_t diagonal = b.row0 + row - b.column0;
  if (b.skip == Skip::diagonal && diagonal >= 0 && diagonal < b.columns) s[diagonal] = kLeftOut<T>;
  if (b.skip == Skip::lower) {
    for (int64_t j = 0; j < least(diagonal + 1, b.columns); ++j) s[j] = kLeftOut<T>;
  }
  return positive;
}

template <class T>
bool has_matrix_targets(const Block<T>& b) {
  return b.dense.data || b.row_groups;
}

// The targets of `count` columns from `column` on, left-out pairs (a skipped diagonal) as 0.
template <class T>
void load_targets(const Block<T>& b, int64_t row, int64_t column, int64_t count, T* out) {
  if (b.dense.data) {
    load(b.dense, row, column, count, out);
  } else {
    const int64_t group = b.row_groups[row], *groups = b.column_groups + column;
    const T otherwise = b.otherwise;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = groups[j] == group ? T(1) : otherwise;
  }
  const int64_t diagonal = b.row0 + row - b.column0 - column;
  if (b.skip == Skip::diagonal && diagonal >= 0 && diagonal < count) out[diagonal] = T(0);
}

template <class T>
T maximum(const T* s, int64_t count) {
  T top = kLeftOut<T>;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < count; ++j) top = s[j] > top ? s[j] : top;
  return top;
}

// Folds (top, sum) into the running state at `at`; the exponents are in units of `scale`.
void merge(const MaxSum& state, int64_t at, double top, double sum, double scale) {
  const double old = state.max[at];
  const double both = top > old ? top : old;
  state.sum[at] = state.sum[at] * exponential(scale * (old - both)) +
                  sum * exponential(scale * (top - both));
  state.max[at] = both;
}

// ---- normalised losses ----

template <class T>
struct Row {
  T* scores;
  int64_t positive;
  T top;
};

// Leaves out what takes no part, takes the margin from the positive, finds the maximum.
template <class T>
Row<T> open_row(const Block<T>& b, T margin, int64_t row) {
  T* s = b.scores + row * b.stride;
  const int64_t positive = mark_left_out(b, row);
  if (positive >= 0 && !has_matrix_targets(b)) s[positive] -= margin;
  return {s, positive, maximum(s, b.columns)};
}

// Sum of exponentials; `keep` leaves them in place of the scores.
template <bool keep, class T>
double sum_exponentials(T* s, int64_t count, T top, const Softmax<T>& softmax) {
  double sum = 0;
  for_chunks(0, count, [&](int64_t at, int64_t n) {
    T* chunk = s + at;
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; ++j) {
      const T e = softmax.share(chunk[j], top);
      if constexpr (keep) chunk[j] = e;
      part += e;
    }
    sum += part;
  });
  return sum;
}

// Adds sum_j t z and sum_j t of the row to the state.
template <class T>
void add_targets(const Block<T>& b, const Row<T>& r, T scale, const SoftmaxState<T>& state,
                 int64_t row) {
  if (!has_matrix_targets(b)) {
    if (r.positive >= 0) {
      state.target_logits[row] = double(scale) * r.scores[r.positive];
      state.target_sums[row] = 1;
    }
    return;
  }
  double logits = 0, sums = 0;
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    load_targets(b, row, at, n, targets);
    const T* s = r.scores + at;
    T logit = 0, sum = 0;
#pragma omp simd reduction(+ : logit, sum)
    for (int64_t j = 0; j < n; ++j) {
      logit = fused(targets[j], s[j], logit);
      sum += targets[j];
    }
    logits += logit;
    sums += sum;
  });
  state.target_logits[row] += double(scale) * logits;
  state.target_sums[row] += sums;
}

// Subtracts `weight` times the targets from the slopes of a row.
template <class T>
void subtract_targets(const Block<T>& b, int64_t row, int64_t positive, T weight, T* slope) {
  if (!has_matrix_targets(b)) {
    if (positive >= 0) slope[positive] -= weight;
    return;
  }
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    load_targets(b, row, at, n, targets);
    T* chunk = slope + at;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) chunk[j] = fused(-weight, targets[j], chunk[j]);
  });
}

// State and slope of whole rows in one visit.
template <class T>
void softmax_visit(const Block<T>& b, T scale, T margin, bool normalise, const T* weights,
                   const SoftmaxState<T>& state, int64_t begin, int64_t end) {
  const Softmax<T> softmax{scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, margin, row);
    state.rows.max[row] = r.top;
    state.target_logits[row] = state.target_sums[row] = 0;
    add_targets(b, r, scale, state, row);
    const double sum = sum_exponentials<true>(r.scores, b.columns, r.top, softmax);
    const bool none = r.top <= kLeftOut<T>;  // every pair is left out
    state.rows.sum[row] = none ? 0 : sum;
    const double targets = state.target_sums[row];
    const double unit = normalise && targets != 0 ? 1 / targets : normalise ? 0 : 1;
    const double weight = none ? 0 : double(weights[row]) * scale * unit;
    const T factor = T(weight * targets / sum);
    T* s = r.scores;
#pragma omp simd
    for (int64_t j = 0; j < b.columns; ++j) s[j] *= factor;
    subtract_targets(b, row, r.positive, T(weight), s);
  }
}

template <class T>
void softmax_fold_rows(const Block<T>& b, T scale, T margin, const SoftmaxState<T>& state,
                       int64_t begin, int64_t end) {
  const Softmax<T> softmax{scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, margin, row);
    add_targets(b, r, scale, state, row);
    if (r.top <= kLeftOut<T>) continue;
    const double sum = sum_exponentials<false>(r.scores, b.columns, r.top, softmax);
    merge(state.rows, row, r.top, sum, scale);
  }
}

// After softmax_fold_rows on the same block, which has marked the pairs left out.
template <class T>
void softmax_fold_columns(const Block<T>& b, T scale, const MaxSum& state, int64_t begin,
                          int64_t end) {
  const Softmax<T> softmax{scale};
  for_chunks(begin, end, [&](int64_t at, int64_t n) {
    T top[kChunk], sum[kChunk];
    for (int64_t j = 0; j < n; ++j) {
      top[j] = kLeftOut<T>;
      sum[j] = 0;
    }
    for (int64_t row = 0; row < b.rows; ++row) {
      const T* s = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) top[j] = s[j] > top[j] ? s[j] : top[j];
    }
    for (int64_t row = 0; row < b.rows; ++row) {
      const T* s = b.scores + row * b.stride + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) sum[j] += softmax.share(s[j], top[j]);
    }
    for (int64_t j = 0; j < n; ++j) merge(state, at + j, top[j], sum[j], scale);
  });
}

template <class T>
void softmax_slope(const Block<T>& b, T scale, T margin, const SoftmaxSlope<T>& slope,
                   int64_t begin, int64_t end) {
  const Softmax<T> softmax{scale};
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> r = open_row(b, margin, row);
    T* s = r.scores;
    const T top = slope.row_top[row], weight = slope.row_weight[row];
    if (slope.column_top) {
      const T *tops = slope.column_top, *weights = slope.column_weight;
#pragma omp simd
      for (int64_t j = 0; j < b.columns; ++j) {
        s[j] = fused(weight, softmax.share(s[j], top), weights[j] * softmax.share(s[j], tops[j]));
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < b.columns; ++j) s[j] = weight * softmax.share(s[j], top);
    }
    subtract_targets(b, row, r.positive, slope.target_weight[row], s);
  }
}

// ---- elementwise losses: losses[row] += sum_j loss, and with weights the slope in place ----

// One chunk; everything by value, so that no store into `s` can be thought to change it.
template <bool with_slope, class T, class Epilogue>
void elementwise_chunk(T* s, const T* targets, int64_t count, Epilogue epilogue, T weight,
                       double& losses, double& slopes) {
  T losses_part = 0, slopes_part = 0;
#pragma omp simd reduction(+ : losses_part, slopes_part)
  for (int64_t j = 0; j < count; ++j) {
    T loss, slope;
    epilogue(s[j], targets[j], loss, slope);
    losses_part += loss;
    slopes_part += slope;
    if constexpr (with_slope) s[j] = weight * slope;
  }
  losses += losses_part;
  slopes += slopes_part;
}

template <bool with_slope, class T, class Epilogue>
void elementwise_rows(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                      double* losses, double* slope_sums, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_slope ? weights[row] * factor : T(0);
    double loss = 0, slope = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      elementwise_chunk<with_slope>(b.scores + row * b.stride + at, targets, n, epilogue, weight,
                                    loss, slope);
    });
    losses[row] += loss;
    if (slope_sums) slope_sums[row] += slope;
  }
}

template <class T, class Epilogue>
void elementwise(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                 double* losses, double* slope_sums, int64_t begin, int64_t end) {
  const auto run = weights ? elementwise_rows<true, T, Epilogue> : elementwise_rows<false, T, Epilogue>;
  run(b, epilogue, factor, weights, losses, slope_sums, begin, end);
}

template <class T>
void sigmoid(const Block<T>& b, T scale, T bias, const T* weights, double* losses,
             double* slope_sums, int64_t begin, int64_t end) {
  elementwise(b, Sigmoid<T>{scale, bias}, scale, weights, losses, slope_sums, begin, end);
}

template <class T>
void squared_error(const Block<T>& b, const T* weights, double* losses, int64_t begin,
                   int64_t end) {
  elementwise(b, SquaredError<T>{}, T(1), weights, losses, static_cast<double*>(nullptr), begin,
              end);
}

// ---- CoSENT over a matrix ----

// First column of the row that takes part.
template <class T>
int64_t first_column(const Block<T>& b, int64_t row) {
  if (b.skip != Skip::lower) return 0;
  const int64_t after = b.row0 + row - b.column0 + 1;
  return after < 0 ? 0 : least(after, b.columns);
}

// Levels of `count` pairs: the number of level values below the target.
template <class T>
void load_levels(const Block<T>& b, const T* values, int64_t levels, int64_t row, int64_t column,
                 int64_t count, int32_t* out) {
  T targets[kChunk];
  load_targets(b, row, column, count, targets);
  for (int64_t j = 0; j < count; ++j) out[j] = 0;
  for (int64_t l = 0; l + 1 < levels; ++l) {
    const T value = values[l];
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] += targets[j] > value ? 1 : 0;
  }
}

// The largest s and the largest -s among the pairs of one level.
template <class T>
void level_extremes(const T* s, const int32_t* level, int32_t wanted, int64_t count, T& high,
                    T& low) {
  T top = kLeftOut<T>, bottom = kLeftOut<T>;
#pragma omp simd reduction(max : top, bottom)
  for (int64_t j = 0; j < count; ++j) {
    const T up = level[j] == wanted ? s[j] : kLeftOut<T>;
    const T down = level[j] == wanted ? -s[j] : kLeftOut<T>;
    top = up > top ? up : top;
    bottom = down > bottom ? down : bottom;
  }
  high = top;
  low = bottom;
}

template <class T>
void level_sums(const T* s, const int32_t* level, int32_t wanted, int64_t count,
                Softmax<T> softmax, T high, T low, T& above, T& below) {
  T up = 0, down = 0;
#pragma omp simd reduction(+ : up, down)
  for (int64_t j = 0; j < count; ++j) {
    const T of_s = softmax.share(s[j], high), of_minus = softmax.share(-s[j], low);
    up += level[j] == wanted ? of_s : T(0);
    down += level[j] == wanted ? of_minus : T(0);
  }
  above = up;
  below = down;
}

// partial: (rows, 4, levels) of maximum of s, its sum, maximum of -s, its sum.
template <class T>
void levels_fold(const Block<T>& b, T scale, const T* values, int64_t count, double* partial,
                 int64_t begin, int64_t end) {
  const Softmax<T> softmax{scale};
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    double* out = partial + row * 4 * count;
    const MaxSum up{out, out + count}, down{out + 2 * count, out + 3 * count};
    for_chunks(first_column(b, row), b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, values, count, row, at, n, level);
      for (int64_t l = 0; l < count; ++l) {
        T high, low, above, below;
        level_extremes(s + at, level, static_cast<int32_t>(l), n, high, low);
        level_sums(s + at, level, static_cast<int32_t>(l), n, softmax, high, low, above, below);
        // A NaN loses every comparison of maxima but shows in the sums.
        if (above != T(0)) merge(up, l, high, above, scale);
        if (below != T(0)) merge(down, l, low, below, scale);
      }
    });
  }
}

template <class T>
void levels_slope(const Block<T>& b, T scale, const LevelSlope<T>& slope, int64_t begin,
                  int64_t end) {
  const Levels<T> levels{scale};
  for (int64_t row = begin; row < end; ++row) {
    T* s = b.scores + row * b.stride;
    const int64_t first = first_column(b, row);
    for (int64_t j = 0; j < first; ++j) s[j] = T(0);
    for_chunks(first, b.columns, [&](int64_t at, int64_t n) {
      int32_t level[kChunk];
      load_levels(b, slope.values, slope.count, row, at, n, level);
      T* chunk = s + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const int32_t l = level[j];
        chunk[j] = levels.slope(chunk[j], slope.high[l], slope.up[l], slope.low[l], slope.down[l]);
      }
    });
  }
}

// ---- selection ----

// The largest admitted score of each row other than its positive, and its first column.
// `ceilings` holds the positives' scores for rows whose positive lies in another block.
template <class T>
void closest(const Block<T>& b, bool semi_hard, const T* ceilings, T* values, int64_t* indices,
             int64_t begin, int64_t end) {
  const Closest<T> rule{semi_hard};
  for (int64_t row = begin; row < end; ++row) {
    const int64_t positive = mark_left_out(b, row);
    T* s = b.scores + row * b.stride;
    const T ceiling = positive >= 0 ? s[positive] : ceilings[row];
    if (positive >= 0) s[positive] = kLeftOut<T>;
    T top = kLeftOut<T>;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < b.columns; ++j) {
      const T candidate = rule.admits(s[j], ceiling) ? s[j] : kLeftOut<T>;
      top = candidate > top ? candidate : top;
    }
    if (top > kLeftOut<T> && top > values[row]) {
      int64_t at = 0;
      while (s[at] != top) ++at;
      values[row] = top;
      indices[row] = b.column0 + at;
    }
  }
}

// Keeps the k largest of each row in descending order, the earlier column first among equals;
// `values` and `indices` (rows, k) hold the best so far. A NaN ranks above every number.
template <class T>
void top_k(const Block<T>& b, int64_t k, T* values, int64_t* indices, int64_t begin,
           int64_t end) {
  constexpr int64_t kStep = 64;
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    T* value = values + row * k;
    int64_t* index = indices + row * k;
    for (int64_t at = 0; at < b.columns; at += kStep) {
      const int64_t n = least(kStep, b.columns - at);
      int hits = 0;
      const T bar = value[k - 1];
#pragma omp simd reduction(+ : hits)
      for (int64_t j = 0; j < n; ++j) hits += !(s[at + j] <= bar);
      if (hits == 0) continue;
      for (int64_t j = at; j < at + n; ++j) {
        if (s[j] <= value[k - 1] || value[k - 1] != value[k - 1]) continue;
        int64_t place = k - 1;
        for (; place > 0 && !(s[j] <= value[place - 1]) && value[place - 1] == value[place - 1];
             --place) {
          value[place] = value[place - 1];
          index[place] = index[place - 1];
        }
        value[place] = s[j];
        index[place] = b.column0 + j;
      }
    }
  }
}

template <class T>
void exponentials(const T* x, T* out, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) out[j] = exponential(x[j]);
}

template <class T>
constexpr Kernels<T> kernels() {
  return {unit_rows<T>, unit_rows_backward<T>, kTileColumns<T>, pack_panels<T>, score_panels<T>,
          multiply_rows<T>, multiply_columns<T>, softmax_visit<T>, softmax_fold_rows<T>, softmax_fold_columns<T>, softmax_slope<T>,
          sigmoid<T>,       squared_error<T>,     levels_fold<T>,          levels_slope<T>,
          closest<T>,       top_k<T>,             exponentials<T>};
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
