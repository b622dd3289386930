// The kernels of one instruction set: the epilogues of csrc/epilogue.h over the rows and columns of
// a block, one pass at a time while the row is in cache, and all other kernels of kernels.inc. This
// file is compiled once per instruction set (setup.py), in a namespace of that set, so that no
// inline function is shared between sets; choose.cpp picks one.
#include "chosen_rows.h"
#include "contrast.h"
#include "distillation.h"
#include "elementwise.h"
#include "levels.h"
#include "margins.h"
#include "max_sim.h"
#include "paired.h"
#include "products.h"
#include "row_metrics.h"
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

// A kernel over pairs as the table of kernels holds it. If row metrics are to be recorded first,
// the recording and the kernel take turns of a few rows: the kernel then finds in cache the scores
// that the recording has read.
template <PassKind pass, class T, class Arguments,
          void (*kernel)(const Block<T>&, Arguments, int64_t, int64_t)>
void over_pairs(const Block<T>& b, Arguments args, int64_t begin, int64_t end) {
  if (pass != PassKind::first_look || !b.row_metrics) return kernel(b, args, begin, end);
  constexpr int64_t kScores = 1 << 11;
  const int64_t step = 1 + kScores / (b.columns + 1);
  for (int64_t at = begin; at < end; at += step) {
    const int64_t stop = min_of(end, at + step);
    record_rows(b, at, stop);
    kernel(b, args, at, stop);
  }
}

template <class T>
constexpr Kernels<T> kernels() {
  return {
      .panel_columns = kTileColumns<T>,
      .reads_unpacked = !kRowFitsLine,
#define FUNCTION(name, ...) .name = name<T>,
#define PAIRS_KERNEL(name, Arguments, pass, needs, ...) \
  .name = over_pairs<PassKind::pass, T, Arguments<T>, name<T>>,
#include "kernels.inc"
  };
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {FASTSIM_STRING(FASTSIM_ISA), kernels<float>(), kernels<double>()};

}  // namespace fastsim::FASTSIM_ISA
