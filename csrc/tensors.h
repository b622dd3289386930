// Converts the tensors of an operator to plain data (matrix.h). Every engine's operators use it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "matrix.h"

namespace fastsim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Char: return Dtype::int8;
    case ScalarType::Byte: return Dtype::uint8;
    case ScalarType::Short: return Dtype::int16;
    case ScalarType::Int: return Dtype::int32;
    case ScalarType::Long: return Dtype::int64;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::Double: return Dtype::float64;
    default: STD_TORCH_CHECK(false, "fastsim: dtype without a kernel"); return Dtype::float32;
  }
}

// The Skip of this name; fastsim/pairs/record.py has the same names.
inline Skip skip_of(const std::string& name) {
  if (name == "diagonal") return Skip::diagonal;
  if (name == "lower") return Skip::lower;
  STD_TORCH_CHECK(name == "nothing", "fastsim: skip: wanted nothing, diagonal or lower, got ",
                  name);
  return Skip::nothing;
}

inline Matrix matrix(const Tensor& t) {
  return {t.const_data_ptr(), dtype_of(t), t.stride(0), t.stride(1)};
}

}  // namespace fastsim
