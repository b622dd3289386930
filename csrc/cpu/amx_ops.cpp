// Chooses the kernels of amx.h for the processor, and offers them as operators.
#include <cstdlib>
#include <optional>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "amx_operands.h"
#include "arguments.h"
#include "operators.h"

namespace fastsim {

#if defined(__x86_64__)
namespace amx {
extern const AmxKernels amx;
}
namespace avx512_bf16 {
extern const AmxKernels amx;
}
#endif
namespace amx_emulated {
extern const AmxKernels amx;
}

namespace {

#if defined(__x86_64__)
// Whether the processor has all instructions that amx.cpp is compiled for, apart from the tiles.
bool has_dots() {
  unsigned a, b, c, d;
  if (std::string(kernels().name) != "avx512" || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    return false;
  }
  constexpr unsigned kBfloat16 = 1u << 5;
  return a & kBfloat16;
}

// Whether products by AVX512_BF16 are faster than those of float32 numbers. On Intel they are
// slower; of other processors than AMD's it is not known.
bool has_fast_dots() { return __builtin_cpu_is("amd") && has_dots(); }

bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!has_dots() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
  if (!(d & kBfloat16) || !(d & kTiles)) return false;
  // A process has to ask Linux to save its tiles: ARCH_REQ_XCOMP_PERM, state 18.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

// FASTSIM_AMX=0 chooses no kernels, =emulated the emulation of AMX, and =avx512_bf16 the kernels of
// AVX512_BF16 even where AMX or products of float32 numbers are faster.
const AmxKernels* choose() {
  const char* setting = std::getenv("FASTSIM_AMX");
  const std::string choice = setting ? setting : "";
  if (choice == "0") return nullptr;
  if (choice == "emulated") return &amx_emulated::amx;
#if defined(__x86_64__)
  if (choice == "avx512_bf16" && has_dots()) return &avx512_bf16::amx;
#endif
  STD_TORCH_CHECK(choice.empty(), "FASTSIM_AMX: wanted 0, emulated or, where the processor has it, "
                                "avx512_bf16, got ", choice);
#if defined(__x86_64__)
  if (has_amx()) return &amx::amx;
  if (has_fast_dots()) return &avx512_bf16::amx;
#endif
  return nullptr;
}

// The rows and the depth of packed operands are multiples of this.
int64_t amx_group() { return kTileGroup; }
static_assert(kTileGroup == kTileDepth);

std::string amx_name() { return amx_kernels() ? amx_kernels()->name : ""; }
int64_t amx_most_parts() { return amx_kernels() ? amx_kernels()->most_parts : 0; }

// x (N, D) -> inverse, powers, rest (N,), as in AmxKernels.
void amx_norms(Tensor x, Tensor inverse, Tensor powers, Tensor rest) {
  const Matrix rows = scaled_matrix(x).matrix;
  const int64_t count = x.size(0), width = x.size(1);
  float* const to_inverse = output<float>(inverse, "inverse", count);
  float* const to_powers = output<float>(powers, "powers", count);
  float* const to_rest = output<float>(rest, "rest", count);
  over(count, width, [&](int64_t begin, int64_t end) {
    amx_in_use().norms(rows, width, to_inverse, to_powers, to_rest, {begin, end});
  });
}

// Packs y (M, D) as the columns of scores. packed: (M up to the next 32, parts * (D up to the next
// 32)) int16. Returns false if an entry is not finite.
bool amx_pack(Tensor y, Optional powers, Tensor packed) {
  const int64_t count = y.size(0), width = y.size(1);
  const int64_t depth = ceil_div(width, kTileDepth) * kTileDepth;
  const int64_t parts = depth ? check_parts(packed.size(1) / depth) : 1;
  uint16_t* const to = output<uint16_t>(packed, "packed", operand_elements(count, width, parts));
  const ScaledMatrix from = scaled_matrix(y, input<float>(powers, "powers", count));
  return pack_all(TileLayout::rows_transposed, from, count, 0, width, parts, to);
}

// panel = x y^T, or += with `add`, times the rests of both sides; y is packed by amx_pack. Returns
// false and does nothing if the rests are not given and an entry of x is not finite.
bool amx_scores(Tensor x, Optional powers, Optional rest, Tensor packed, Optional column_rest,
                Tensor panel, bool add) {
  Block<float> b{};
  take_panel(panel, b);
  const int64_t width = x.size(1), steps = ceil_div(width, kTileDepth);
  const int64_t parts = steps ? check_parts(packed.size(1) / (steps * kTileDepth)) : 1;
  const int64_t packed_size = operand_elements(b.columns, width, parts);
  const uint16_t* const columns = input_at_least<uint16_t>(packed, "packed", packed_size);
  STD_TORCH_CHECK(bool(rest) == bool(column_rest),
                  "fastsim: rest, column_rest: wanted both or neither");
  const ScoreScales scales{
      input<float>(rest, "rest", b.rows),
      column_rest ? input_at_least<float>(*column_rest, "column_rest", b.columns) : nullptr};
  check_matrix(x, "x", b.rows, width);
  const ScaledMatrix from = scaled_matrix(x, input<float>(powers, "powers", b.rows));
  const Scratch<uint16_t> rows(operand_elements(b.rows, width, parts));
  const bool finite = pack_all(TileLayout::rows, from, b.rows, 0, width, parts, rows);
  if (!finite && !rest) return false;
  const Operand left{rows, parts, steps};
  const Operand right{columns, parts, steps};
  const int64_t cost = kTileGroup * b.rows * width;
  torch::stable::parallel_for(
      0, ceil_div(b.columns, kTileGroup), 1 + kProductGrain / (cost + 1),
      [&](int64_t begin, int64_t end) {
        amx_in_use().scores(left, b.rows, right, b.columns, bool(rest), scales, b.scores, b.stride,
                            add, {begin, end});
      });
  return true;
}

// The number of int16 elements that `right` (depth, width) has when packed for amx_multiply.
int64_t amx_right_size(int64_t depth, int64_t width, int64_t parts) {
  return operand_elements(width, depth, check_parts(parts));
}

void amx_pack_right(Tensor right, Optional powers, int64_t parts, Tensor packed) {
  const int64_t depth = right.size(0), width = right.size(1);
  uint16_t* const to =
      output<uint16_t>(packed, "packed", operand_elements(width, depth, check_parts(parts)));
  pack_right(scaled_matrix(right, input<float>(powers, "powers", depth)), depth, width, parts, to);
}

// Score gradients as the left operand of a product: a panel of them, or its transpose.
struct LeftPanel {
  Block<float> panel;
  bool transposed;
  const float* factors;  // scales of the entries of a row of the operand, (depth,); null: 1
  int64_t parts;

