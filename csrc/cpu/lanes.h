// Sums and maxima of a row, kept in the lanes of vectors. The lanes are joined in a tree: a
// reduction of `omp simd` joins them one after another, which takes as long as a short row itself.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The number of partial sums of a loop that the compiler vectorises. They are in memory between two
// rounds of the loop.
template <class T>
constexpr int64_t kSums = 4 * kLanes<T>;

// Loads as many numbers as a vector of doubles has, as doubles.
inline Vector<double> as_doubles(const double* from) { return vector_at(from); }
inline Vector<double> as_doubles(const float* from) {
#if defined(__AVX512F__)  // GCC 12 splits the portable conversion into two halves
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(from));
#else
  float half __attribute__((vector_size(kVectorBytes / 2)));
  __builtin_memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Vector<double>);
#endif
}

// Joins the `count` lanes, a power of two, to one number by join(a, b).
template <int64_t count, class T, class F>
FASTSIM_INLINE T join_lanes(const T* lanes, const F& join) {
  if constexpr (count == 1) {
    return lanes[0];
  } else {
    T half[count / 2];
    for (int64_t l = 0; l < count / 2; ++l) half[l] = join(lanes[l], lanes[l + count / 2]);
    return join_lanes<count / 2>(half, join);
  }
}

template <int64_t count, class T>
FASTSIM_INLINE T sum_of(const T* lanes) {
  return join_lanes<count>(lanes, [](T a, T b) { return a + b; });
}

// The largest of `least` and transform(x) of `count` numbers. `transform` takes one number or a
// vector of numbers. NaNs are ignored.
template <class T, class F>
T largest(const T* x, int64_t count, T least, const F& transform) {
  constexpr int64_t lanes = kLanes<T>;
  constexpr int ways = 4;
  const auto greater_of = [](auto a, auto b) { return a > b ? a : b; };
  Vector<T> maxima[ways];
  for (auto& top : maxima) top = least - Vector<T>{};
  int64_t j = 0;
  for (; j + ways * lanes <= count; j += ways * lanes) {
#pragma GCC unroll 4
    for (int way = 0; way < ways; ++way) {
      maxima[way] = greater_of(transform(vector_at(x + j + way * lanes)), maxima[way]);
    }
  }
  for (; j + lanes <= count; j += lanes) {
    maxima[0] = greater_of(transform(vector_at(x + j)), maxima[0]);
  }
  const Vector<T> all =
      greater_of(greater_of(maxima[0], maxima[1]), greater_of(maxima[2], maxima[3]));
  T top = join_lanes<lanes>(reinterpret_cast<const T*>(&all), greater_of);
  for (; j < count; ++j) top = greater_of(transform(x[j]), top);
  return top;
}

template <class T>
T largest(const T* x, int64_t count, T least) {
  return largest(x, count, least, [](auto numbers) { return numbers; });
}

// Calls term(at, sums), which adds its terms to `sums`, for each index k < count. at(x) is x[k] as
// a double. While enough indices are left, one call covers a vector of them: at(x) and `sums` are
// vectors then.
template <int terms, class F>
FASTSIM_INLINE void add_terms(int64_t count, double (&sums)[terms], const F& term) {
  constexpr int64_t lanes = kLanes<double>;
  // Several sums of each term, as a single sum would wait for its own additions. Each has a name of
  // its own: an array of them would live in memory.
  constexpr int ways = terms == 1 ? 4 : 2;
  Vector<double> one[terms] = {}, two[terms] = {}, three[terms] = {}, four[terms] = {};
  const auto add = [&](int64_t from, auto& to) {
    term([&](const auto* x) { return as_doubles(x + from); }, to);
  };
  int64_t k = 0;
  for (; k + ways * lanes <= count; k += ways * lanes) {
    add(k, one);
    add(k + lanes, two);
    if constexpr (ways == 4) {
      add(k + 2 * lanes, three);
      add(k + 3 * lanes, four);
    }
  }
  for (; k + lanes <= count; k += lanes) add(k, one);
#pragma GCC unroll 4
  for (int t = 0; t < terms; ++t) {
    const Vector<double> all = (one[t] + two[t]) + (three[t] + four[t]);
    sums[t] += sum_of<lanes>(reinterpret_cast<const double*>(&all));
  }
  for (; k < count; ++k) {
    term([&](const auto* x) { return double(x[k]); }, sums);
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
