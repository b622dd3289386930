// What the memory of the operands is made of.
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "operators.h"

namespace fastsim {

namespace {

// Asks the system for huge pages where the memory of a new tensor is. A panel's rows lie pages apart,
// and so do those of the tile that a product writes: with small pages much of its time goes into
// finding them. It is a wish: without huge pages everything is as it was.
void huge_pages([[maybe_unused]] Tensor memory) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
  const uintptr_t end = begin + memory.numel() * memory.element_size();
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

std::vector<Operator> operators() {
  return {OPERATOR(huge_pages, "(Tensor(memory!) memory) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