  int64_t rows() const { return transposed ? panel.columns : panel.rows; }
  int64_t depth() const { return transposed ? panel.rows : panel.columns; }

  // The operand from row `row` on, as it lies in the panel.
  ScaledMatrix from_row(int64_t row) const {
    const float* from = panel.scores + (transposed ? row : row * panel.stride);
    return {{from, Dtype::float32, panel.stride, 1}, transposed ? factors : nullptr,
            transposed ? nullptr : factors};
  }

  // Packs a block of the operand: the entries `depth` of the rows `rows`.
  void pack(Range rows, Range depth, uint16_t* to) const {
    const int64_t count = rows.end - rows.begin;
    amx_in_use().pack(transposed ? TileLayout::row_pairs_transposed : TileLayout::rows,
                      from_row(rows.begin), count, depth.begin, depth.end - depth.begin, parts, to,
                      {0, 2 * ceil_div(count, kTileGroup)});
  }
};

// Decides which squares of score gradients, which multiply bfloat16 rows, need their second part:
// those with an entry larger than kSmallShare of the largest in their group of rows of the result.
// The other second parts are less than 2^-9 of these small entries, and less than the rounding
// error of the result.
class SecondParts {
 public:
  // For the entries `depth` of the rows `rows` of the operand.
  SecondParts(const LeftPanel& left, Range rows, Range depth)
      : depth_begin_(depth.begin), steps_(ceil_div(depth.end - depth.begin, kTileDepth)),
        groups_(ceil_div(rows.end - rows.begin, kTileGroup)), transposed_(left.transposed),
        largest_(steps_ * groups_), needed_(steps_ * groups_) {
    const int64_t count = rows.end - rows.begin, length = depth.end - depth.begin;
    const Matrix from = left.from_row(rows.begin).matrix;
    transposed_ ? amx_in_use().largest_of_squares(from.from_row(depth.begin), length, count,
                                                  largest_)
                : amx_in_use().largest_of_squares(from.from_column(depth.begin), count, length,
                                                  largest_);
    for (int64_t group = 0; group < groups_; ++group) {
      float largest = 0;
      for (int64_t step = 0; step < steps_; ++step) {
        largest = std::max(largest, largest_[square(group, step)]);
      }
      for (int64_t step = 0; step < steps_; ++step) {
        needed_[square(group, step)] = largest_[square(group, step)] > kSmallShare * largest;
      }
    }
  }

