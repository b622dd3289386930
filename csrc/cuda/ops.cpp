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

// The elements of a tensor, which has to be contiguous and of type T. Null for a tensor not given.
template <class T>
T* pointer(const Tensor& t) {
  STD_TORCH_CHECK(on_device(t), "fastsim: a tensor on a GPU");
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == kTypeOf<std::remove_const_t<T>>,
                  "fastsim: a contiguous tensor of the operator's dtype");
  return static_cast<T*>(t.mutable_data_ptr());
}
template <class T>
T* pointer(const Optional& t) {
  return t ? pointer<T>(*t) : nullptr;
}
const float* input(const Tensor& t) { return pointer<const float>(t); }
const float* input(const Optional& t) { return pointer<const float>(t); }

// The Product of this name; fastsim/backends/cuda/passes.py has the same names.
Product product_of(const std::string& name) {
  if (name == "half") return Product::half;
  if (name == "tf32") return Product::tf32;
  STD_TORCH_CHECK(name == "full", "fastsim: no product is called ", name);
  return Product::full;
}

void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

int64_t in_tiles(int64_t count) { return (count + kTile - 1) / kTile; }

// The operands made of unit rows x (N, K) and y (M, K). The rows of both are padded to whole lines
// of 128 bytes and have the same stride.
Operands operands(const Tensor& x, const Tensor& y, Product kind) {
  const ScalarType wanted = kind == Product::half ? ScalarType::Half : ScalarType::Float;
  const int64_t size = kind == Product::half ? 2 : 4, row_bytes = x.stride(0) * size;
  for (const Tensor& t : {x, y}) {
    STD_TORCH_CHECK(on_device(t) && t.scalar_type() == wanted && t.stride(1) == 1 &&
                        t.stride(0) * size == row_bytes && row_bytes % 128 == 0 &&
                        reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                    "fastsim: unit rows padded to whole lines");
    STD_TORCH_CHECK(t.size(0) < (int64_t{1} << 31) - kTile, "fastsim: fewer than 2^31 rows");
  }
  return {x.const_data_ptr(), y.const_data_ptr(), static_cast<int>(x.size(0)),
          static_cast<int>(y.size(0)), row_bytes, kind};
}

Launch launch(const Tensor& x, const Tensor& y, Product product, int64_t row0, int64_t row1,
              int64_t column0, int64_t column1, Skip skip, const Optional& panel,
              int64_t stream) {
  const Operands o = operands(x, y, product);
  STD_TORCH_CHECK(0 <= row0 && row0 < row1 && row1 <= o.x_rows && 0 <= column0 &&
                      column0 < column1 && column1 <= o.y_rows,
                  "fastsim: a block inside the matrix");
  Launch l{o, {}, {}, stream_of(stream)};
  l.grid = {static_cast<int>(row0), static_cast<int>(row1), static_cast<int>(column0),
            static_cast<int>(column1), static_cast<int>(in_tiles(row1 - row0)),
            static_cast<int>(in_tiles(column1 - column0)), false,
            skip == Skip::lower};
  if (panel) {
    STD_TORCH_CHECK(on_device(*panel) && panel->scalar_type() == x.scalar_type() &&
                        panel->stride(1) == 1 && panel->stride(0) % 8 == 0 &&
                        panel->stride(0) >= column1 - column0 && panel->size(0) == row1 - row0 &&
                        panel->size(1) == column1 - column0 &&
                        reinterpret_cast<uintptr_t>(panel->const_data_ptr()) % 16 == 0,
                    "fastsim: a row-major panel of the block in the operands' dtype");
    l.panel = {panel->mutable_data_ptr(), panel->stride(0)};
  }
  return l;
}

Pairs pairs_of(const Optional& positives, const Optional& row_ids, const Optional& column_ids,
               const Optional& row_groups, const Optional& column_groups, const Optional& dense,
               double negative_target, Skip skip) {
  return {pointer<const int64_t>(positives),  pointer<const int64_t>(row_ids),
          pointer<const int64_t>(column_ids), pointer<const int64_t>(row_groups),
          pointer<const int64_t>(column_groups), dense ? matrix(*dense) : Matrix{},
          static_cast<float>(negative_target), skip};
}

// The first arguments of every operator over tiles, their schema, and the Pairs and the launch made
// of them.
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

#define LAUNCH(panel, ...)                                                                       \
  const OnDevice on(x.get_device());                                                             \
  launch_tiles(                                                                                  \
      launch(x, y, product_of(product), row0, row1, column0, column1, skip_of(skip), panel,      \
             stream),                                                                            \
      __VA_ARGS__)

void softmax_forward(TILES, Tensor scale, double margin, Tensor row_top, Tensor row_sum,
                  Optional positive, Optional target_scores, Optional target_sums,
                  Optional column_top, Optional column_sum) {
  STD_TORCH_CHECK(positive ? positives.has_value() : target_scores && target_sums,
                  "fastsim: positives or partial sums of the targets");
  LAUNCH(std::nullopt, SoftmaxForward{PAIRS, input(scale), static_cast<float>(margin),
                                   pointer<float>(row_top), pointer<float>(row_sum),
                                   pointer<float>(positive), pointer<float>(target_scores),
                                   pointer<float>(target_sums), pointer<float>(column_top),
                                   pointer<float>(column_sum)});
}

