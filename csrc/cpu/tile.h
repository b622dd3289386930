// The register tile, the micro-kernel of the matrix products: kTileRows x kTileColumns sums over
// the whole depth of a block. At the edges of a matrix a tile is smaller.
#pragma once

#include <array>
#include <utility>

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// A tile has kTileRows x kVectors vectors of sums. On x86 these sums, kVectors vectors of the right
// operand and one broadcast scalar of the left operand fill 29 of 32 vector registers, or 15 of 16.
// Taller and narrower tiles need more loads per product: 12 x 2 vectors take 14 loads for 24
// products, 6 x 4 take 10.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectors = 4;
#else
constexpr int kVectorBytes = 16, kVectors = 2;
#endif
constexpr int64_t kLine = 64;  // bytes of a cache line
// Whether a row of the tile fits one cache line. If so, L1 holds the whole block of the right
// operand that a tile reads, and the next tiles find it there.
constexpr bool kRowFitsLine = kVectors * kVectorBytes <= kLine;
constexpr int64_t kPrefetchSteps = 8;  // depth steps between a prefetch and its use

// The number of depth steps that a register sums up before it is added to the result in memory. The
// rounding error of a sum grows with its length: the error of InfoNCE's gradient (1,100 rows of
// width 384) is 4.1e-7 with one sum over the whole depth and 2.2e-7 with sums of 128 steps. Sums of
// 128 steps cost no time that can be measured, sums of 96 steps cost 2 %.
constexpr int64_t kChain = 128;

template <class T>
using Vector __attribute__((vector_size(kVectorBytes))) = T;

// Loads and stores a vector of T or a single T, at an address that is aligned for a single number
// only. An attribute of the vector type could declare this alignment, but clang drops it if the
// type depends on T.
template <class Values, class T>
FASTSIM_INLINE Values values_at(const T* from) {
  Values values;
  __builtin_memcpy(&values, from, sizeof values);
  return values;
}
template <class Values, class T>
FASTSIM_INLINE void put_values(const Values& values, T* to) {
  __builtin_memcpy(to, &values, sizeof values);
}
template <class T>
FASTSIM_INLINE Vector<T> vector_at(const T* from) {
  return values_at<Vector<T>>(from);
}

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <class T>
constexpr int64_t kTileColumns = kVectors * kLanes<T>;

// The number of depth steps that one load from a row of the left operand serves. x86 broadcasts a
// scalar as part of the load. On arm64 a load with broadcast (ld1r) may take the ports of the FMA
// units, but an FMA can take a lane of a register as its scalar. So one load serves four steps,
// which makes 5.5 loads for 24 products. 12 x 2 vectors would take 5, but would need the left
// operand to be packed for every product.
template <class T>
#if defined(__aarch64__)
constexpr int64_t kStepsPerLoad = kLanes<T>;
#else
constexpr int64_t kStepsPerLoad = 1;
#endif

template <class T>
constexpr int64_t kNumbersPerLine = kLine / sizeof(T);  // of a cache line

// Cache lines of a row of a tile.
template <class T, int vectors>
constexpr int64_t kLinesPerRow =
    (vectors * kLanes<T> + kNumbersPerLine<T> - 1) / kNumbersPerLine<T>;

template <class T, int rows, int vectors>
using Sums = Vector<T>[rows][vectors];

#if defined(__aarch64__)
// sum += a[lane] * b. Given the intrinsic, GCC first broadcasts the lane to a vector of its own.
template <int lane>
FASTSIM_INLINE void add_lane(Vector<float>& sum, Vector<float> a, Vector<float> b) {
  __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
}
template <int lane>
FASTSIM_INLINE void add_lane(Vector<double>& sum, Vector<double> a, Vector<double> b) {
  __asm__("fmla %0.2d, %1.2d, %2.d[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
}

// Adds one depth step: sum[r][:] += a[r][lane] * b[:] for every row r.
template <int lane, class T, int rows, int vectors>
FASTSIM_INLINE void add_lanes(const Vector<T> (&a)[rows], const T* b,
                              Sums<T, rows, vectors>& sum) {
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    const Vector<T> right = vector_at(b + v * kLanes<T>);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) add_lane<lane>(sum[r][v], a[r], right);
    // A barrier: no load may move up across it, as registers are left for only one or two loads.
    __asm__ volatile("" ::: "memory");
  }
}

