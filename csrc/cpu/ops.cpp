// Operators on panels: the products, and the kernels over pairs of kernels.inc, whose wrappers,
// schemas and registrations all follow from their entries there. Stable ABI, every output given by
// the caller, rows shared out over torch's threads. fastsim/backends/cpu is the only caller.

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "column_sums.h"
#include "observing.h"
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
  with_type(y, [&](auto type) {
    using T = decltype(type);
    pack(input<T>(y), y.size(0), y.size(1), output<T>(packed));
  });
}

void packed_scores(Tensor x, Tensor packed, Tensor panel, bool add) {
  with_type(x, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    fill_scores(input<T>(x), x.size(1), static_cast<const T*>(packed.const_data_ptr()), b, add);
  });
}

// Of unit rows x and columns y: unit rows too, or with `inverse` what it makes unit rows of.
void scores(Tensor x, Tensor y, Optional inverse, Tensor panel, bool add) {
  with_type(x, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    STD_TORCH_CHECK(inverse || (dtype_of(y) == kDtypeOf<T> && y.stride(1) == 1),
                    "fastsim: row-major columns of the rows' dtype");
    STD_TORCH_CHECK(y.size(0) >= b.columns && y.size(1) == x.size(1) &&
                        (!inverse || inverse->size(0) >= b.columns),
                    "fastsim: a column of the panel's width for each of its columns");
    fill_scores(input<T>(x), x.size(1), matrix(y), input<T>(inverse), b, add);
  });
}

void multiply(Tensor panel, Tensor right, Tensor out, bool transposed, bool add) {
  with_type(right, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    multiply_panel(b, input<T>(right), right.size(1), output<T>(out), transposed, add);
  });
}

void leave_out_above(Tensor panel, Tensor guide, Tensor thresholds) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    Block<T> b{}, g{};
    take_panel(panel, b);
    take_panel(guide, g);
    STD_TORCH_CHECK(guide.scalar_type() == panel.scalar_type(), "fastsim: panels of one dtype");
    const T* threshold = input<T>(thresholds);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().leave_out_above(b, g.scores, g.stride, threshold, begin, end);
    });
  });
}

// to = from^T, or added to it.
void transpose(Tensor from, Tensor to, bool add) {
  with_type(to, [&](auto type) {
    using T = decltype(type);
    Block<T> a{}, b{};
    take_panel(from, a);
    take_panel(to, b);
    STD_TORCH_CHECK(from.scalar_type() == to.scalar_type() && a.rows == b.columns &&
                        a.columns == b.rows,
                    "fastsim: a panel and one of the transposed size");
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().transpose(a.scores, a.stride, b.scores, b.stride, b.columns, add, begin,
                                  end);
    });
  });
}

// ---- what Python has to agree with ----

std::string instruction_set() { return kernels().name; }
int64_t tile_rows() { return kTileRows; }
int64_t most_levels() { return kMostLevels; }
int64_t observed() { return kObserved; }
double left_out() { return kLeftOut<double>; }

// ---- kernels over pairs ----

// The operator of a kernel: its panel, where in the matrix that lies, its pairs, its own arguments.
template <class Kernel>
void run_over_pairs(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  const Tensor panel = from.take<Tensor>();
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    b.row0 = from.take<int64_t>();
    b.column0 = from.take<int64_t>();
    const PairArguments pairs = take_pairs(from);
    auto arguments = Kernel::template take<T>(from);
    from.check(Kernel::name);
    take_panel(panel, b);
    take_pairs(pairs, b);
    std::optional<Observing<T>> observing;
    if (Kernel::shares == Each::first_look && pairs.seen) observing.emplace(b, *pairs.seen);
    const auto kernel = Kernel::template of<T>();
    const auto run = [&](int64_t begin, int64_t end) { kernel(b, arguments, begin, end); };
    if constexpr (has_sums<decltype(arguments)>) {
      over_groups<T>(b.rows, b.columns, b.columns, {from.sums, 1, 0}, [&] {
        return [&](int64_t begin, int64_t end, T* sums) {
          kernel(b, with_sums(arguments, sums), begin, end);
        };
      });
    } else {
      Kernel::shares == Each::columns ? over(b.columns, b.rows, run) : over(b.rows, b.columns, run);
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
      OPERATOR(transpose, "(Tensor from, Tensor(to!) to, bool add) -> ()"),
      OPERATOR(instruction_set, "() -> str"),
      OPERATOR(tile_rows, "() -> int"),
      OPERATOR(most_levels, "() -> int"),
      OPERATOR(observed, "() -> int"),
      OPERATOR(left_out, "() -> float"),
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, each, ...)                                          \
  {#name "(Tensor(panel!) panel, int row0, int column0, " PAIRS_SCHEMA __VA_ARGS__     \
         ") -> ()",                                                                    \
   run_over_pairs<Of##Fields>},
#include "schemas.inc"
#include "kernels.inc"
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
