// Registers the CUDA kernels as operators torch.ops.fastsim_cuda.*, through torch's stable ABI. The
// caller allocates every output and passes the stream as a number. fastsim/backends/cuda is the
// only caller.

#include <string>
#include <type_traits>

#include "arguments.h"
#include "tensors.h"

// The dispatch key of the operators. With the emulator, tests pass tensors on the CPU.
#if defined(FASTSIM_EMULATED)
#define FASTSIM_KEY CPU
#else
#define FASTSIM_KEY CUDA
#endif

namespace fastsim {

namespace {

bool on_device(const Tensor& t) {
#if defined(FASTSIM_EMULATED)
  return t.is_cpu();
#else
  return t.is_cuda();
#endif
}

template <class T>
constexpr ScalarType kTypeOf = ScalarType::Undefined;
template <>
constexpr ScalarType kTypeOf<float> = ScalarType::Float;
template <>
constexpr ScalarType kTypeOf<double> = ScalarType::Double;
template <>
constexpr ScalarType kTypeOf<int32_t> = ScalarType::Int;
template <>
constexpr ScalarType kTypeOf<int64_t> = ScalarType::Long;

// The sizes, dtype, strides and device of a tensor: "(64, 2) Float, strides (2, 1), on a GPU".
std::string describe(const Tensor& t) {
  std::string sizes, strides;
  for (int64_t d = 0; d < t.dim(); ++d) {
    const char* separator = d ? ", " : "";
    sizes += separator + std::to_string(t.size(d));
    strides += separator + std::to_string(t.stride(d));
  }
  return "(" + sizes + ") " + torch::headeronly::toString(t.scalar_type()) + ", strides (" +
         strides + "), " + (on_device(t) ? "on a GPU" : "not on a GPU");
}

// Throws the error about an argument that is not what the operator wants.
template <class... Words>
[[noreturn]] void refuse(const char* name, const Tensor& got, const Words&... wanted) {
  STD_TORCH_CHECK(false, "fastsim: ", name, ": wanted ", wanted..., ", got ", describe(got));
  __builtin_unreachable();
}

// The elements of a tensor, which has to be contiguous and of type T. A missing tensor gives null.
template <class T>
T* pointer(const Tensor& t, const char* name) {
  constexpr ScalarType type = kTypeOf<std::remove_const_t<T>>;
  if (!on_device(t) || !t.is_contiguous() || t.scalar_type() != type) {
    refuse(name, t, "contiguous numbers ", torch::headeronly::toString(type), " on a GPU");
  }
  return static_cast<T*>(t.mutable_data_ptr());
}
template <class T>
T* pointer(const Optional& t, const char* name) {
  return t ? pointer<T>(*t, name) : nullptr;
}
const float* input(const Tensor& t, const char* name) { return pointer<const float>(t, name); }
const float* input(const Optional& t, const char* name) { return pointer<const float>(t, name); }

// The name is one of those in fastsim/backends/cuda/passes.py.
Product product_of(const std::string& name) {
  if (name == "half") return Product::half;
  if (name == "tf32") return Product::tf32;
  STD_TORCH_CHECK(name == "full", "fastsim: product: wanted half, tf32 or full, got ", name);
  return Product::full;
}

ScalarType operand_type(Product product) {
  return product == Product::half ? ScalarType::Half : ScalarType::Float;
}

bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

// The number of tiles that `count` rows or columns take.
int64_t tile_count(int64_t count) { return (count + kTile - 1) / kTile; }

// Checks the unit rows of an operand. Each takes `row_bytes` bytes, padding included.
void check_operand(const Tensor& t, const char* name, ScalarType type, int64_t row_bytes) {
  const int64_t size = type == ScalarType::Half ? 2 : 4;
  if (!on_device(t) || t.scalar_type() != type || t.stride(1) != 1 ||
      t.stride(0) * size != row_bytes || row_bytes % 128 != 0 || !is_aligned(t)) {
    refuse(name, t, "unit rows ", torch::headeronly::toString(type),
           " on a GPU, padded to whole lines of 128 bytes, as many for x as for y");
  }
  constexpr int64_t kMostRows = (int64_t{1} << 31) - kTile;
  if (t.size(0) >= kMostRows) refuse(name, t, "fewer than ", kMostRows, " rows");
}

// The operands made of unit rows x (N, K) and y (M, K). The rows of both are padded to whole lines
// of 128 bytes and have the same stride.
Operands operands(const Tensor& x, const Tensor& y, Product product) {
  const ScalarType type = operand_type(product);
  const int64_t row_bytes = x.stride(0) * (product == Product::half ? 2 : 4);
  check_operand(x, "x", type, row_bytes);
  check_operand(y, "y", type, row_bytes);
  return {x.const_data_ptr(),          y.const_data_ptr(), static_cast<int>(x.size(0)),
          static_cast<int>(y.size(0)), row_bytes,          product};
}

Launch launch(const Tensor& x, const Tensor& y, Product product, int64_t row0, int64_t row1,
              int64_t column0, int64_t column1, Skip skip, const Optional& panel,
              int64_t stream) {
  const Operands o = operands(x, y, product);
  STD_TORCH_CHECK(0 <= row0 && row0 < row1 && row1 <= o.x_rows && 0 <= column0 &&
                      column0 < column1 && column1 <= o.y_rows,
                  "fastsim: row0, row1, column0, column1: wanted a block inside (", o.x_rows, ", ",
                  o.y_rows, "), got ", row0, ", ", row1, ", ", column0, ", ", column1);
  Launch l{o, {}, {}, stream_of(stream)};
  l.grid = {static_cast<int>(row0), static_cast<int>(row1), static_cast<int>(column0),
            static_cast<int>(column1), static_cast<int>(tile_count(row1 - row0)),
            static_cast<int>(tile_count(column1 - column0)), false,
            skip == Skip::lower};
  if (panel) {
    const int64_t rows = row1 - row0, columns = column1 - column0;
    if (!on_device(*panel) || panel->scalar_type() != x.scalar_type() || panel->size(0) != rows ||
        panel->size(1) != columns || panel->stride(1) != 1 || panel->stride(0) < columns ||
        panel->stride(0) % 8 != 0 || !is_aligned(*panel)) {
      refuse("panel", *panel, "(", rows, ", ", columns, ") ",
             torch::headeronly::toString(x.scalar_type()),
             " on a GPU, in rows padded to a multiple of 8");
    }
    l.panel = {panel->mutable_data_ptr(), panel->stride(0)};
  }
  return l;
}

Pairs pairs_of(const Optional& positives, const Optional& row_ids, const Optional& column_ids,
               const Optional& row_groups, const Optional& column_groups, const Optional& dense,
               double negative_target, Skip skip) {
  return {pointer<const int64_t>(positives, "positives"),
          pointer<const int64_t>(row_ids, "row_ids"),
          pointer<const int64_t>(column_ids, "column_ids"),
          pointer<const int64_t>(row_groups, "row_groups"),
          pointer<const int64_t>(column_groups, "column_groups"),
          dense ? matrix(*dense) : Matrix{},
          static_cast<float>(negative_target),
          skip};
}

// TILES and TILES_SCHEMA are the first arguments of every operator over tiles and their schema.
// PAIRS and LAUNCH make the Pairs and the launch of these arguments.
#define TILES                                                                                    \
  Tensor x, Tensor y, std::string product, int64_t row0, int64_t row1, int64_t column0,          \
      int64_t column1, Optional positives, Optional row_ids, Optional column_ids,                \
      Optional row_groups, Optional column_groups, Optional dense, double negative_target,       \
      std::string skip, int64_t stream
#define TILES_SCHEMA                                                                             \
  "(Tensor x, Tensor y, str product, int row0, int row1, int column0, int column1, "             \
  "Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "                 \
  "Tensor? column_groups, Tensor? dense, float negative_target, str skip, int stream, "
#define PAIRS                                                                                    \
  pairs_of(positives, row_ids, column_ids, row_groups, column_groups, dense, negative_target,   \
           skip_of(skip))

#define LAUNCH(panel, ...)                                                                    \
  const DeviceGuard guard(x.get_device());                                                    \
  launch_tiles(launch(x, y, product_of(product), row0, row1, column0, column1, skip_of(skip), \
                      panel, stream),                                                         \
               __VA_ARGS__)

void softmax_forward(TILES, Tensor scale, double margin, Tensor row_top, Tensor row_sum,
                  Optional positive, Optional target_scores, Optional target_sums,
                  Optional column_top, Optional column_sum) {
  STD_TORCH_CHECK(!positive || positives,
                  "fastsim: positives: wanted them beside positive, got none");
  STD_TORCH_CHECK(positive || (target_scores && target_sums),
                  "fastsim: target_scores, target_sums: wanted both without positive, got ",
                  target_scores || target_sums ? "one" : "none");
  LAUNCH(std::nullopt,
         SoftmaxForward{
             PAIRS, input(scale, "scale"), static_cast<float>(margin),
             pointer<float>(row_top, "row_top"), pointer<float>(row_sum, "row_sum"),
             pointer<float>(positive, "positive"), pointer<float>(target_scores, "target_scores"),
             pointer<float>(target_sums, "target_sums"), pointer<float>(column_top, "column_top"),
             pointer<float>(column_sum, "column_sum")});
}

void softmax_score_grad(TILES, Tensor scale, double margin, Tensor row_top, Tensor row_weight,
                   Tensor target_weight, Optional column_top, Optional column_weight,
                   Tensor panel) {
  if (column_top && (dense || row_groups)) {
    refuse("column_top", *column_top, "none beside dense or row_groups");
  }
  LAUNCH(panel,
         SoftmaxScoreGrad{PAIRS, input(scale, "scale"), static_cast<float>(margin),
                          input(row_top, "row_top"), input(row_weight, "row_weight"),
                          input(target_weight, "target_weight"), input(column_top, "column_top"),
                          input(column_weight, "column_weight")});
}

void check_both_or_neither(const Optional& a, const Optional& b, const char* names) {
  STD_TORCH_CHECK(bool(a) == bool(b), "fastsim: ", names, ": wanted both or neither, got one");
}

void sigmoid(TILES, Tensor scale, Tensor bias, Optional loss, Optional score_grad, Optional weights,
             Optional panel) {
  check_both_or_neither(weights, panel, "weights, panel");
  check_both_or_neither(loss, score_grad, "loss, score_grad");
  LAUNCH(panel,
         SigmoidPass{PAIRS, input(scale, "scale"), input(bias, "bias"), input(weights, "weights"),
                     pointer<float>(loss, "loss"), pointer<float>(score_grad, "score_grad")});
}

void squared_error(TILES, Optional loss, Optional weights, Optional panel) {
  check_both_or_neither(weights, panel, "weights, panel");
  LAUNCH(panel, SquaredErrorPass{PAIRS, input(weights, "weights"), pointer<float>(loss, "loss")});
}

void levels_forward(TILES, Tensor scale, Tensor levels, Tensor partials) {
  LAUNCH(std::nullopt,
         LevelsForward{PAIRS, input(scale, "scale"), input(levels, "levels"),
                       static_cast<int>(levels.numel()), pointer<float>(partials, "partials")});
}

void levels_score_grad(TILES, Tensor scale, Tensor levels, Tensor high, Tensor up, Tensor low,
                  Tensor down, Tensor panel) {
  LAUNCH(panel, LevelsScoreGrad{PAIRS, input(scale, "scale"), input(levels, "levels"),
                                static_cast<int>(levels.numel()), input(high, "high"),
                                input(up, "up"), input(low, "low"), input(down, "down")});
}

void closest(TILES, Optional ceiling, Tensor top, Tensor column) {
  LAUNCH(std::nullopt, ClosestForward{PAIRS, input(ceiling, "ceiling"), pointer<float>(top, "top"),
                                      pointer<int32_t>(column, "column")});
}

#undef LAUNCH

// Writes the score of row i of x and row i of y to out[i]. The score is computed by the same
// products as the scores of tiles.
void diagonal(Tensor x, Tensor y, std::string product, Tensor out, int64_t stream) {
  const DeviceGuard guard(x.get_device());
  Launch l = launch(x, y, product_of(product), 0, x.size(0), 0, y.size(0), Skip::nothing,
                    std::nullopt, stream);
  l.grid.diagonal = true;
  launch_tiles(l, Diagonal{pointer<float>(out, "out")});
}

// Checks the caller's rows. The kernels read them with any strides.
void check_rows(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  if (!on_device(x) ||
      (type != ScalarType::Half && type != ScalarType::BFloat16 && type != ScalarType::Float)) {
    refuse("x", x, "rows Half, BFloat16 or Float on a GPU");
  }
}

void unit_rows(Tensor x, Tensor unit, Optional inverse, std::string product, int64_t stream) {
  check_rows(x);
  const DeviceGuard guard(x.get_device());
  const Product kind = product_of(product);
  const ScalarType type = operand_type(kind);
  if (!on_device(unit) || !unit.is_contiguous() || unit.scalar_type() != type) {
    refuse("unit", unit, "contiguous rows ", torch::headeronly::toString(type), " on a GPU");
  }
  launch_unit_rows(matrix(x), x.size(0), x.size(1), unit.mutable_data_ptr(), unit.size(1),
                   pointer<float>(inverse, "inverse"), kind, stream_of(stream));
}

void unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, Tensor factor, Tensor grad,
                        Tensor dots, int64_t stream) {
  check_rows(x);
  const DeviceGuard guard(x.get_device());
  const bool float32_grad = grad.scalar_type() == ScalarType::Float;
  if (!on_device(grad) || !grad.is_contiguous() ||
      !(float32_grad || grad.scalar_type() == x.scalar_type())) {
    refuse("grad", grad, "contiguous rows of x's dtype or Float on a GPU");
  }
  launch_unit_rows_backward(input(grad_unit, "grad_unit"), matrix(x), x.size(0), x.size(1),
                            input(inverse, "inverse"), input(factor, "factor"),
                            grad.mutable_data_ptr(), float32_grad, pointer<float>(dots, "dots"),
                            stream_of(stream));
}

void merge(Tensor tops, Tensor sums, Tensor scale, bool accumulate, Tensor top, Tensor sum,
           int64_t stream) {
  const DeviceGuard guard(tops.get_device());
  launch_merge(input(tops, "tops"), input(sums, "sums"), tops.size(0), tops.size(1),
               input(scale, "scale"), accumulate, pointer<float>(top, "top"),
               pointer<float>(sum, "sum"), stream_of(stream));
}

void scan(Tensor logits, Tensor scratch, Tensor out, int64_t stream) {
  const DeviceGuard guard(logits.get_device());
  const int64_t parts = scan_parts(logits.numel());
  if (scratch.numel() != 4 * parts) refuse("scratch", scratch, "(2, ", parts, ", 2)");
  launch_scan(input(logits, "logits"), logits.numel(), pointer<double>(scratch, "scratch"),
              pointer<double>(out, "out"), stream_of(stream));
}

int64_t tile_size() { return kTile; }

}  // namespace
}  // namespace fastsim

