// What makes operators of the kernels over pairs (kernels.inc): it takes their arguments from
// torch's stack, and converts these to the arguments of the kernels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "arguments.h"

namespace fastsim {
namespace {

// The arguments of one call on torch's stack, in their order. An operator has to take all of them
// before it checks any: if an error left some on the stack, they would never be freed.
class Stack {
 public:
  explicit Stack(StableIValue* next) : next_(next) {}

  template <class V>
  V take() {
    return torch::stable::detail::to<V>(*next_++);
  }

 private:
  StableIValue* next_;
};

inline PairArguments take_pairs(Stack& from) {
  return {.positives = from.take<Optional>(),
          .row_ids = from.take<Optional>(),
          .column_ids = from.take<Optional>(),
          .row_groups = from.take<Optional>(),
          .column_groups = from.take<Optional>(),
          .dense = from.take<Optional>(),
          .negative_target = from.take<double>(),
          .skip = from.take<std::string>(),
          .row_metrics = from.take<Optional>()};
}

// The size of the block that the arguments of a kernel belong to. In a sweep over `widths` prefix
// widths, k is the number of the width whose arguments are taken: a tensor of two dimensions has a
// row for each width, a tensor of fewer dimensions serves all widths.
struct Extent {
  int64_t rows, columns, widths = 0, k = 0;  // widths is 0 outside of a sweep

  template <class T>
  T* pointer(const Tensor& t, const char* name, int64_t count) const {
    if (widths == 0 || t.dim() < 2) return output<T>(t, name, count);
    if (!has_type<T>(t) || t.dim() != 2 || t.size(0) != widths ||
        t.size(1) != count || t.stride(1) != 1) {
      refuse(name, t, "(", widths, ", ", count, ") ", torch::headeronly::toString(kTypeOf<T>),
             ", its rows contiguous");
    }
    return static_cast<T*>(t.mutable_data_ptr()) + k * t.stride(0);
  }

  template <class T>
  T* pointer(const Optional& t, const char* name, int64_t count) const {
    return t ? pointer<T>(*t, name, count) : nullptr;
  }

  template <class T>
  Values<T> values(const Tensor& t, const char* name) const {
    const int64_t count = t.numel();
    const bool missing = count == 0 && rows > 0 && columns > 0;
    if (missing || count > kMostLevels) refuse(name, t, "1 to ", kMostLevels, " levels");
    return {input<T>(t, name, count), count};
  }
};

// Whether a kernel with these arguments computes column sums, to which its rows add.
template <class Fields>
constexpr bool has_column_sums = requires(Fields fields) { fields.column_sums; };

// Where the column sums of the first width are added, and the distance from the sums of one width
// to those of the next. Null without column sums.
struct ColumnSums {
  double* data = nullptr;
  int64_t width_stride = 0;
};

template <class Arguments>
ColumnSums column_sums_of(const Arguments& given, const Extent& extent) {
  if constexpr (has_column_sums<Arguments>) {
    const Tensor& sums = given.column_sums;
    return {extent.pointer<double>(sums, "column_sums", extent.columns),
            sums.dim() == 2 ? sums.stride(0) : 0};
  } else {
    return {};
  }
}

// The kernel's arguments, with `sums` as memory for the column sums of some rows.
template <class T, class Fields>
Fields with_column_sums(Fields fields, [[maybe_unused]] T* sums) {
  if constexpr (has_column_sums<Fields>) fields.column_sums = sums;
  return fields;
}

// For each kernel its name, properties and function, and the arguments of its operator, which are
// taken from the stack.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, pass, needed, ...)   \
  struct Fields##Operator {                               \
    static constexpr const char* name = #kernel;          \
    static constexpr PassKind pass_kind = PassKind::pass; \
    static constexpr Needs needs = kNeeds.needed;         \
    template <class T>                                    \
    static auto function() {                              \
      return kernels().of<T>().kernel;                    \
    }                                                     \
    struct Arguments {                                    \
      Stack& stack;                                       \
      __VA_ARGS__                                         \
    };                                                    \
  };
#define NUMBER(name) double name = stack.take<double>();
#define FLAG(name) bool name = stack.take<bool>();
#define COUNT(name) int64_t name = stack.take<int64_t>();
#define INPUT(name) Tensor name = stack.take<Tensor>();
#define MAYBE_INPUT(name) Optional name = stack.take<Optional>();
#define OUTPUT(name) INPUT(name)
#define STATE(name) INPUT(name)
#define SUMS(name) INPUT(name)
#define COLUMN_INPUT(name) INPUT(name)
#define MAYBE_COLUMN_INPUT(name) MAYBE_INPUT(name)
#define COLUMN_STATE(name) INPUT(name)
#define LEVEL_INPUT(name) INPUT(name)
#define LEVEL_STATE(name) INPUT(name)
#define INDICES(name) INPUT(name)
#define OUTPUT_OF_K(name) INPUT(name)
#define INDICES_OF_K(name) INPUT(name)
#define VALUES(name) INPUT(name)
#include "kernels.inc"

// The arguments that end each call of a kernel's operator: the panel's place in the score matrix,
// the pairs, and the kernel's own.
template <class Kernel>
struct PairCall {
  explicit PairCall(Stack& from)
      : row0(from.take<int64_t>()), column0(from.take<int64_t>()), pairs(take_pairs(from)),
        fields{from} {}

