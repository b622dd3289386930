// Operators on panels: the products, and the kernels over pairs of kernels.inc, whose wrappers,
// schemas and registrations all follow from their entries there. Stable ABI, every output given by
// the caller, rows shared out over torch's threads. fastsim/backends/cpu is the only caller.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "operators.h"
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

void scores(Tensor x, Tensor packed, Tensor panel, bool add) {
  with_type(x, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    fill_scores(input<T>(x), x.size(1), static_cast<const T*>(packed.const_data_ptr()), b, add);
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

// ---- a sweep over prefixes ----

// What a width of a sweep has beside the panel of a kernel: its scores, of which the panel is first
// made a copy, and what end_of_width then does to them.
struct Width {
  Tensor scores;
  Optional row_ratios, column_ratios, row_dots, column_dots;
};
#define WIDTH_SCHEMA                                                                          \
  "Tensor(scores!) scores, Tensor? row_ratios, Tensor? column_ratios, "                        \
  "Tensor(row_dots!)? row_dots, Tensor(column_dots!)? column_dots, "

// Runs a kernel over the rows of a panel, one at a time, between the copy and the end of a width:
// a row stays in cache. Dots of columns are sums of kSumRows rows in the panel's type, which are
// added in double precision and in one order.
template <class T, class F>
void run_width(const Block<T>& b, const Width& w, const F& kernel) {
  constexpr int64_t kSumRows = 32;
  Block<T> from{};
  take_panel(w.scores, from);
  STD_TORCH_CHECK(from.rows == b.rows && from.columns == b.columns, "fastsim: panels of one size");
  const T *ratio = input<T>(w.row_ratios), *ratios = input<T>(w.column_ratios);
  double* dot = w.row_dots ? output<double>(*w.row_dots) : nullptr;
  double* dots = w.column_dots ? output<double>(*w.column_dots) : nullptr;
  const int64_t groups = tiles(b.rows, kSumRows);
  std::vector<T> sums(dots ? groups * b.columns : 0);
  over(groups, kSumRows * b.columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kSumRows; row < std::min(b.rows, end * kSumRows); ++row) {
      T *scores = from.scores + row * from.stride, *panel = b.scores + row * b.stride;
      std::copy_n(scores, b.columns, panel);
      kernel(row, row + 1);
      if (!dot && !ratios) continue;
      kernels().of<T>().end_of_width(panel, scores, b.columns, ratio ? ratio[row] : T(1), ratios,
                                     dot ? dot + row : nullptr,
                                     dots ? sums.data() + row / kSumRows * b.columns : nullptr);
    }
  });
  for (int64_t group = 0; group < groups && dots; ++group) {
    const T* sum = sums.data() + group * b.columns;
    for (int64_t j = 0; j < b.columns; ++j) dots[j] += double(sum[j]);
  }
}

// The memory of ratios (widths - 1, N), of which a part of the columns may be given.
template <class T>
const T* ratios_in(const Optional& given, int64_t widths, int64_t count) {
  if (!given) return nullptr;
  STD_TORCH_CHECK(given->size(0) == widths - 1 && given->size(1) == count && given->stride(1) == 1 &&
                      given->scalar_type() == kTypeOf<T>,
                  "fastsim: ratios of every width but the last");
  return static_cast<const T*>(given->const_data_ptr());
}

