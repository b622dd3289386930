// The register tile: kTileRows x kTileColumns sums over the whole depth of a block, fewer at the
// edges of a matrix.
#pragma once

#include <array>
#include <utility>

#include "isa.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The register tile: kTileRows x kVectors sums. On x86 kVectors of the right operand and one
// broadcast scalar of the left fill 29 of 32 vector registers, or 15 of 16. Taller and narrower
// tiles would load more a product: 12 x 2 vectors take 14 loads for 24 products, 6 x 4 take 10.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectors = 4;
#else
constexpr int kVectorBytes = 16, kVectors = 2;
#endif
constexpr int64_t kLine = 64;  // bytes of a line of the cache
// Whether a row of the tile is one line. The first cache then holds all of the right operand that a
// tile goes over, and each further tile finds it there.
constexpr bool kOneLine = kVectors * kVectorBytes <= kLine;
constexpr int64_t kAhead = 8;  // steps of the depth between a prefetch and its use

// Steps of the depth that one sum takes before it is added to the result. The error of a sum grows
// with its length: that of InfoNCE's gradient (1,100 rows of width 384) is 4.1e-7 with whole sums
// and 2.2e-7 with sums of 128. Those cost no time that can be measured, sums of 96 cost 2 %.
constexpr int64_t kChain = 128;

template <class T>
using Vector __attribute__((vector_size(kVectorBytes))) = T;

// To and from memory that has the alignment of a number. An attribute of the type could say that it
// has no more, but clang forgets it where the type depends on T.
template <class T>
FASTSIM_INLINE Vector<T> vector_at(const T* from) {
  Vector<T> vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}
template <class T>
FASTSIM_INLINE void put_vector(const Vector<T>& vector, T* to) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <class T>
constexpr int64_t kTileColumns = kVectors * kLanes<T>;

// Steps of the depth that a load of a row of the left operand brings. x86 broadcasts a scalar as it
// is loaded; on arm64 that (ld1r) may take the multiplier's ports, but a product can have a lane of
// a register for its scalar. So one load serves four steps: 5.5 loads for 24 products. 12 x 2
// vectors would take 5, but of a left operand that is packed for every product.
template <class T>
#if defined(__aarch64__)
constexpr int64_t kTogether = kLanes<T>;
#else
constexpr int64_t kTogether = 1;
#endif

template <class T>
constexpr int64_t kLineOf = kLine / sizeof(T);  // numbers of a line

template <class T, int vectors>
constexpr int64_t kTileLines = (vectors * kLanes<T> + kLineOf<T> - 1) / kLineOf<T>;  // of a row

// What a tile asks for while it is summed, so that it is there when it is needed: in the first
// cache the rows of the left operand of the next tile, in the second what comes after the column
// of tiles, a row as wide as a tile for every kLineOf<T> steps of the depth, `later_step` apart.
template <class T>
struct Next {
  const T* left;
  const T* later;
  int64_t later_step;
};

// Asks for the lines of a tile, a few at a time: more at once than the processor can wait for would
// hold up the sums. A narrow tile has too few products for each line, and leaves it to the processor.
template <class T, int rows, int vectors>
class Asking {
 public:
  static constexpr int64_t kSteps = 4;  // of the depth between two times
  static constexpr bool worth = kTileLines<T, vectors> == 4 && sizeof(T) == sizeof(float);

  Asking(const T* c, int64_t c_row, int64_t a_row, int64_t a_step, const Next<T>& next)
      : group_(next.left),
        left_(next.left),
        later_(next.later),
        written_(c),
        last_(c + (rows - 1) * c_row),
        c_row_(c_row),
        left_row_(a_step == 1 ? a_row : kLineOf<T>),  // else the rows of the left lie packed
        group_step_(kLineOf<T> * a_step),
        later_step_(next.later_step) {}

  FASTSIM_INLINE void step() {
#pragma GCC unroll 6
    for (int r = 0; r < kLefts; ++r) __builtin_prefetch(left_ + r * left_row_);
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(later_ + at_ + line * kLineOf<T>, 0, 2);
      __builtin_prefetch(written_ + at_ + line * kLineOf<T>, 1);
    }
    left_ += kLefts * left_row_;
    at_ += kLines * kLineOf<T>;
    if (at_ < kTileColumns<T>) return;
    at_ = 0;
    left_ = group_ += group_step_;
    later_ += later_step_;
    if (written_ != last_) written_ += c_row_;
  }

 private:
  static constexpr int64_t kParts = kLineOf<T> / kSteps, kLines = kTileLines<T, vectors> / kParts;
  static constexpr int kLefts = (rows + kParts - 1) / kParts;

  const T *group_, *left_, *later_, *written_, *last_;
  int64_t c_row_, left_row_, group_step_, later_step_, at_ = 0;
};

template <class T, int rows, int vectors>
using Sums = Vector<T>[rows][vectors];

#if defined(__aarch64__)
// sum += a[lane] * b. From intrinsics GCC makes a vector of each lane first.
template <int lane>
FASTSIM_INLINE void add_lane(Vector<float>& sum, Vector<float> a, Vector<float> b) {
  __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
}
template <int lane>
FASTSIM_INLINE void add_lane(Vector<double>& sum, Vector<double> a, Vector<double> b) {
  __asm__("fmla %0.2d, %1.2d, %2.d[%3]" : "+w"(sum) : "w"(b), "w"(a), "i"(lane));
}

