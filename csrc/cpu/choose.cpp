// The kernels of this processor, chosen when the library is first used.
#include <cstdlib>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "block.h"
#include "tensors.h"

namespace fastsim {

// That of every processor of the architecture.
#if defined(__aarch64__)
namespace neon {
extern const KernelTable table;
}
namespace least = neon;
#else
namespace generic {
extern const KernelTable table;
}
namespace least = generic;
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
// Conversions of float16, by whose name not every compiler asks the processor.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// The best set that the processor has; FASTSIM_INSTRUCTION_SET=avx2|generic asks for a lower one.
const KernelTable& choose() {
  const char* asked = std::getenv("FASTSIM_INSTRUCTION_SET");
  const std::string most = asked ? asked : "";
#if defined(__x86_64__)
  STD_TORCH_CHECK(most.empty() || most == "avx512" || most == "avx2" || most == "generic",
                  "FASTSIM_INSTRUCTION_SET: wanted avx512, avx2 or generic, got ", most);
  const bool has256 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has512 = has256 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (has512 && (most.empty() || most == "avx512")) return avx512::table;
  if (has256 && most != "generic") return avx2::table;
#else
  STD_TORCH_CHECK(most.empty() || most == least::table.name,
                  "FASTSIM_INSTRUCTION_SET: wanted ", least::table.name, ", got ", most);
#endif
  return least::table;
}

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

}  // namespace fastsim
