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

// The score gradients of a block, to be packed as a left operand: the rows from `first` on, or with
// `transposed` the columns from `first` on. factors: scales of the columns, or with `transposed` of
// the rows; null: 1.
ScaledMatrix score_grads(const Block<float>& b, const float* factors, bool transposed,
                         int64_t first) {
  const float* from = b.scores + (transposed ? first : first * b.stride);
  return {{from, Dtype::float32, b.stride, 1}, transposed ? factors : nullptr,
          transposed ? nullptr : factors};
}

// The groups of rows of the result whose left operand is packed at once. In a transposed panel
// these groups are next to each other in each row, while its rows lie far apart.
constexpr int64_t kGroupsAtOnce = 8;

// Decides which squares of score gradients, which multiply bfloat16 rows, need their second part:
// those with an entry larger than kSmallShare of the largest in their group of rows of the result.
// The other second parts are less than 2^-9 of these small entries, and less than the rounding
// error of the result.
class SecondParts {
 public:
  // from: the score gradients (rows, depth), or (depth, rows) with `transposed`. rows: of the
  // result.
  SecondParts(const Matrix& from, int64_t rows, int64_t depth, bool transposed)
      : steps_(ceil_div(depth, kTileDepth)), groups_(ceil_div(rows, kTileGroup)),
        transposed_(transposed), largest_(steps_ * groups_), needed_(steps_ * groups_) {
    transposed ? amx_in_use().largest_of_squares(from, depth, rows, largest_)
               : amx_in_use().largest_of_squares(from, rows, depth, largest_);
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

  // The packed score gradients as an operand of so many steps, from step `first` on.
  Operand operand(const uint16_t* packed, int64_t parts, int64_t first, int64_t steps) const {
    return {packed, parts, steps, needed_ + square(0, first), square(1, 0), square(0, 1)};
  }

 private:
  // The index of a square.
  int64_t square(int64_t group, int64_t step) const {
    return transposed_ ? step * groups_ + group : group * steps_ + step;
  }

  const int64_t steps_, groups_;
  const bool transposed_;
  const Scratch<float> largest_;  // the largest absolute value in each square
  const Scratch<bool> needed_;    // whether its second part is needed
};

// to (rows, width) += residuals (rows,) times the mean row (width,).
void add_residuals(const float* residuals, const float* mean, int64_t rows, int64_t width,
                   float* to) {
  for (int64_t i = 0; i < rows; ++i, to += width) {
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] += residuals[i] * mean[k];
  }
}

// out = panel right, or with `transposed` panel^T right; += with `add`. right: (depth, D) rows,
// with their powers and rests. kept: `right` packed by amx_pack_right; None: `together` rows of it,
// a multiple of kTileGroup, are packed here at a time, into memory that is used again. inverse
// (depth,): the factors from power x to unit rows, None if these are unit rows; it is read if
// second parts of the panel may be dropped.
void amx_multiply(Tensor panel, Tensor right, Optional powers, Optional kept, Optional rest,
                  Optional inverse, Tensor out, bool transposed, bool add, int64_t panel_parts,
                  int64_t parts, int64_t together) {
  Block<float> b{};
  take_panel(panel, b);
  check_parts(panel_parts);
  check_parts(parts);
  STD_TORCH_CHECK(together > 0 && together % kTileGroup == 0,
                  "fastsim: together: wanted a multiple of ", kTileGroup, ", got ", together);
  const int64_t width = out.size(1), depth = transposed ? b.rows : b.columns;
  const int64_t count = transposed ? b.columns : b.rows;
  check_matrix(right, "right", depth, width);
  const ScaledMatrix all_rows = scaled_matrix(right, input<float>(powers, "powers", depth));
  const uint16_t* const packed_by_caller =
      input<uint16_t>(kept, "kept", operand_elements(width, depth, parts));
  const float* const factors = input<float>(rest, "rest", depth);
  const float* const to_unit = input<float>(inverse, "inverse", depth);
  float* const products = output<float>(out, "out", count * width);
  if (depth == 0 && !add) std::fill_n(products, count * width, 0.0f);
  const bool drops_second = panel_parts == 2 && parts == 1;  // for bfloat16 rows
  const Scratch<float> norms(drops_second ? padded(depth) : 0), mean(drops_second ? width : 0);
  if (drops_second) {
    norms_of_operand(to_unit, depth, norms);
    mean_row(all_rows, to_unit, depth, width, mean);
  }
  const AmxKernels& amx = amx_in_use();
  // Multiplies by rows [first, last) of the right operand, which are packed.
  const auto multiply = [&](int64_t first, int64_t last, const uint16_t* packed) {
    const auto run = [&](int64_t begin, int64_t end) {
      const Scratch<uint16_t> left(
          operand_elements(kGroupsAtOnce * kTileGroup, kBlockDepth, panel_parts));
      for (int64_t group = begin; group < end; group += kGroupsAtOnce) {
        const int64_t row = group * kTileGroup, groups = std::min(kGroupsAtOnce, end - group);
        const int64_t rows = std::min(groups * kTileGroup, count - row);
        const ScaledMatrix from = score_grads(b, factors, transposed, row);
        const uint16_t* right_tiles = packed;
        std::optional<SecondParts> second_parts;
        float residuals[kGroupsAtOnce * kTileGroup] = {};
        if (drops_second) {
          const Matrix& grads = from.matrix;
          second_parts.emplace(transposed ? grads.from_row(first) : grads.from_column(first),
                               rows, last - first, transposed);
        }
        for (int64_t k = first; k < last; k += kBlockDepth) {
          const int64_t block_depth = std::min(kBlockDepth, last - k);
          const int64_t steps = ceil_div(block_depth, kTileDepth);
          amx.pack(transposed ? TileLayout::row_pairs_transposed : TileLayout::rows, from, rows, k,
                   block_depth, panel_parts, left, {0, 2 * groups});
          const Operand panel_operand =
              second_parts
                  ? second_parts->operand(left, panel_parts, (k - first) / kTileDepth, steps)
                  : Operand{left, panel_parts, steps};
          amx.multiply(panel_operand, rows, {right_tiles, parts, steps}, width,
                       products + row * width, add || k > 0, false,
                       {0, ceil_div(width, kTileGroup)});
          if (drops_second) amx.add_dropped(panel_operand, rows, norms + k, residuals);
          right_tiles += operand_elements(width, block_depth, parts);
        }
        if (drops_second) add_residuals(residuals, mean, rows, width, products + row * width);
      }
    };
    const int64_t cost = kTileGroup * (last - first) * width;
    torch::stable::parallel_for(0, ceil_div(count, kTileGroup), 1 + kProductGrain / (cost + 1),
                                run);
  };
  if (packed_by_caller) return multiply(0, depth, packed_by_caller);
  together = std::max<int64_t>(std::min(together, depth), 1);
  const Scratch<uint16_t> packed(operand_elements(width, together, parts));
  for (int64_t first = 0; first < depth; first += together) {
    const int64_t last = std::min(first + together, depth);
    pack_right(all_rows.from_row(first), last - first, width, parts, packed);
    multiply(first, last, packed);
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