  // `operand`, packed from the entries from `first` on, with only the second parts that it needs.
  Operand keep_needed(Operand operand, int64_t first) const {
    operand.uses_second = needed_ + square(0, (first - depth_begin_) / kTileDepth);
    operand.group_stride = square(1, 0);
    operand.step_stride = square(0, 1);
    return operand;
  }

 private:
  // The index of a square.
  int64_t square(int64_t group, int64_t step) const {
    return transposed_ ? step * groups_ + group : group * steps_ + step;
  }

  const int64_t depth_begin_, steps_, groups_;
  const bool transposed_;
  const Scratch<float> largest_;  // the largest absolute value in each square
  const Scratch<bool> needed_;    // whether its second part is needed
};

// What residuals (amx.h) are multiplied by: the norms of the rows of the right operand, and their
// mean unit row.
struct ResidualFactors {
  // rows (depth, width). inverse: as for `amx_multiply`.
  ResidualFactors(const ScaledMatrix& rows, const float* inverse, int64_t depth, int64_t width)
      : width(width), norms(padded(depth)), mean(width) {
    norms_of_operand(inverse, depth, norms);
    mean_row(rows, inverse, depth, width, mean);
  }

  // to (rows, width) += residuals (rows,) times the mean row.
  void add_residuals(const float* residuals, int64_t rows, float* to) const {
    for (int64_t i = 0; i < rows; ++i, to += width) {
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) to[k] += residuals[i] * mean[k];
    }
  }

  const int64_t width;
  const Scratch<float> norms, mean;
};

// The product of a panel of score gradients and packed rows, of `parts` parts each. It becomes
// `out` (rows of the panel, width), or with `add` is added to it. residual_factors: given if second
// parts of the panel may be dropped.
class PanelProduct {
 public:
  PanelProduct(const LeftPanel& left, int64_t width, int64_t parts,
               const std::optional<ResidualFactors>& residual_factors, float* out, bool add)
      : left_(left), width_(width), parts_(parts), residual_factors_(residual_factors), out_(out),
        add_(add) {}

  // Multiplies by the rows `depth` of the right operand, which `packed` holds. Ranges come in
  // ascending order: the products of the first begin the sums.
  void multiply(Range depth, const uint16_t* packed) const {
    const int64_t cost = kTileGroup * (depth.end - depth.begin) * width_;
    torch::stable::parallel_for(
        0, ceil_div(left_.rows(), kTileGroup), 1 + kProductGrain / (cost + 1),
        [&](int64_t begin, int64_t end) {
          const Scratch<uint16_t> memory(
              operand_elements(kGroupsAtOnce * kTileGroup, kBlockDepth, left_.parts));
          for (int64_t group = begin; group < end; group += kGroupsAtOnce) {
            const int64_t end_row = std::min(group + kGroupsAtOnce, end) * kTileGroup;
            multiply_rows({group * kTileGroup, std::min(end_row, left_.rows())}, depth, packed,
                          memory);
          }
        });
  }

 private:
  // The groups of rows of the result whose left operand is packed at once. In a transposed panel
  // these groups are next to each other in each row, while its rows lie far apart.
  static constexpr int64_t kGroupsAtOnce = 8;

  // Computes the rows `rows` of the result, at most kGroupsAtOnce groups. memory: for a block of
  // the left operand.
  void multiply_rows(Range rows, Range depth, const uint16_t* packed, uint16_t* memory) const {
    const int64_t count = rows.end - rows.begin;
    float* const out = out_ + rows.begin * width_;
    std::optional<SecondParts> second_parts;
    if (residual_factors_) second_parts.emplace(left_, rows, depth);
    float residuals[kGroupsAtOnce * kTileGroup] = {};
    for (int64_t k = depth.begin; k < depth.end; k += kBlockDepth) {
      const Range block{k, std::min(k + kBlockDepth, depth.end)};
      const int64_t steps = ceil_div(block.end - k, kTileDepth);
      left_.pack(rows, block, memory);
      Operand left{memory, left_.parts, steps};
      if (second_parts) left = second_parts->keep_needed(left, k);
      amx_in_use().multiply(left, count, {packed, parts_, steps}, width_, out, add_ || k > 0,
                            false, {0, ceil_div(width_, kTileGroup)});
      if (residual_factors_) {
        amx_in_use().add_dropped(left, count, residual_factors_->norms + k, residuals);
      }
      packed += operand_elements(width_, block.end - k, parts_);
    }
    if (residual_factors_) residual_factors_->add_residuals(residuals, count, out);
  }