// panels (widths, rows, columns): see carry_rows.
void carry(Tensor panels, Optional row_ratios, Optional column_ratios) {
  with_type(panels, [&](auto type) {
    using T = decltype(type);
    STD_TORCH_CHECK(panels.stride(2) == 1, "fastsim: row-major panels");
    STD_TORCH_CHECK(row_ratios.has_value() == column_ratios.has_value(),
                    "fastsim: ratios of both sides");
    const int64_t widths = panels.size(0), rows = panels.size(1), columns = panels.size(2);
    const Carry<T> c{static_cast<T*>(panels.mutable_data_ptr()),
                     widths,
                     panels.stride(0),
                     panels.stride(1),
                     columns,
                     ratios_in<T>(row_ratios, widths, rows),
                     ratios_in<T>(column_ratios, widths, columns),
                     row_ratios ? row_ratios->stride(0) : 0,
                     column_ratios ? column_ratios->stride(0) : 0};
    over(rows, widths * columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().carry_rows(c, begin, end);
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

// The arguments of one call, taken from torch's stack one after another. Its tensors live as long
// as this does. What is wrong with one is said at the end, when nothing is left on the stack.
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
    return given ? hold<T>(name, std::move(*given)) : nullptr;
  }

  template <class T>
  Values<T> values(const char* name) {
    const T* data = tensor<T>(name);
    const int64_t count = tensors_.back().numel();
    if (count > kMostLevels) wrong_ = name;
    return {data, count};
  }

  void check(const char* kernel) const {
    STD_TORCH_CHECK(wrong_ == nullptr, "fastsim: ", kernel, ": ", wrong_,
                    ": wanted a contiguous tensor of the operator's dtype and at most ",
                    kMostLevels, " values of levels");
  }

 private:
  static constexpr size_t kMostTensors = 8;

  template <class T>
  T* hold(const char* name, Tensor t) {
    if (!t.is_contiguous() || t.scalar_type() != kTypeOf<T>) wrong_ = name;
    tensors_.push_back(std::move(t));
    return static_cast<T*>(tensors_.back().mutable_data_ptr());
  }

  StableIValue* next_;
  std::vector<Tensor> tensors_;
  const char* wrong_ = nullptr;
};

PairArguments take_pairs(Arguments& from) {
  return {.positives = from.take<Optional>(),
          .row_ids = from.take<Optional>(),
          .column_ids = from.take<Optional>(),
          .row_groups = from.take<Optional>(),
          .column_groups = from.take<Optional>(),
          .dense = from.take<Optional>(),
          .negative_target = from.take<double>(),
          .skip = from.take<std::string>()};
}

Width take_width(Arguments& from) {
  return {.scores = from.take<Tensor>(),
          .row_ratios = from.take<Optional>(),
          .column_ratios = from.take<Optional>(),
          .row_dots = from.take<Optional>(),
          .column_dots = from.take<Optional>()};
}

// The operator of a kernel: its panel, where in the matrix that lies, its pairs, its own arguments;
// with `width` those of a width of a sweep after the panel.
template <class Kernel, bool width>
void run_over_pairs(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  const Tensor panel = from.take<Tensor>();
  std::optional<Width> w;
  if constexpr (width) w = take_width(from);
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    b.row0 = from.take<int64_t>();
    b.column0 = from.take<int64_t>();
    const PairArguments pairs = take_pairs(from);
    const auto arguments = Kernel::template take<T>(from);
    from.check(Kernel::name);
    take_panel(panel, b);
    take_pairs(pairs, b);
    const auto kernel = Kernel::template of<T>();
    const auto run = [&](int64_t begin, int64_t end) { kernel(b, arguments, begin, end); };
    if constexpr (width) return run_width(b, *w, run);
    Kernel::of_rows ? over(b.rows, b.columns, run) : over(b.columns, b.rows, run);
  });
}

constexpr bool rows = true, columns = false;

#define FUNCTION(...)
#define PAIRS_KERNEL(kernel, Fields, each, ...)    \
  struct Of##Fields {                              \
    static constexpr const char* name = #kernel;   \
    static constexpr bool of_rows = each;          \
    template <class T>                             \
    static auto of() {                             \
      return kernels().of<T>().kernel;             \
    }                                              \
    template <class T>                             \
    static Fields<T> take(Arguments& from) {       \
      return {__VA_ARGS__};                        \
    }                                              \
  };
#define NUMBER(name) .name = T(from.take<double>()),
#define FLAG(name) .name = from.take<bool>(),
#define COUNT(name) .name = from.take<int64_t>(),
#define INPUT(name) .name = from.tensor<T>(#name),
#define MAYBE_INPUT(name) .name = from.maybe<T>(#name),
#define OUTPUT(name) .name = from.tensor<T>(#name),
#define STATE(name) .name = from.tensor<double>(#name),
#define INDICES(name) .name = from.tensor<int64_t>(#name),
#define VALUES(name) .name = from.values<T>(#name),
#include "kernels.inc"

std::vector<Operator> operators() {
  return {
      OPERATOR(panel_columns, "(bool single) -> int"),
      OPERATOR(pack_panels, "(Tensor y, Tensor(packed!) packed) -> ()"),
      OPERATOR(scores, "(Tensor x, Tensor packed, Tensor(panel!) panel, bool add) -> ()"),
      OPERATOR(multiply, "(Tensor panel, Tensor right, Tensor(out!) out, bool transposed, "
                         "bool add) -> ()"),
      OPERATOR(leave_out_above, "(Tensor(panel!) panel, Tensor guide, Tensor thresholds) -> ()"),
      OPERATOR(transpose, "(Tensor from, Tensor(to!) to, bool add) -> ()"),
      OPERATOR(carry, "(Tensor(panels!) panels, Tensor? row_ratios, Tensor? column_ratios) -> ()"),
      OPERATOR(instruction_set, "() -> str"),
      OPERATOR(tile_rows, "() -> int"),
      OPERATOR(most_levels, "() -> int"),
      OPERATOR(observed, "() -> int"),
      OPERATOR(left_out, "() -> float"),
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, each, ...)                                          \
  {#name "(Tensor(panel!) panel, int row0, int column0, " PAIRS_SCHEMA __VA_ARGS__     \
         ") -> ()",                                                                    \
   run_over_pairs<Of##Fields, false>},                                                 \
  {"sweep_" #name "(Tensor(panel!) panel, " WIDTH_SCHEMA "int row0, int column0, "      \
   PAIRS_SCHEMA __VA_ARGS__ ") -> ()",                                                 \
   run_over_pairs<Of##Fields, true>},
#define NUMBER(name) ", float " #name
#define FLAG(name) ", bool " #name
#define COUNT(name) ", int " #name
#define INPUT(name) ", Tensor " #name
#define MAYBE_INPUT(name) ", Tensor? " #name
#define OUTPUT(name) ", Tensor(" #name "!) " #name
#define STATE(name) ", Tensor(" #name "!) " #name
#define INDICES(name) ", Tensor(" #name "!) " #name
#define VALUES(name) ", Tensor " #name
#include "kernels.inc"
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
