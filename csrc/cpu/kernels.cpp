// The epilogues of csrc/epilogue.h over rows and columns of a block, one pass at a time while the
// row lies in cache. Compiled once per instruction set (setup.py); choose.cpp picks one.
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

inline int64_t all_reduce_min(int64_t a, int64_t b) { return a < b ? a : b; }

template <class F>
inline void for_chunks(int64_t begin, int64_t end, const F& f) {
  for (int64_t at = begin; at < end; at += kChunk) f(at, all_reduce_min(kChunk, end - at));
}

#include "products.h"
#include "dtypes.h"
#include "rows.h"
#include "paired.h"
#include "chosen_rows.h"
#include "pairs.h"
#include "softmax.h"
#include "elementwise.h"
#include "contrast.h"
#include "levels.h"
#include "selection.h"

template <class T>
void exponentials(const T* x, T* out, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) out[j] = exponential(x[j]);
}

template <class T>
constexpr Kernels<T> kernels() {
  return {
      unit_rows<T>,
      unit_rows_backward<T>,
      paired_cosines<T>,
      paired_cosines_backward<T>,
      column_sums<T>,
      centred_rows<T>,
      chosen_rows<T>,
      chosen_rows_of_rows<T>,
      chosen_rows_of_columns<T>,
      kTileColumns<T>,
      pack_panels<T>,
      score_panels<T>,
      multiply_rows<T>,
      multiply_columns<T>,
      leave_out_above<T>,
      softmax_fused<T>,
      softmax_forward_rows<T>,
      softmax_forward_columns<T>,
      softmax_score_grad<T>,
      sigmoid<T>,
      squared_error<T>,
      multi_similarity_forward<T>,
      multi_similarity_score_grad<T>,
      multi_positive_forward<T>,
      multi_positive_score_grad<T>,
      levels_forward<T>,
      levels_score_grad<T>,
      closest<T>,
      hardest<T>,
      triplet<T>,
      top_k<T>,
      exponentials<T>,
  };
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace FASTSIM_ISA
}  // namespace fastsim
