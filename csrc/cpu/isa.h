// What the kernel headers share. Each opens the namespace of the instruction set that it is
// compiled for, fastsim::FASTSIM_ISA, and an unnamed one in it: no function is shared between sets,
// so that none is run on a processor that lacks its instructions.
#pragma once

#include "block.h"
#include "epilogue.h"

#ifndef FASTSIM_ISA
#define FASTSIM_ISA generic
#endif

namespace fastsim::FASTSIM_ISA {
namespace {

// Scores handled between two additions to a double: enough to vectorise, few enough that the
// chunk stays in the first-level cache and float rounding does not build up.
constexpr int64_t kChunk = 1024;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// Asks for the numbers `next` places on, in the second cache, while these are worked on: a panel
// lies in a later one. 0: there are none. Always inline: a function that does no more than ask is
// taken for one that does nothing, and calls of it are dropped.
template <class T>
FASTSIM_INLINE void ask_for(const T* from, int64_t next, int64_t count) {
  if (next == 0) return;
  constexpr int64_t kLineOf = 64 / sizeof(T);
  for (int64_t at = 0; at < count; at += kLineOf) __builtin_prefetch(from + next + at, 1, 2);
}

template <class F>
inline void for_chunks(int64_t begin, int64_t end, const F& f) {
  for (int64_t at = begin; at < end; at += kChunk) f(at, smaller(kChunk, end - at));
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
