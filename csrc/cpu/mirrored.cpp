// The operators on a band of the scores of x with itself (fastsim/backends/cpu/mirrored.py), of
// which only the part on and above the diagonal is computed. The operator mirrored_<kernel> runs a
// kernel over the pairs of the band, and over the same pairs turned round.

#include "mirrored.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "operators.h"
#include "pair_operators.h"

namespace fastsim {

namespace {

// The columns of a part of a band: few enough that it and its transpose stay in a near cache.
constexpr int64_t kPartColumns = 128;

// The scores of the rows and columns of a band, in the memory of a panel.
template <class T>
struct Band {
  T* scores;
  int64_t stride;
  Range rows, columns;

  T* at(int64_t column) const { return scores + (column - columns.begin); }
};

// A kernel over the pairs of a band. all: the whole matrix. fields: the kernel's arguments for it.
template <class Kernel, class T, class Fields>
class MirroredBand {
 public:
  MirroredBand(const Block<T>& all, const Fields& fields, const Band<T>& band)
      : all_(all), fields_(fields), band_(band), height_(size(band.rows)),
        right_{std::max(band.columns.begin, band.rows.end), band.columns.end} {}

  // Adds the scores to the states of their rows, and those right of the square on the diagonal also
  // to the states of their columns.
  void forward() const {
    over_parts([&](Range columns) {
      const Scratch<T> turned(size(columns) * height_);
      turn_round(columns, turned);
      run(columns, band_.rows, turned, height_);
    });
    // Kernels that leave out pairs change scores, so that this comes after the transposes.
    run_on_rows(band_.columns);
  }

  // Replaces each score by the sum of the score gradients of both its pairs, G_ij + G_ji.
  void score_grad() const {
    if (band_.columns.begin < right_.begin) {
      run_on_rows(band_.rows);
      add_mirrored(block(band_.rows, band_.rows, band_.scores, band_.stride));
    }
    over_parts([&](Range columns) {
      const int64_t count = size(columns);
      const Scratch<T> turned(count * height_);
      // For kernels that also add to states: those of a row would get terms from several threads.
      const Scratch<double> unread(std::max(count, height_));
      std::fill_n(static_cast<double*>(unread), std::max(count, height_), 0.0);
      turn_round(columns, turned);
      run(columns, band_.rows, turned, height_, unread);
      run(band_.rows, columns, band_.at(columns.begin), band_.stride, unread);
      kernels().of<T>().transpose(turned, height_, band_.at(columns.begin), band_.stride, count,
                                  true, 0, height_);
    });
  }

 private:
  static int64_t size(Range range) { return range.end - range.begin; }
  static auto function() { return Kernel::template function<T>(); }

  // Calls f(columns) for parts of the columns right of the square on the diagonal, in several
  // threads at once.
  template <class F>
  void over_parts(const F& f) const {
    share_out(ceil_div(size(right_), kPartColumns), 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = right_.begin + part * kPartColumns;
        f(Range{first, std::min(first + kPartColumns, right_.end)});
      }
    });
  }

  // Writes the transpose of these columns of the band to `turned`.
  void turn_round(Range columns, T* turned) const {
    kernels().of<T>().transpose(band_.at(columns.begin), band_.stride, turned, height_, height_,
                                false, 0, size(columns));
  }

  // Runs the kernel over the pairs of the band's rows with its first columns up to columns.end, on
  // all threads.
  void run_on_rows(Range columns) const {
    const Block<T> b = block(band_.rows, columns, band_.scores, band_.stride);
    const Fields fields = fields_at(band_.rows, columns);
    over(height_, size(columns),
         [&](int64_t begin, int64_t end) { function()(b, fields, begin, end); });
  }

  // Runs the kernel over the pairs of these rows and columns. unread: as in from_row.
  void run(Range rows, Range columns, T* scores, int64_t stride, double* unread = nullptr) const {
    function()(block(rows, columns, scores, stride), fields_at(rows, columns, unread), 0,
               size(rows));
  }

  Block<T> block(Range rows, Range columns, T* scores, int64_t stride) const {
    Block<T> b = all_.from_row(rows.begin).from_column(columns.begin);
    b.scores = scores;
    b.stride = stride;
    b.rows = size(rows);
    b.columns = size(columns);
    return b;
  }

  Fields fields_at(Range rows, Range columns, double* unread = nullptr) const {
    return from_row(from_column(fields_, columns.begin), rows.begin, unread);
  }

  const Block<T>& all_;
  const Fields& fields_;
  const Band<T> band_;
  const int64_t height_;
  const Range right_;  // the columns right of the square on the diagonal
};

// The operator mirrored_<kernel>. count: the rows of x. score_grad: whether the scores become score
// gradients. row0, column0: the panel's place in the score matrix. The pairs and the kernel's
// arguments are those of all rows and columns.
template <class Kernel>
void run_mirrored(StableIValue* stack, uint64_t, uint64_t) {
  Stack from(stack);
  const Tensor panel = from.take<Tensor>();
  const int64_t count = from.take<int64_t>();
  const bool score_grad = from.take<bool>();
  const PairCall<Kernel> call(from);
  STD_TORCH_CHECK(!call.pairs.row_metrics,
                  "fastsim: row_metrics: wanted none, as a score here stands for two pairs");
  with_type(panel, "panel", [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    const int64_t row0 = call.row0, column0 = call.column0;
    const Band<T> band{b.scores, b.stride, {row0, row0 + b.rows}, {column0, column0 + b.columns}};
    const bool on_diagonal = column0 == row0 && b.columns >= b.rows;
    STD_TORCH_CHECK(row0 >= 0 && band.rows.end <= count && band.columns.end <= count &&
                        (on_diagonal || column0 >= band.rows.end),
                    "fastsim: row0, column0: wanted a band of ", count,
                    " rows on or above the diagonal, got ", row0, ", ", column0, " for ",
                    describe(panel));
    Block<T> all{};
    all.rows = all.columns = count;
    take_pairs(call.pairs, all);
    check_needs(all, Kernel::needs, Kernel::name);
    const auto fields = fields_of<T>(call.fields, {count, count});
    const MirroredBand<Kernel, T, std::decay_t<decltype(fields)>> mirrored(all, fields, band);
    score_grad ? mirrored.score_grad() : mirrored.forward();
  });
}

std::vector<Operator> operators() {
  std::vector<Operator> list;
#define FUNCTION(...)
#define PAIRS_KERNEL(name, Fields, pass, needs, ...)                                            \
  if (PassKind::pass == PassKind::first_look || PassKind::pass == PassKind::rows) {             \
    list.push_back({"mirrored_" #name "(Tensor(panel!) panel, int count, bool score_grad, "     \
                    "int row0, int column0, " PAIRS_SCHEMA __VA_ARGS__ ") -> ()",               \
                    run_mirrored<Fields##Operator>});                                           \
  }
#include "schemas.inc"
#include "kernels.inc"
  return list;
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
