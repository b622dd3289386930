// Converts the tensors of an operator to what the kernels take. Each tensor is checked once, when
// it is taken: its dtype, layout and size. An error names the argument, what was wanted and what
// came.
#pragma once

#include <sstream>
#include <string>
#include <type_traits>

#include "block.h"
#include "tensors.h"

namespace fastsim {

template <class T>
constexpr ScalarType kTypeOf = std::is_same_v<T, float>      ? ScalarType::Float
                               : std::is_same_v<T, double>   ? ScalarType::Double
                               : std::is_same_v<T, bool>     ? ScalarType::Bool
                               : std::is_same_v<T, uint16_t> ? ScalarType::Short
                                                             : ScalarType::Long;

// The sizes and the dtype of a tensor, and whether there are gaps between its numbers: "(64, 2)
// Float".
inline std::string describe(const Tensor& t) {
  std::ostringstream text;
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "(") << t.size(d);
  text << (t.dim() ? ") " : "() ") << torch::headeronly::toString(t.scalar_type());
  if (!t.is_contiguous()) text << ", not contiguous";
  return text.str();
}

// Whether the dtype of a tensor is that of T. This compares torch's dtype codes: converting a code
// to a ScalarType takes a call for every dtype there is, and calls take most of a small batch's
// time.
template <class T>
bool has_type(const Tensor& t) {
  int32_t type;
  if (aoti_torch_get_dtype(t.get(), &type) != AOTI_TORCH_SUCCESS) return false;
  constexpr ScalarType wanted = kTypeOf<T>;
  return type == (wanted == ScalarType::Float    ? aoti_torch_dtype_float32()
                  : wanted == ScalarType::Double ? aoti_torch_dtype_float64()
                  : wanted == ScalarType::Bool   ? aoti_torch_dtype_bool()
                  : wanted == ScalarType::Short  ? aoti_torch_dtype_int16()
                                                 : aoti_torch_dtype_int64());
}

// Throws the error about an argument that is not what was wanted.
template <class... Wanted>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const Tensor& got,
                                                   const Wanted&... wanted) {
  STD_TORCH_CHECK(false, "fastsim: ", name, ": wanted ", wanted..., ", got ", describe(got));
  __builtin_unreachable();
}

// Calls f with a value of the tensor's type, the compute type: float or double.
template <class F>
void with_type(const Tensor& t, const char* name, const F& f) {
  if (has_type<float>(t)) return f(float{});
  if (!has_type<double>(t)) refuse(name, t, "float32 or float64");
  f(double{});
}

// An error unless the tensor holds `count` contiguous numbers of the type.
inline void check(const Tensor& t, const char* name, ScalarType type, int64_t count) {
  if (t.scalar_type() == type && t.numel() == count && t.is_contiguous()) return;
  refuse(name, t, count, " contiguous numbers ", torch::headeronly::toString(type));
}

template <class T>
void check(const Tensor& t, const char* name, int64_t count) {
  if (has_type<T>(t) && t.numel() == count && t.is_contiguous()) return;
  check(t, name, kTypeOf<T>, count);
}

// Checks a tensor of `count` contiguous numbers of type T and returns its address, to read from
// (`input`) or to write to (`output`).
template <class T>
const T* input(const Tensor& t, const char* name, int64_t count) {
  check<T>(t, name, count);
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* output(const Tensor& t, const char* name, int64_t count) {
  check<T>(t, name, count);
  return static_cast<T*>(t.mutable_data_ptr());
}

// The same for an optional tensor: null for None.
template <class T>
const T* input(const Optional& t, const char* name, int64_t count) {
  return t ? input<T>(*t, name, count) : nullptr;
}

template <class T>
T* output(const Optional& t, const char* name, int64_t count) {
  return t ? output<T>(*t, name, count) : nullptr;
}

// Where a gradient is written, and its dtype, which may differ from the compute type.
struct Gradient {
  void* data = nullptr;
  Dtype dtype = Dtype::float32;
};

// The Gradient of `count` numbers, with null data for None. Its dtype has to be one that kernels
// write (`store` in dtypes.h): the compute type, float16 or bfloat16.
template <class T>
Gradient gradient(const Optional& grad, const char* name, int64_t count) {
  if (!grad) return {};
  if (has_type<T>(*grad)) return {output<T>(*grad, name, count), kDtypeOf<T>};
  const ScalarType type = grad->scalar_type();
  if (type != ScalarType::Half && type != ScalarType::BFloat16) {
    refuse(name, *grad, torch::headeronly::toString(kTypeOf<T>), ", Half or BFloat16");
  }
  check(*grad, name, type, count);
  return {grad->mutable_data_ptr(), dtype_of(*grad)};
}

// Like `input`, but the tensor may hold more than `count` numbers.
template <class T>
const T* input_at_least(const Tensor& t, const char* name, int64_t count) {
  if (t.numel() < count) refuse(name, t, "at least ", count, " numbers");
  return input<T>(t, name, t.numel());
}

// An error unless a matrix of any dtype has this shape.
inline void check_matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  if (t.size(1) == columns && t.size(0) == rows) return;
  refuse(name, t, "(", rows, ", ", columns, ")");
}