// Adds as many depth steps k as a vector has lanes: for every row r, sum[r][:] += a[r * a_row + k]
// * b[k * b_step][:].
template <class T, int rows, int vectors, int... lane>
FASTSIM_INLINE void add_steps(const T* a, int64_t a_row, const T* b, int64_t b_step,
                              Sums<T, rows, vectors>& sum, std::integer_sequence<int, lane...>) {
  Vector<T> left[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) left[r] = vector_at(a + r * a_row);
  (add_lanes<lane, T, rows, vectors>(left, b + lane * b_step, sum), ...);
}
#endif

// Computes one tile: c[r][:] (+)= sum_k a[r][k] * b[k * b_step][:] for `rows` rows of `vectors`
// vectors, in sums of kChain steps. `LeftOperand` (products.h) says where a[r][k] is. All loops
// over rows and vectors are unrolled: otherwise the sums would live in memory. A vector times a
// scalar compiles to a broadcast from memory, which on x86 takes none of the FMA ports. (To make a
// vector of the scalar by V{} + a would be an addition, and would change -0.)
//
// Rows of b are prefetched kPrefetchSteps ahead, unless L1 holds the whole block. Of c only the
// first cache line of each row is prefetched, of `a` nothing: to prefetch all of c and the rows of
// `a` for the next tile, and to count them, took 8 % of the time of an AVX-512 tile on Intel.
template <class T, int rows, int vectors, bool add>
[[gnu::noinline]] void tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                            int64_t depth, T* c, int64_t c_row) {
  using V = Vector<T>;
  Sums<T, rows, vectors> sum;
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[r][v] = V{};
    __builtin_prefetch(c + r * c_row, 1);
  }
  const T* ahead = b + kPrefetchSteps * b_step;
#pragma GCC unroll 1
  for (bool overwrites = !add; depth > 0; overwrites = false) {
    int64_t steps = depth < kChain ? depth : kChain;
    depth -= steps;
#if defined(__aarch64__)
    constexpr int64_t per_load = kStepsPerLoad<T>;
#pragma GCC unroll 1
    for (; steps >= per_load; steps -= per_load) {
#pragma GCC unroll 4
      for (int step = 0; step < per_load; ++step) __builtin_prefetch(ahead + step * b_step);
      add_steps<T, rows, vectors>(a, a_row, b, b_step, sum,
                                  std::make_integer_sequence<int, per_load>());
      a += per_load * a_step;
      b += per_load * b_step;
      ahead += per_load * b_step;
    }
    const int64_t left_step = 1;  // remaining steps of one load lie side by side
#else
    const int64_t left_step = a_step;
#endif
#pragma GCC unroll 1
    for (int64_t k = steps; k > 0; --k) {
      V right[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) right[v] = vector_at(b + v * kLanes<T>);
#pragma GCC unroll 4
      for (int line = 0; !kRowFitsLine && line < kLinesPerRow<T, vectors>; ++line) {
        __builtin_prefetch(ahead + line * kNumbersPerLine<T>);
      }
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        const T left = a[r * a_row];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sum[r][v] += left * right[v];
        // A barrier: no load may move up across it. So one scalar is live at a time, and no sum is
        // spilled for it.
        __asm__ volatile("" ::: "memory");
      }
      a += left_step;
      b += b_step;
      ahead += b_step;
    }
    T* row = c;
    __asm__("" : "+r"(row));  // otherwise all addresses are computed first and spilled
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r, row += c_row) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        T* out = row + v * kLanes<T>;
        put_values(overwrites ? sum[r][v] : vector_at(out) + sum[r][v], out);
        sum[r][v] = V{};
      }
    }
  }
}

template <class T>
using Tile = void (*)(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                      int64_t depth, T* c, int64_t c_row);

// The tiles of one width. Entry i has i + 1 rows.
template <class T, int vectors, bool add>
constexpr std::array<Tile<T>, kTileRows> kTilesByRows = {
    tile<T, 1, vectors, add>, tile<T, 2, vectors, add>, tile<T, 3, vectors, add>,
    tile<T, 4, vectors, add>, tile<T, 5, vectors, add>, tile<T, 6, vectors, add>};

// kTilesByRows of every width. Entry i is i + 1 vectors wide.
template <class T, bool add, int... index>
constexpr auto tiles_of_widths(std::integer_sequence<int, index...>) {
  return std::array{kTilesByRows<T, index + 1, add>...};
}
template <class T, bool add>
constexpr auto kTiles = tiles_of_widths<T, add>(std::make_integer_sequence<int, kVectors>());

template <class T>
Tile<T> tile_of(int64_t rows, int64_t vectors, bool add) {
  return (add ? kTiles<T, true> : kTiles<T, false>)[vectors - 1][rows - 1];
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