void softmax_score_grad(TILES, Tensor scale, double margin, Tensor row_top, Tensor row_weight,
                   Tensor target_weight, Optional column_top, Optional column_weight,
                   Tensor panel) {
  STD_TORCH_CHECK(!column_top || !(dense || row_groups), "fastsim: columns with positives alone");
  LAUNCH(panel, SoftmaxScoreGrad{PAIRS, input(scale), static_cast<float>(margin), input(row_top),
                             input(row_weight), input(target_weight), input(column_top),
                             input(column_weight)});
}

void sigmoid(TILES, Tensor scale, Tensor bias, Optional loss, Optional score_grad, Optional weights,
             Optional panel) {
  STD_TORCH_CHECK(weights.has_value() == panel.has_value() &&
                      loss.has_value() == score_grad.has_value(),
                  "fastsim: weights with a panel, losses with score_grads");
  LAUNCH(panel, SigmoidBoth{PAIRS, input(scale), input(bias), input(weights), pointer<float>(loss),
                            pointer<float>(score_grad)});
}

void squared_error(TILES, Optional loss, Optional weights, Optional panel) {
  STD_TORCH_CHECK(weights.has_value() == panel.has_value(), "fastsim: weights with a panel");
  LAUNCH(panel, SquaredErrorBoth{PAIRS, input(weights), pointer<float>(loss)});
}

void levels_forward(TILES, Tensor scale, Tensor levels, Tensor partials) {
  LAUNCH(std::nullopt, LevelsForward{PAIRS, input(scale), input(levels),
                                  static_cast<int>(levels.numel()), pointer<float>(partials)});
}

void levels_score_grad(TILES, Tensor scale, Tensor levels, Tensor high, Tensor up, Tensor low,
                  Tensor down, Tensor panel) {
  LAUNCH(panel, LevelsScoreGrad{PAIRS, input(scale), input(levels),
                                static_cast<int>(levels.numel()), input(high), input(up),
                                input(low), input(down)});
}

void closest(TILES, Optional ceiling, Tensor top, Tensor column) {
  LAUNCH(std::nullopt,
         ClosestForward{PAIRS, input(ceiling), pointer<float>(top), pointer<int32_t>(column)});
}

#undef LAUNCH

// Writes the score of row i of x and row i of y to out[i]. It is computed by the same products as
// the tiles.
void diagonal(Tensor x, Tensor y, std::string product, Tensor out, int64_t stream) {
  const OnDevice on(x.get_device());
  Launch l = launch(x, y, product_of(product), 0, x.size(0), 0, y.size(0), Skip::nothing,
                    std::nullopt, stream);
  l.grid.diagonal = true;
  launch_tiles(l, Diagonal{pointer<float>(out)});
}

void unit_rows(Tensor x, Tensor unit, Optional inverse, std::string product, int64_t stream) {
  const OnDevice on(x.get_device());
  const Product kind = product_of(product);
  STD_TORCH_CHECK(on_device(unit) && unit.is_contiguous() &&
                      unit.scalar_type() ==
                          (kind == Product::half ? ScalarType::Half : ScalarType::Float),
                  "fastsim: contiguous unit rows in the product's operands");
  launch_unit_rows(matrix(x), x.size(0), x.size(1), unit.mutable_data_ptr(), unit.size(1),
                   pointer<float>(inverse), kind, stream_of(stream));
}

void unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, Tensor factor, Tensor grad,
                        Tensor dots, int64_t stream) {
  const OnDevice on(x.get_device());
  const bool single = grad.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(on_device(grad) && grad.is_contiguous() &&
                      (single || grad.scalar_type() == x.scalar_type()),
                  "fastsim: a contiguous gradient in float32 or the rows' dtype");
  launch_unit_rows_backward(input(grad_unit), matrix(x), x.size(0), x.size(1), input(inverse),
                            input(factor), grad.mutable_data_ptr(), single, pointer<float>(dots),
                            stream_of(stream));
}

void merge(Tensor tops, Tensor sums, Tensor scale, bool running, Tensor top, Tensor sum,
           int64_t stream) {
  const OnDevice on(tops.get_device());
  launch_merge(input(tops), input(sums), tops.size(0), tops.size(1), input(scale), running,
               pointer<float>(top), pointer<float>(sum), stream_of(stream));
}

void scan(Tensor logits, Tensor scratch, Tensor out, int64_t stream) {
  const OnDevice on(logits.get_device());
  STD_TORCH_CHECK(scratch.numel() == 4 * scan_parts(logits.numel()), "fastsim: scratch of a scan");
  launch_scan(input(logits), logits.numel(), pointer<double>(scratch), pointer<double>(out),
              stream_of(stream));
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
  m.def("merge(Tensor tops, Tensor sums, Tensor scale, bool running, Tensor(a!) top, "
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
