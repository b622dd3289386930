// From the tensors of an operator to what the kernels take, checked on the way.
#pragma once

#include <string>
#include <type_traits>

#include "block.h"
#include "tensors.h"

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
constexpr ScalarType kTypeOf = std::is_same_v<T, float>    ? ScalarType::Float
                               : std::is_same_v<T, double> ? ScalarType::Double
                                                           : ScalarType::Long;

template <class T>
void check(const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == kTypeOf<T>,
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

// What decides the role of a pair, at an operator.
struct PairArguments {
  Optional positives, row_ids, column_ids, row_groups, column_groups, dense;
  double negative_target;
  std::string skip;
  Optional seen;  // for Observing, in observing.h
};
#define PAIRS_SCHEMA                                                                       \
  "Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "           \
  "Tensor? column_groups, Tensor? dense, float negative_target, str skip, "               \
  "Tensor(seen!)? seen"

template <class T>
void take_pairs(const PairArguments& pairs, Block<T>& b) {
  b.positives = input<int64_t>(pairs.positives);
  b.row_ids = input<int64_t>(pairs.row_ids);
  b.column_ids = input<int64_t>(pairs.column_ids);
  b.row_groups = input<int64_t>(pairs.row_groups);
  b.column_groups = input<int64_t>(pairs.column_groups);
  if (pairs.dense) b.dense = matrix(*pairs.dense);
  b.negative_target = static_cast<T>(pairs.negative_target);
  b.skip = skip_of(pairs.skip);
}

}  // namespace fastsim