  const LeftPanel& left_;
  const int64_t width_, parts_;
  const std::optional<ResidualFactors>& residual_factors_;
  float* const out_;
  const bool add_;
};

// out = panel right, or with `transposed` panel^T right; += with `add`. right: (depth, D) rows,
// with their powers and rests. kept: `right` packed by amx_pack_right; None: `together` rows of it,
// a multiple of kTileGroup, are packed here at a time, into memory that is used again. inverse
// (depth,): the factors from power x to unit rows, None if these are unit rows; it is read if
// second parts of the panel may be dropped.
void amx_multiply(Tensor panel, Tensor right, Optional powers, Optional kept, Optional rest,
                  Optional inverse, Tensor out, bool transposed, bool add, int64_t panel_parts,
                  int64_t parts, int64_t together) {
  LeftPanel left{{}, transposed, nullptr, check_parts(panel_parts)};
  take_panel(panel, left.panel);
  check_parts(parts);
  STD_TORCH_CHECK(together > 0 && together % kTileGroup == 0,
                  "fastsim: together: wanted a multiple of ", kTileGroup, ", got ", together);
  const int64_t width = out.size(1), depth = left.depth();
  check_matrix(right, "right", depth, width);
  const ScaledMatrix rows = scaled_matrix(right, input<float>(powers, "powers", depth));
  const uint16_t* const packed_by_caller =
      input<uint16_t>(kept, "kept", operand_elements(width, depth, parts));
  left.factors = input<float>(rest, "rest", depth);
  const float* const to_unit = input<float>(inverse, "inverse", depth);
  float* const products = output<float>(out, "out", left.rows() * width);
  if (depth == 0 && !add) std::fill_n(products, left.rows() * width, 0.0f);
  std::optional<ResidualFactors> residual_factors;
  const bool drops_second = panel_parts == 2 && parts == 1;  // for bfloat16 rows
  if (drops_second) residual_factors.emplace(rows, to_unit, depth, width);
  const PanelProduct product(left, width, parts, residual_factors, products, add);
  if (packed_by_caller) return product.multiply({0, depth}, packed_by_caller);
  together = std::max<int64_t>(std::min(together, depth), 1);
  const Scratch<uint16_t> packed(operand_elements(width, together, parts));
  for (int64_t first = 0; first < depth; first += together) {
    const int64_t last = std::min(first + together, depth);
    pack_right(rows.from_row(first), last - first, width, parts, packed);
    product.multiply({first, last}, packed);
  }
}

std::vector<Operator> operators() {
  return {
      OPERATOR(amx_name, "() -> str"),
      OPERATOR(amx_most_parts, "() -> int"),
      OPERATOR(amx_group, "() -> int"),
      OPERATOR(amx_norms, "(Tensor x, Tensor(inverse!) inverse, Tensor(powers!) powers, "
                          "Tensor(rest!) rest) -> ()"),
      OPERATOR(amx_pack, "(Tensor y, Tensor? powers, Tensor(packed!) packed) -> bool"),
      OPERATOR(amx_scores, "(Tensor x, Tensor? powers, Tensor? rest, Tensor packed, "
                           "Tensor? column_rest, Tensor(panel!) panel, bool add) -> bool"),
      OPERATOR(amx_right_size, "(int depth, int width, int parts) -> int"),
      OPERATOR(amx_pack_right, "(Tensor right, Tensor? powers, int parts, "
                               "Tensor(packed!) packed) -> ()"),
      OPERATOR(amx_multiply, "(Tensor panel, Tensor right, Tensor? powers, Tensor? kept, "
                             "Tensor? rest, Tensor? inverse, Tensor(out!) out, bool transposed, "
                             "bool add, int panel_parts, int parts, int together) -> ()"),
  };
}

}  // namespace

const AmxKernels* amx_kernels() {
  static const AmxKernels* chosen = choose();
  return chosen;
}

}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
