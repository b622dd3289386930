// The kernels over pairs of kernels.inc at operators: their arguments taken from torch's stack, and
// their schemas.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "arguments.h"

namespace fastsim {
namespace {

// The arguments of one call, taken from torch's stack one after another. Its tensors live as long
// as this does. What is wrong with one is said at the end, when nothing is left on the stack.
//
// Those of a sweep are of `widths` widths: a tensor of two dimensions holds those of each in a row,
// one of fewer is for all. A field then points at what the first width has, and `strides` says how
// far on that of the next one lies, in the order of the fields.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) { tensors_.reserve(kMostTensors); }

  template <class V>
  V take() {
    return torch::stable::detail::to<V>(*next_++);
  }

  template <class T>
  T* tensor(const char* name) {
    return hold<T>(name, take<Tensor>());
  }

  template <class T>
  T* maybe(const char* name) {
    Optional given = take<Optional>();
    if (!given && widths > 0) strides.push_back(0);
    return given ? hold<T>(name, std::move(*given)) : nullptr;
  }

  template <class T>
  Values<T> values(const char* name) {
    const T* data = tensor<T>(name);
    const int64_t count = tensors_.back().numel();
    if (count > kMostLevels || widths > 0) wrong_ = name;
    return {data, count};
  }

  void check(const char* kernel) const {
    STD_TORCH_CHECK(wrong_ == nullptr, "fastsim: ", kernel, ": ", wrong_,
                    ": wanted a contiguous tensor of the operator's dtype and at most ",
                    kMostLevels, " values of levels");
  }

  // Where a kernel's sums go; what it is given for them comes with its rows (column_sums.h).
  template <class T>
  T* take_sums(const char* name) {
    sums = tensor<double>(name);
    if (widths > 0) {
      sums_stride = strides.back();
      strides.pop_back();
    }
    return nullptr;
  }

  int64_t widths = 0;  // 0: no sweep
  double* sums = nullptr;
  int64_t sums_stride = 0;
  std::vector<int64_t> strides;

 private:
  static constexpr size_t kMostTensors = 8;

  template <class T>
  T* hold(const char* name, Tensor t) {
    const bool by_width = widths > 0 && t.dim() == 2;
    const bool fits = by_width ? t.stride(1) == 1 && t.size(0) == widths : t.is_contiguous();
    if (!fits || t.scalar_type() != kTypeOf<T>) wrong_ = name;
    if (widths > 0) strides.push_back(by_width ? t.stride(0) : 0);
    tensors_.push_back(std::move(t));
    return static_cast<T*>(tensors_.back().mutable_data_ptr());
  }

  StableIValue* next_;
  std::vector<Tensor> tensors_;
  const char* wrong_ = nullptr;
};

inline PairArguments take_pairs(Arguments& from) {
  return {.positives = from.take<Optional>(),
          .row_ids = from.take<Optional>(),
          .column_ids = from.take<Optional>(),
          .row_groups = from.take<Optional>(),
          .column_groups = from.take<Optional>(),
          .dense = from.take<Optional>(),
          .negative_target = from.take<double>(),
          .skip = from.take<std::string>(),
          .seen = from.take<Optional>()};
}

// Whether a kernel of these fields adds up what its rows have to sums of columns; the fields, with
// memory for them.
template <class Fields>
constexpr bool has_sums = requires(Fields fields) { fields.column_sums; };

template <class T, class Fields>
Fields with_sums(Fields fields, [[maybe_unused]] T* sums) {
  if constexpr (has_sums<Fields>) fields.column_sums = sums;
  return fields;
}

// Of each kernel: its name and function, and how its fields are taken.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, each, ...)               \
  struct Of##Fields {                                         \
    static constexpr const char* name = #kernel;              \
    static constexpr Each shares = Each::each;                \
    template <class T>                                        \
    static auto of() {                                        \
      return kernels().of<T>().kernel;                        \
    }                                                         \
    template <class T>                                        \
    static Fields<T> take([[maybe_unused]] Arguments& from) { \
      return {__VA_ARGS__};                                   \
    }                                                         \
  };
#define NUMBER(name) .name = T(from.take<double>()),
#define FLAG(name) .name = from.take<bool>(),
#define COUNT(name) .name = from.take<int64_t>(),
#define INPUT(name) .name = from.tensor<T>(#name),
#define MAYBE_INPUT(name) .name = from.maybe<T>(#name),
#define OUTPUT(name) .name = from.tensor<T>(#name),
#define STATE(name) .name = from.tensor<double>(#name),
#define SUMS(name) .name = from.take_sums<T>(#name),
#define COLUMN_INPUT(name) INPUT(name)
#define MAYBE_COLUMN_INPUT(name) MAYBE_INPUT(name)
#define COLUMN_STATE(name) STATE(name)
#define INDICES(name) .name = from.tensor<int64_t>(#name),
#define VALUES(name) .name = from.values<T>(#name),
#include "kernels.inc"

// The same for the fields of the width k.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, each, ...)                                             \
  template <class T>                                                                        \
  Fields<T> of_width(Fields<T> fields, [[maybe_unused]] int64_t k,                          \
                     const std::vector<int64_t>& strides) {                                 \
    [[maybe_unused]] auto stride = strides.begin();                                         \
    __VA_ARGS__                                                                             \
    return fields;                                                                          \
  }
#define NUMBER(name)
#define FLAG(name)
#define COUNT(name)
#define INPUT(name) fields.name += k * *stride++;
#define MAYBE_INPUT(name) fields.name += k * *stride++;
#define OUTPUT(name) fields.name += k * *stride++;
#define STATE(name) fields.name += k * *stride++;
#define SUMS(name)
#define COLUMN_INPUT(name) INPUT(name)
#define MAYBE_COLUMN_INPUT(name) MAYBE_INPUT(name)
#define COLUMN_STATE(name) STATE(name)
#define INDICES(name) fields.name += k * *stride++;
#define VALUES(name)
#include "kernels.inc"

// The same for the fields of the columns from `at` on.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, each, ...)                                  \
  template <class T>                                                             \
  Fields<T> from_column(Fields<T> fields, [[maybe_unused]] int64_t at) {         \
    __VA_ARGS__                                                                  \
    return fields;                                                               \
  }
#define NUMBER(name)
#define FLAG(name)
#define COUNT(name)
#define INPUT(name)
#define MAYBE_INPUT(name)
#define OUTPUT(name)
#define STATE(name)
#define SUMS(name)
#define COLUMN_INPUT(name) fields.name += at;
#define MAYBE_COLUMN_INPUT(name) \
  if (fields.name) fields.name += at;
#define COLUMN_STATE(name) fields.name += at;
#define INDICES(name)
#define VALUES(name)
#include "kernels.inc"

}  // namespace
}  // namespace fastsim
