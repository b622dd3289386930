// Huge pages for the memory of operands and panels.
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "operators.h"
#include "scratch.h"

namespace fastsim {

// The rows of a panel are pages apart, and so are those of the tile that a product writes: with
// small pages a product spends much of its time on address translation. This is only advice to the
// system: without huge pages everything works the same.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + bytes;
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

namespace {

// Advises huge pages for the memory of a new tensor.
void huge_pages(Tensor memory) {
  advise_huge_pages(memory.mutable_data_ptr(), memory.numel() * memory.element_size());
}

std::vector<Operator> operators() {
  return {OPERATOR(huge_pages, "(Tensor(memory!) memory) -> ()")};
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
