// The epilogues of csrc/epilogue.h over rows and columns of a block, one pass at a time while the
// row lies in cache. Compiled once per instruction set (setup.py); choose.cpp picks one.
// Everything lives in a namespace of that set, so no inline function is shared between them.
#include "chosen_rows.h"
#include "contrast.h"
#include "elementwise.h"
#include "levels.h"
#include "max_sim.h"
#include "paired.h"
#include "products.h"
#include "rows.h"
#include "selection.h"
#include "softmax.h"

#define FASTSIM_STRING2(x) #x
#define FASTSIM_STRING(x) FASTSIM_STRING2(x)

namespace fastsim::FASTSIM_ISA {
namespace {

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
      circle_forward<T>,
      circle_score_grad<T>,
      levels_forward<T>,
      levels_score_grad<T>,
      closest<T>,
      hardest<T>,
      triplet<T>,
      top_k<T>,
      exponentials<T>,
      token_rows<T>,
      largest_of_columns<T>,
      max_sim_queries<T>,
      max_sim_documents<T>,
  };
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace fastsim::FASTSIM_ISA
