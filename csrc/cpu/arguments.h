// From the tensors of an operator to what the kernels take, checked on the way.
#pragma once

#include <type_traits>

#include "ops.h"

namespace fastsim {

// Calls f with a value of the panel's compute type.
template <class F>
void with_type(const Tensor& t, const F& f) {
  if (t.scalar_type() == ScalarType::Float) {
    f(float{});
  } else {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Double, "fastsim: float32 or float64 panels");
    f(double{});
  }
}

template <class T>
void check(const Tensor& t) {
  constexpr ScalarType wanted = std::is_same_v<T, float>    ? ScalarType::Float
                                : std::is_same_v<T, double> ? ScalarType::Double
                                                            : ScalarType::Long;
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == wanted,
                  "fastsim: a contiguous tensor of the operator's dtype");
}

template <class T>
const T* input(const Tensor& t) {
  check<T>(t);
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* output(const Tensor& t) {
  check<T>(t);
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
const T* input(const Optional& t) {
  return t ? input<T>(*t) : nullptr;
}

template <class T>
void take_panel(const Tensor& panel, Block<T>& b) {
  STD_TORCH_CHECK(panel.stride(1) == 1, "fastsim: a row-major panel");
  b.scores = static_cast<T*>(panel.mutable_data_ptr());
  b.stride = panel.stride(0);
  b.rows = panel.size(0);
  b.columns = panel.size(1);
}

// What decides the role of a pair.
template <class T>
void take_pairs(Block<T>& b, const Optional& positives, const Optional& row_ids,
                const Optional& column_ids, const Optional& row_groups,
                const Optional& column_groups, const Optional& dense, double negative_target,
                int64_t skip) {
  b.positives = input<int64_t>(positives);
  b.row_ids = input<int64_t>(row_ids);
  b.column_ids = input<int64_t>(column_ids);
  b.row_groups = input<int64_t>(row_groups);
  b.column_groups = input<int64_t>(column_groups);
  if (dense) b.dense = matrix(*dense);
  b.negative_target = static_cast<T>(negative_target);
  b.skip = static_cast<Skip>(skip);
}

// The arguments that every panel operator opens with.
template <class T, class... Pairs>
Block<T> block(const Tensor& panel, int64_t row0, int64_t column0, const Pairs&... pairs) {
  Block<T> b{};
  take_panel(panel, b);
  b.row0 = row0;
  b.column0 = column0;
  take_pairs(b, pairs...);
  return b;
}

#define PAIRS                                                                                  \
  Tensor panel, int64_t row0, int64_t column0, Optional positives, Optional row_ids,           \
      Optional column_ids, Optional row_groups, Optional column_groups, Optional dense,        \
      double negative_target, int64_t skip
#define PAIRS_SCHEMA                                                                           \
  "(Tensor(panel!) panel, int row0, int column0, Tensor? positives, Tensor? row_ids, "         \
  "Tensor? column_ids, Tensor? row_groups, Tensor? column_groups, Tensor? dense, "             \
  "float negative_target, int skip, "
#define BLOCK                                                                                  \
  block<T>(panel, row0, column0, positives, row_ids, column_ids, row_groups, column_groups,    \
           dense, negative_target, skip)

}  // namespace fastsim
