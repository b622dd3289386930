// The compiler's type for float16.
#pragma once

namespace fastsim {

// On arm64, GCC before 13 has the type under another name.
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

}  // namespace fastsim
