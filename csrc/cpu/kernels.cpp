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

// A kernel over pairs as the table has it. Where its scores are to be observed first, that and it
// take turns of a few rows: what one brings to the cache, the other finds there.
template <Each each, class T, class Arguments,
          void (*kernel)(const Block<T>&, Arguments, int64_t, int64_t)>
void over_pairs(const Block<T>& b, Arguments args, int64_t begin, int64_t end) {
  if (each != Each::first_look || !b.seen) return kernel(b, args, begin, end);
  constexpr int64_t kScores = 1 << 11;
  const int64_t turn = 1 + kScores / (b.columns + 1);
  for (int64_t at = begin; at < end; at += turn) {
    const int64_t stop = smaller(end, at + turn);
    observe_rows(b, at, stop);
    kernel(b, args, at, stop);
  }
}

template <class T>
constexpr Kernels<T> kernels() {
  return {
      .panel_columns = kTileColumns<T>,
#define FUNCTION(name, ...) .name = name<T>,
#define PAIRS_KERNEL(name, Arguments, each, needs, ...) \
  .name = over_pairs<Each::each, T, Arguments<T>, name<T>>,
#include "kernels.inc"
  };
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace fastsim::FASTSIM_ISA
