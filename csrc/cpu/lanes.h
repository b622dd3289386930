// Sums and maxima of a row in the lanes of vectors. The lanes are joined in a tree: a reduction of
// `omp simd` joins them one after another, which takes as long as a short row.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "tile.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// Sums of a loop whose lanes the compiler is left to make, in memory between two rounds of it.
template <class T>
constexpr int64_t kSums = 4 * kLanes<T>;

// As many numbers as a vector of doubles has.
inline Vector<double> as_doubles(const double* from) { return vector_at(from); }
inline Vector<double> as_doubles(const float* from) {
#if defined(__AVX512F__)  // GCC 12 makes two halves of the other
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(from));
#else
  float half __attribute__((vector_size(kVectorBytes / 2)));
  __builtin_memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Vector<double>);
#endif
}

// The lanes joined by join(a, b); `count` a power of two.
template <int64_t count, class T, class F>
FASTSIM_INLINE T joined(const T* lanes, const F& join) {
  if constexpr (count == 1) {
    return lanes[0];
  } else {
    T half[count / 2];
    for (int64_t l = 0; l < count / 2; ++l) half[l] = join(lanes[l], lanes[l + count / 2]);
    return joined<count / 2>(half, join);
  }
}

template <int64_t count, class T>
FASTSIM_INLINE T sum_of(const T* lanes) {
  return joined<count>(lanes, [](T a, T b) { return a + b; });
}

// The largest of `least` and what shown(numbers) makes of the numbers, one or a vector of them; a NaN
// is above none.
template <class T, class F>
T largest(const T* x, int64_t count, T least, const F& shown) {
  constexpr int64_t lanes = kLanes<T>;
  constexpr int ways = 4;
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  Vector<T> tops[ways];
  for (auto& top : tops) top = least - Vector<T>{};
  int64_t j = 0;
  for (; j + ways * lanes <= count; j += ways * lanes) {
#pragma GCC unroll 4
    for (int way = 0; way < ways; ++way) {
      tops[way] = larger(shown(vector_at(x + j + way * lanes)), tops[way]);
    }
  }
  for (; j + lanes <= count; j += lanes) {
    tops[0] = larger(shown(vector_at(x + j)), tops[0]);
  }
  const Vector<T> all = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  T top = joined<lanes>(reinterpret_cast<const T*>(&all), larger);
  for (; j < count; ++j) top = larger(shown(x[j]), top);
  return top;
}

template <class T>
T largest(const T* x, int64_t count, T least) {
  return largest(x, count, least, [](auto numbers) { return numbers; });
}

// Adds to `sums` what term(at, sums) adds for each of `count` places; at(x) is x there, in double.
template <int terms, class F>
FASTSIM_INLINE void add_terms(int64_t count, double (&sums)[terms], const F& term) {
  constexpr int64_t lanes = kLanes<double>;
  // Several at once: a sum alone waits for its own additions. Each by a name, or they live in memory.
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