  const int64_t row0, column0;
  const PairArguments pairs;
  const typename Kernel::Arguments fields;
};

// The arguments of the kernel, made of those of its operator.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, pass, needed, ...)                          \
  template <class T>                                                             \
  Fields<T> fields_of([[maybe_unused]] const Fields##Operator::Arguments& given, \
                      [[maybe_unused]] const Extent& extent) {                   \
    return {__VA_ARGS__};                                                        \
  }
#define POINTER(T, name, count) .name = extent.pointer<T>(given.name, #name, count),
#define NUMBER(name) .name = T(given.name),
#define FLAG(name) .name = given.name,
#define COUNT(name) .name = given.name,
#define INPUT(name) POINTER(T, name, extent.rows)
#define MAYBE_INPUT(name) INPUT(name)
#define OUTPUT(name) INPUT(name)
#define STATE(name) POINTER(double, name, extent.rows)
#define SUMS(name) .name = nullptr,
#define COLUMN_INPUT(name) POINTER(T, name, extent.columns)
#define MAYBE_COLUMN_INPUT(name) COLUMN_INPUT(name)
#define COLUMN_STATE(name) POINTER(double, name, extent.columns)
#define LEVEL_INPUT(name) POINTER(T, name, given.values.numel())
#define LEVEL_STATE(name) POINTER(double, name, 4 * extent.rows * given.values.numel())
#define INDICES(name) POINTER(int64_t, name, extent.rows)
#define OUTPUT_OF_K(name) POINTER(T, name, extent.rows * given.k)
#define INDICES_OF_K(name) POINTER(int64_t, name, extent.rows * given.k)
#define VALUES(name) .name = extent.values<T>(given.name, #name),
#include "kernels.inc"
#undef POINTER

// The arguments of the kernel for the block's columns from `at` on.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, pass, needed, ...)                  \
  template <class T>                                                     \
  Fields<T> from_column(Fields<T> fields, [[maybe_unused]] int64_t at) { \
    __VA_ARGS__                                                          \
    return fields;                                                       \
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
#define LEVEL_INPUT(name)
#define LEVEL_STATE(name)
#define INDICES(name)
#define OUTPUT_OF_K(name)
#define INDICES_OF_K(name)
#define VALUES(name)
#include "kernels.inc"

// The same for the block's rows from `at` on. unread: memory in the place of every state, if
// nothing reads what the kernel adds to them; otherwise null.
#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, pass, needed, ...)                                           \
  template <class T>                                                                              \
  Fields<T> from_row(Fields<T> fields, [[maybe_unused]] int64_t at,                               \
                     [[maybe_unused]] double* unread) {                                           \
    __VA_ARGS__                                                                                   \
    return fields;                                                                                \
  }
#define NUMBER(name)
#define FLAG(name)
#define COUNT(name)
#define INPUT(name) fields.name += at;
#define MAYBE_INPUT(name) \
  if (fields.name) fields.name += at;
#define OUTPUT(name) fields.name += at;
#define STATE(name) fields.name = unread ? unread : fields.name + at;
#define SUMS(name)
#define COLUMN_INPUT(name)
#define MAYBE_COLUMN_INPUT(name)
#define COLUMN_STATE(name)
#define LEVEL_INPUT(name)
#define LEVEL_STATE(name) fields.name += 4 * at * fields.values.count;
#define INDICES(name) fields.name += at;
#define OUTPUT_OF_K(name) fields.name += at * fields.k;
#define INDICES_OF_K(name) fields.name += at * fields.k;
#define VALUES(name)
#include "kernels.inc"

}  // namespace
}  // namespace fastsim
