// What the kernel headers share. Each kernel header opens the namespace of the instruction set that
// it is compiled for, fastsim::FASTSIM_ISA, and an unnamed namespace within. So no function is
// shared between instruction sets, and none runs on a processor that lacks its instructions.
#pragma once

#include "block.h"
#include "epilogue.h"

#ifndef FASTSIM_ISA
#define FASTSIM_ISA generic
#endif

namespace fastsim::FASTSIM_ISA {
namespace {

// The number of scores between two additions to a double: enough to vectorise, and few enough that
// the chunk stays in L1 and the rounding errors of float do not build up.
constexpr int64_t kChunk = 1024;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a < b ? b : a; }

// Prefetches the `count` numbers that are `next` numbers after `from` into L2, since a panel is in
// a farther cache. Nothing if next is 0. Always inline: compilers take a function that only
// prefetches for one without effect, and drop calls of it.
template <class T>
FASTSIM_INLINE void prefetch_ahead(const T* from, int64_t next, int64_t count) {
  if (next == 0) return;
  constexpr int64_t kNumbersPerLine = 64 / sizeof(T);
  for (int64_t at = 0; at < count; at += kNumbersPerLine) {
    __builtin_prefetch(from + next + at, 1, 2);
  }
}

// Calls f(at, n) for each chunk [at, at + n) of [begin, end), with n <= kChunk.
template <class F>
inline void for_chunks(int64_t begin, int64_t end, const F& f) {
  for (int64_t at = begin; at < end; at += kChunk) f(at, min_of(kChunk, end - at));
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
