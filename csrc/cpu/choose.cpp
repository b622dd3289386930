// Chooses the kernels for this processor when the library is first used.
#include <cstdlib>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "block.h"
#include "tensors.h"

namespace fastsim {

// The kernels that every processor of the architecture can run.
#if defined(__aarch64__)
namespace neon {
extern const KernelTable table;
}
namespace fallback = neon;
#else
namespace generic {
extern const KernelTable table;
}
namespace fallback = generic;
#endif
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

#if defined(__x86_64__)
// Whether the processor has F16C, the conversions of float16. Not every compiler's
// __builtin_cpu_supports knows that name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// The kernels of the best instruction set that the processor has.
// FASTSIM_INSTRUCTION_SET=avx2|generic limits it to a lower one.
const KernelTable& choose() {
  const char* variable = std::getenv("FASTSIM_INSTRUCTION_SET");
  const std::string limit = variable ? variable : "";
#if defined(__x86_64__)
  STD_TORCH_CHECK(limit.empty() || limit == "avx512" || limit == "avx2" || limit == "generic",
                  "FASTSIM_INSTRUCTION_SET: wanted avx512, avx2 or generic, got ", limit);
  const bool has256 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has512 = has256 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (has512 && (limit.empty() || limit == "avx512")) return avx512::table;
  if (has256 && limit != "generic") return avx2::table;
#else
  STD_TORCH_CHECK(limit.empty() || limit == fallback::table.name,
                  "FASTSIM_INSTRUCTION_SET: wanted ", fallback::table.name, ", got ", limit);
#endif
  return fallback::table;
}

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

}  // namespace fastsim
