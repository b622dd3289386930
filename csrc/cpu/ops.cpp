// Operators on panels: the products, and the kernels over pairs (kernels.inc), whose wrappers,
// schemas and registrations follow from their entries there. They use torch's stable ABI. The
// caller allocates every output. Rows are divided among torch's threads. fastsim/backends/cpu is
// the only caller.

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "column_sums.h"
#include "metrics_recorder.h"
#include "operators.h"
#include "pair_operators.h"
#include "passes.h"

namespace fastsim {

namespace {

// ---- products ----

int64_t panel_columns(bool single) {
  return single ? packed_rows<float>(1) : packed_rows<double>(1);
}

void pack_panels(Tensor y, Tensor packed) {
  with_type(y, "y", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = y.size(0), width = y.size(1);
    pack(input<T>(y, "y", rows * width), rows, width,
         output<T>(packed, "packed", packed_rows<T>(rows) * width));
  });
}

void packed_scores(Tensor x, Tensor packed, Tensor panel, bool add) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    const int64_t width = x.size(1);
    const T* columns = input_at_least<T>(packed, "packed", packed_rows<T>(b.columns) * width);
    fill_scores(input<T>(x, "x", b.rows * width), width, columns, b, add);
  });
}

// panel (+)= x y^T for unit rows x, and columns y that are unit rows too or, with `inverse`, rows
// that their inverse norms make unit rows.
void scores(Tensor x, Tensor y, Optional inverse, Tensor panel, bool add) {
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    const int64_t width = x.size(1);
    STD_TORCH_CHECK(inverse || (dtype_of(y) == kDtypeOf<T> && y.stride(1) == 1),
                    "fastsim: y: wanted row-major columns of the rows' dtype");
    if (y.size(0) < b.columns || y.size(1) != width) {
      refuse("y", y, "at least ", b.columns, " columns of x's width");
    }
    const T* factors = inverse ? input_at_least<T>(*inverse, "inverse", b.columns) : nullptr;
    fill_scores(input<T>(x, "x", b.rows * width), width, matrix(y), factors, b, add);
  });
}

void multiply(Tensor panel, Tensor right, Tensor out, bool transposed, bool add) {
  with_type(right, "right", [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    const int64_t width = right.size(1);
    const T* rows = input<T>(right, "right", (transposed ? b.rows : b.columns) * width);
    T* to = output<T>(out, "out", (transposed ? b.columns : b.rows) * width);
    multiply_panel(b, rows, width, to, transposed, add);
  });
}

void leave_out_above(Tensor panel, Tensor guide, Tensor thresholds) {
  with_type(panel, "panel", [&](auto type) {
    using T = decltype(type);
    Block<T> b{}, g{};
    take_panel(panel, b);
    take_panel(guide, g, "guide");
    if (g.rows != b.rows || g.columns != b.columns) refuse("guide", guide, "the panel's size");
    const T* threshold = input<T>(thresholds, "thresholds", b.rows);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().leave_out_above(b, g.scores, g.stride, threshold, begin, end);
    });
  });
}

// ---- constants that Python has to agree with ----

std::string instruction_set() { return kernels().name; }
int64_t tile_rows() { return kTileRows; }
int64_t most_levels() { return kMostLevels; }
int64_t row_metric_count() { return kRowMetrics; }
int64_t interface() { return interface_hash >> 1; }
double left_out() { return kLeftOut<double>; }

// ---- kernels over pairs ----

// The operator of a kernel over pairs. Its arguments are the panel, the panel's place in the score
// matrix, the pairs, and the kernel's own.
template <class Kernel>
void run_over_pairs(StableIValue* stack, uint64_t, uint64_t) {
  Stack from(stack);
  const Tensor panel = from.take<Tensor>();
  const PairCall<Kernel> call(from);
  with_type(panel, "panel", [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    b.row0 = call.row0;
    b.column0 = call.column0;
    take_panel(panel, b);
    take_pairs(call.pairs, b);
    check_needs(b, Kernel::needs, Kernel::name);
    const Extent extent{b.rows, b.columns};
    const auto arguments = fields_of<T>(call.fields, extent);
    std::optional<MetricsRecorder<T>> recorder;
    if (Kernel::pass_kind == PassKind::first_look && call.pairs.row_metrics) {
      recorder.emplace(b, *call.pairs.row_metrics);
    }
    const auto kernel = Kernel::template function<T>();
    const auto run = [&](int64_t begin, int64_t end) { kernel(b, arguments, begin, end); };
    if constexpr (has_column_sums<typename Kernel::Arguments>) {
      const ColumnTotals totals{column_sums_of(call.fields, extent).data, 1, 0};
      over_row_groups<T>(b.rows, b.columns, b.columns, totals, [&] {
        return [&](int64_t begin, int64_t end, T* sums) {
          kernel(b, with_column_sums(arguments, sums), begin, end);
        };
      });
    } else {
      Kernel::pass_kind == PassKind::columns ? over(b.columns, b.rows, run)
                                             : over(b.rows, b.columns, run);
    }
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(panel_columns, "(bool single) -> int"),
      OPERATOR(pack_panels, "(Tensor y, Tensor(packed!) packed) -> ()"),
      OPERATOR(packed_scores, "(Tensor x, Tensor packed, Tensor(panel!) panel, bool add) -> ()"),
      OPERATOR(scores, "(Tensor x, Tensor y, Tensor? inverse, Tensor(panel!) panel, bool add) "
                       "-> ()"),
      OPERATOR(multiply, "(Tensor panel, Tensor right, Tensor(out!) out, bool transposed, "
                         "bool add) -> ()"),
      OPERATOR(leave_out_above, "(Tensor(panel!) panel, Tensor guide, Tensor thresholds) -> ()"),
      OPERATOR(instruction_set, "() -> str"),
      OPERATOR(tile_rows, "() -> int"),
      OPERATOR(most_levels, "() -> int"),
      OPERATOR(row_metric_count, "() -> int"),
      OPERATOR(interface, "() -> int"),
      OPERATOR(left_out, "() -> float"),
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, pass, needs, ...)                                   \
  {#name "(Tensor(panel!) panel, int row0, int column0, " PAIRS_SCHEMA __VA_ARGS__     \
         ") -> ()",                                                                    \
   run_over_pairs<Fields##Operator>},
#include "schemas.inc"
#include "kernels.inc"
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