inline Matrix matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  check_matrix(t, name, rows, columns);
  return matrix(t);
}

// Sets the scores and the size of a block to those of a panel.
template <class T>
void take_panel(const Tensor& panel, Block<T>& b, const char* name = "panel") {
  if (!has_type<T>(panel) || panel.dim() != 2 || panel.stride(1) != 1) {
    refuse(name, panel, "a row-major matrix ", torch::headeronly::toString(kTypeOf<T>));
  }
  b.scores = static_cast<T*>(panel.mutable_data_ptr());
  b.stride = panel.stride(0);
  b.rows = panel.size(0);
  b.columns = panel.size(1);
}

// The arguments of an operator that decide the roles of pairs, and PAIRS_SCHEMA, their schema.
struct PairArguments {
  Optional positives, row_ids, column_ids, row_groups, column_groups, dense;
  double negative_target;
  std::string skip;
  Optional row_metrics;  // for MetricsRecorder, in metrics_recorder.h
};
#define PAIRS_SCHEMA                                                                       \
  "Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "           \
  "Tensor? column_groups, Tensor? dense, float negative_target, str skip, "               \
  "Tensor(row_metrics!)? row_metrics"

// Checks these arguments and sets them in a block, whose size is known already.
template <class T>
void take_pairs(const PairArguments& pairs, Block<T>& b) {
  STD_TORCH_CHECK(bool(pairs.row_ids) == bool(pairs.column_ids),
                  "fastsim: row_ids, column_ids: wanted both or neither");
  STD_TORCH_CHECK(bool(pairs.row_groups) == bool(pairs.column_groups),
                  "fastsim: row_groups, column_groups: wanted both or neither");
  b.positives = input<int64_t>(pairs.positives, "positives", b.rows);
  b.row_ids = input<int64_t>(pairs.row_ids, "row_ids", b.rows);
  b.column_ids = input<int64_t>(pairs.column_ids, "column_ids", b.columns);
  b.row_groups = input<int64_t>(pairs.row_groups, "row_groups", b.rows);
  b.column_groups = input<int64_t>(pairs.column_groups, "column_groups", b.columns);
  if (pairs.dense) b.dense = matrix(*pairs.dense, "dense", b.rows, b.columns);
  b.negative_target = static_cast<T>(pairs.negative_target);
  b.skip = skip_of(pairs.skip);
}

// An error unless the positive of each row, if there are positives, is a column of the block:
// kernels over whole rows read its score.
template <class T>
void check_positives(const Block<T>& b) {
  for (int64_t i = 0; b.positives && i < b.rows; ++i) {
    STD_TORCH_CHECK(b.positive(i) >= 0, "fastsim: positives: wanted columns from ", b.column0,
                    " to ", b.column0 + b.columns - 1, ", got ", b.positives[i]);
  }
}

// What decides the roles of all pairs of a matrix, whose scores are not in memory.
template <class T>
Block<T> all_pairs(const PairArguments& pairs, int64_t rows, int64_t columns) {
  Block<T> all{};
  all.rows = rows;
  all.columns = columns;
  take_pairs(pairs, all);
  check_positives(all);
  return all;
}

// An error unless the pairs have what a kernel requires.
template <class T>
void check_needs(const Block<T>& b, Needs needs, const char* kernel) {
  if (b.rows == 0) return;  // an empty tensor may have a null address
  const bool targets = b.dense.data || b.row_groups || b.columns == 0;
  STD_TORCH_CHECK(!needs.groups || b.row_groups, "fastsim: ", kernel, ": wanted row_groups");
  STD_TORCH_CHECK(!needs.targets || targets, "fastsim: ", kernel, ": wanted row_groups or dense");
  if (!needs.positives) return;
  STD_TORCH_CHECK(b.positives, "fastsim: ", kernel, ": wanted positives");
  check_positives(b);
}

}  // namespace fastsim
