// float16 as the compiler has it.
#pragma once

namespace fastsim {

// GCC before 13 has the type on arm64, but not by this name.
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

}  // namespace fastsim