STABLE_TORCH_LIBRARY(fastsim_cuda, m) {
  m.def("softmax_forward" TILES_SCHEMA
        "Tensor scale, float margin, Tensor(a!) row_top, Tensor(b!) row_sum, "
        "Tensor(c!)? positive, Tensor(d!)? target_scores, Tensor(e!)? target_sums, "
        "Tensor(f!)? column_top, Tensor(g!)? column_sum) -> ()");
  m.def("softmax_score_grad" TILES_SCHEMA
        "Tensor scale, float margin, Tensor row_top, Tensor row_weight, Tensor target_weight, "
        "Tensor? column_top, Tensor? column_weight, Tensor(a!) panel) -> ()");
  m.def("sigmoid" TILES_SCHEMA
        "Tensor scale, Tensor bias, Tensor(a!)? loss, Tensor(b!)? score_grad, Tensor? weights, "
        "Tensor(c!)? panel) -> ()");
  m.def("squared_error" TILES_SCHEMA
        "Tensor(a!)? loss, Tensor? weights, Tensor(b!)? panel) -> ()");
  m.def("levels_forward" TILES_SCHEMA "Tensor scale, Tensor levels, Tensor(a!) partials) -> ()");
  m.def("levels_score_grad" TILES_SCHEMA
        "Tensor scale, Tensor levels, Tensor high, Tensor up, Tensor low, Tensor down, "
        "Tensor(a!) panel) -> ()");
  m.def("closest" TILES_SCHEMA "Tensor? ceiling, Tensor(a!) top, Tensor(b!) column) -> ()");
  m.def("diagonal(Tensor x, Tensor y, str product, Tensor(a!) out, int stream) -> ()");
  m.def("unit_rows(Tensor x, Tensor(a!) unit, Tensor(b!)? inverse, str product, int stream) -> ()");
  m.def("unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, Tensor factor, "
        "Tensor(a!) grad, Tensor(b!) dots, int stream) -> ()");
  m.def(
      "merge(Tensor tops, Tensor sums, Tensor scale, bool accumulate, Tensor(a!) top, "
      "Tensor(b!) sum, int stream) -> ()");
  m.def("tile_size() -> int");
  m.def("scan_parts(int count) -> int");
  m.def("scan(Tensor logits, Tensor(a!) scratch, Tensor(b!) out, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastsim_cuda, FASTSIM_KEY, m) {
  m.impl("softmax_forward", TORCH_BOX(&fastsim::softmax_forward));
  m.impl("softmax_score_grad", TORCH_BOX(&fastsim::softmax_score_grad));
  m.impl("sigmoid", TORCH_BOX(&fastsim::sigmoid));
  m.impl("squared_error", TORCH_BOX(&fastsim::squared_error));
  m.impl("levels_forward", TORCH_BOX(&fastsim::levels_forward));
  m.impl("levels_score_grad", TORCH_BOX(&fastsim::levels_score_grad));
  m.impl("closest", TORCH_BOX(&fastsim::closest));
  m.impl("diagonal", TORCH_BOX(&fastsim::diagonal));
  m.impl("unit_rows", TORCH_BOX(&fastsim::unit_rows));
  m.impl("unit_rows_backward", TORCH_BOX(&fastsim::unit_rows_backward));
  m.impl("merge", TORCH_BOX(&fastsim::merge));
  m.impl("scan", TORCH_BOX(&fastsim::scan));
}

STABLE_TORCH_LIBRARY_IMPL(fastsim_cuda, CompositeExplicitAutograd, m) {
  m.impl("tile_size", TORCH_BOX(&fastsim::tile_size));
  m.impl("scan_parts", TORCH_BOX(&fastsim::scan_parts));
}
