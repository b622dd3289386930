// The epilogues of csrc/epilogue.h over rows and columns of a block, one pass at a time while the
// row lies in cache. Compiled once per instruction set (setup.py); choose.cpp picks one.
// Everything lives in a namespace of that set, so no inline function is shared between them.
#include "chosen_rows.h"
#include "contrast.h"
#include "distillation.h"
#include "elementwise.h"
#include "levels.h"
#include "margins.h"
#include "max_sim.h"
#include "observe.h"
#include "paired.h"
#include "products.h"
#include "rows.h"
#include "selection.h"
#include "softmax.h"
#include "sweep.h"
#include "transpose.h"

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
      .panel_columns = kTileColumns<T>,
#define FUNCTION(name, ...) .name = name<T>,
#define PAIRS_KERNEL(name, ...) .name = name<T>,
#include "kernels.inc"
  };
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace fastsim::FASTSIM_ISA