// Adds one step of the depth: the lane of every row of a times b[:].
template <int lane, class T, int rows, int vectors>
FASTSIM_INLINE void add_lanes(const Vector<T> (&a)[rows], const T* b,
                              Sums<T, rows, vectors>& sum) {
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    const Vector<T> right = vector_at(b + v * kLanes<T>);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) add_lane<lane>(sum[r][v], a[r], right);
    // No load moves up across this: there is a register for one, or two, of them.
    __asm__ volatile("" ::: "memory");
  }
}

// Adds as many steps as a vector has lanes: a[r * a_row + k] * b[k * b_step][:] for every row r.
template <class T, int rows, int vectors, int... lane>
FASTSIM_INLINE void add_steps(const T* a, int64_t a_row, const T* b, int64_t b_step,
                              Sums<T, rows, vectors>& sum, std::integer_sequence<int, lane...>) {
  Vector<T> left[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) left[r] = vector_at(a + r * a_row);
  (add_lanes<lane, T, rows, vectors>(left, b + lane * b_step, sum), ...);
}
#endif

// c[r][:] (+)= sum_k a[r][k] * b[k * b_step][:] for `rows` rows, `vectors` wide, a[r][k] lying where
// `Left` (products.h) says, in sums of kChain steps. Everything is unrolled, or the sums would live
// in memory. Vector times scalar is a broadcast from memory, which on x86 takes none of the
// multiplier's ports (V{} + a would be an addition: it changes -0).
template <class T, int rows, int vectors, bool add>
[[gnu::noinline]] void tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                            int64_t depth, T* c, int64_t c_row, Next<T> next) {
  using V = Vector<T>;
  using Asks = Asking<T, rows, vectors>;
  Asks asking(c, c_row, a_row, a_step, next);
  Sums<T, rows, vectors> sum;
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[r][v] = V{};
    if constexpr (!Asks::worth) __builtin_prefetch(c + r * c_row, 1);
  }
  const T* ahead = b + kAhead * b_step;
#pragma GCC unroll 1
  for (bool begins = !add; depth > 0; begins = false) {
    int64_t steps = depth < kChain ? depth : kChain;
    depth -= steps;
#if defined(__aarch64__)
    constexpr int64_t together = kTogether<T>;
#pragma GCC unroll 1
    for (; steps >= together; steps -= together) {
#pragma GCC unroll 4
      for (int step = 0; step < together; ++step) __builtin_prefetch(ahead + step * b_step);
      add_steps<T, rows, vectors>(a, a_row, b, b_step, sum,
                                  std::make_integer_sequence<int, together>());
      a += together * a_step;
      b += together * b_step;
      ahead += together * b_step;
    }
    const int64_t left_step = 1;  // of the steps that are left
#else
    const int64_t left_step = a_step;
#endif
#pragma GCC unroll 1
    for (int64_t k = steps; k > 0; --k) {
      if constexpr (Asks::worth) {
        if (k % Asks::kSteps == 0) asking.step();
      }
      V right[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) right[v] = vector_at(b + v * kLanes<T>);
#pragma GCC unroll 4
      for (int line = 0; !kOneLine && line < kTileLines<T, vectors>; ++line) {
        __builtin_prefetch(ahead + line * kLineOf<T>);
      }
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        const T left = a[r * a_row];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sum[r][v] += left * right[v];
        // No load moves up across this. One scalar is alive at a time, and no sum gives way to it.
        __asm__ volatile("" ::: "memory");
      }
      a += left_step;
      b += b_step;
      ahead += b_step;
    }
    T* row = c;
    __asm__("" : "+r"(row));  // else all addresses would be made first, and kept in memory
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r, row += c_row) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        T* out = row + v * kLanes<T>;
        put_vector<T>(begins ? sum[r][v] : vector_at(out) + sum[r][v], out);
        sum[r][v] = V{};
      }
    }
  }
}

template <class T>
using Tile = void (*)(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                      int64_t depth, T* c, int64_t c_row, Next<T> next);

// By their rows, less one.
template <class T, int vectors, bool add>
constexpr std::array<Tile<T>, kTileRows> kTilesOf = {
    tile<T, 1, vectors, add>, tile<T, 2, vectors, add>, tile<T, 3, vectors, add>,
    tile<T, 4, vectors, add>, tile<T, 5, vectors, add>, tile<T, 6, vectors, add>};

// By their vectors, less one.
template <class T, bool add, int... less>
constexpr auto tiles_of_widths(std::integer_sequence<int, less...>) {
  return std::array{kTilesOf<T, less + 1, add>...};
}
template <class T, bool add>
constexpr auto kTiles = tiles_of_widths<T, add>(std::make_integer_sequence<int, kVectors>());

template <class T>
Tile<T> tile_of(int64_t rows, int64_t vectors, bool add) {
  return (add ? kTiles<T, true> : kTiles<T, false>)[vectors - 1][rows - 1];
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
