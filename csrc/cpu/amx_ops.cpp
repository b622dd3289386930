// Which products of bfloat16 operands the processor has, and those of amx.h as operators.
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
// All that amx.cpp is compiled for but the tiles.
bool has_dots() {
  unsigned a, b, c, d;
  if (std::string(kernels().name) != "avx512" || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    return false;
  }
  constexpr unsigned kBfloat16 = 1u << 5;
  return a & kBfloat16;
}

// Others make fewer products of pairs than of float32 numbers (Intel), or are not known to.
bool has_fast_dots() { return __builtin_cpu_is("amd") && has_dots(); }

bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!has_dots() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
  if (!(d & kBfloat16) || !(d & kTiles)) return false;
  // Linux saves the tiles of a process that has asked it to: ARCH_REQ_XCOMP_PERM, state 18.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

// FASTSIM_AMX=0: none; =emulated: functions in the place of AMX; =avx512_bf16: these even where they
// or AMX are faster.
const AmxKernels* choose() {
  const char* asked = std::getenv("FASTSIM_AMX");
  const std::string wish = asked ? asked : "";
  if (wish == "0") return nullptr;
  if (wish == "emulated") return &amx_emulated::amx;
#if defined(__x86_64__)
  if (wish == "avx512_bf16" && has_dots()) return &avx512_bf16::amx;
#endif
  STD_TORCH_CHECK(wish.empty(), "FASTSIM_AMX: wanted 0, emulated or, where the processor has it, "
                                "avx512_bf16, got ", wish);
#if defined(__x86_64__)
  if (has_amx()) return &amx::amx;
  if (has_fast_dots()) return &avx512_bf16::amx;
#endif
  return nullptr;
}

int64_t amx_group() { return kTileGroup; }  // rows and depth of operands are a multiple
static_assert(kTileGroup == kTileDepth);

std::string amx_name() { return amx_kernels() ? amx_kernels()->name : ""; }
int64_t amx_most_parts() { return amx_kernels() ? amx_kernels()->most_parts : 0; }

// inverse, powers, rest (N,): see AmxKernels.
void amx_norms(Tensor x, Tensor inverse, Tensor powers, Tensor rest) {
  const Matrix rows = packed_matrix(x).matrix;
  const int64_t count = x.size(0), width = x.size(1);
  float* const one = output<float>(inverse, "inverse", count);
  float* const power = output<float>(powers, "powers", count);
  float* const left = output<float>(rest, "rest", count);
  over(count, width, [&](int64_t begin, int64_t end) {
    amx_in_use().norms(rows, width, one, power, left, {begin, end});
  });
}

// y (M, D) -> packed (M to the next 32, parts * D to the next 32) int16; false if not finite.
bool amx_pack(Tensor y, Optional powers, Tensor packed) {
  const int64_t count = y.size(0), width = y.size(1);
  const int64_t depth = tiles(width, kTileDepth) * kTileDepth;
  const int64_t parts = depth ? check_parts(packed.size(1) / depth) : 1;
  uint16_t* const to = output<uint16_t>(packed, "packed", operand_elements(count, width, parts));
  const Packed from = packed_matrix(y, input<float>(powers, "powers", count));
  return pack_all(Pack::rows_transposed, from, count, 0, width, parts, to);
}

// panel (+)= x y^T for the packed columns of y, times the rests of both; false, and nothing done,
// if x is float32 and not finite.
bool amx_scores(Tensor x, Optional powers, Optional rest, Tensor packed, Optional column_rest,
                Tensor panel, bool add) {
  Block<float> b{};
  take_panel(panel, b);
  const int64_t width = x.size(1), steps = tiles(width, kTileDepth);
  const int64_t parts = steps ? check_parts(packed.size(1) / (steps * kTileDepth)) : 1;
  const int64_t packed_size = operand_elements(b.columns, width, parts);
  const uint16_t* const columns = input_of_most<uint16_t>(packed, "packed", packed_size);
  STD_TORCH_CHECK(bool(rest) == bool(column_rest),
                  "fastsim: rest, column_rest: wanted both or neither");
  const ScoreScales scales{
      input<float>(rest, "rest", b.rows),
      column_rest ? input_of_most<float>(*column_rest, "column_rest", b.columns) : nullptr};
  check_matrix(x, "x", b.rows, width);
  const Packed from = packed_matrix(x, input<float>(powers, "powers", b.rows));
  const Scratch<uint16_t> rows(operand_elements(b.rows, width, parts));
  const bool finite = pack_all(Pack::rows, from, b.rows, 0, width, parts, rows);
  if (!finite && !rest) return false;
  const Operand left{rows, parts, steps};
  const Operand right{columns, parts, steps};
  const int64_t cost = kTileGroup * b.rows * width;
  torch::stable::parallel_for(
      0, tiles(b.columns, kTileGroup), 1 + kProductGrain / (cost + 1),
      [&](int64_t begin, int64_t end) {
        amx_in_use().scores(left, b.rows, right, b.columns, bool(rest), scales, b.scores, b.stride,
                            add, {begin, end});
      });
  return true;
}

// int16 elements of `right` (depth, width) packed for amx_multiply.
int64_t amx_right_size(int64_t depth, int64_t width, int64_t parts) {
  return operand_elements(width, depth, check_parts(parts));
}

void amx_pack_right(Tensor right, Optional powers, int64_t parts, Tensor packed) {
  const int64_t depth = right.size(0), width = right.size(1);
  uint16_t* const to =
      output<uint16_t>(packed, "packed", operand_elements(width, depth, check_parts(parts)));
  pack_right(packed_matrix(right, input<float>(powers, "powers", depth)), depth, width, parts, to);
}

// The score gradients of a block as a left operand: of its rows from `first` on, or transposed of
// its columns. factors: of the columns, or transposed of the rows; null for 1.
Packed score_grads(const Block<float>& b, const float* factors, bool transposed, int64_t first) {
  const float* from = b.scores + (transposed ? first : first * b.stride);
  return {{from, Dtype::float32, b.stride, 1}, transposed ? factors : nullptr,
          transposed ? nullptr : factors};
}

// Groups of rows of the result whose left operand is packed at once: of a transposed panel they are
// next to each other in its rows, which lie far apart.
constexpr int64_t kGroupsAtOnce = 8;

// Which squares of a block of score gradients, left operands of bfloat16 rows, need their second
// part: those with an entry that is no small share of the largest in their rows of the result. What
// is left out is less than 2^-9 of the small ones, which the rounding of the result exceeds.
class SecondParts {
 public:
  // The block has `rows` rows of the result and this depth.
  SecondParts(const Matrix& from, int64_t rows, int64_t depth, bool transposed)
      : steps_(tiles(depth, kTileDepth)), groups_(tiles(rows, kTileGroup)), transposed_(transposed),
        squares_(steps_ * groups_), needed_(steps_ * groups_) {
    transposed ? amx_in_use().largest_of_squares(from, depth, rows, squares_)
               : amx_in_use().largest_of_squares(from, rows, depth, squares_);
    for (int64_t group = 0; group < groups_; ++group) {
      float most = 0;
      for (int64_t step = 0; step < steps_; ++step) most = std::max(most, squares_[at(group, step)]);
      for (int64_t step = 0; step < steps_; ++step) {
        needed_[at(group, step)] = squares_[at(group, step)] > kSmallShare * most;
      }
    }
  }

  // The operand of these score gradients, of so many steps from `first` on.
  Operand operand(const uint16_t* packed, int64_t parts, int64_t first, int64_t steps) const {
    return {packed, parts, steps, needed_ + at(0, first), at(1, 0), at(0, 1)};
  }

 private:
  int64_t at(int64_t group, int64_t step) const {
    return transposed_ ? step * groups_ + group : group * steps_ + step;
  }

  const int64_t steps_, groups_;
  const bool transposed_;
  const Scratch<float> squares_;
  const Scratch<bool> needed_;
};

// to (rows, width) += residuals (rows,) times the mean row (width,).
void add_products(const float* residuals, const float* mean, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; ++i, to += width) {
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] += residuals[i] * mean[k];
  }
}

// out (+)= panel right, or with `transposed` panel^T right. right: (depth, D) rows with their
// powers and rests. kept: of amx_pack_right, or null to pack `together` of them, a multiple of
// kTileGroup, at a time here, into memory that is used again. inverse: what makes unit rows of
// (power x), or null where they are; read where some second parts of the panel are left out.
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
  const Packed all_rows = packed_matrix(right, input<float>(powers, "powers", depth));
  const uint16_t* const of_caller =
      input<uint16_t>(kept, "kept", operand_elements(width, depth, parts));
  const float* const factors = input<float>(rest, "rest", depth);
  const float* const to_unit = input<float>(inverse, "inverse", depth);
  float* const products = output<float>(out, "out", count * width);
  if (depth == 0 && !add) std::fill_n(products, count * width, 0.0f);
  const bool in_part = panel_parts == 2 && parts == 1;  // of bfloat16 rows
  const Scratch<float> norms(in_part ? padded(depth) : 0), mean(in_part ? width : 0);
  if (in_part) {
    norms_of_operand(to_unit, depth, norms);
    mean_row(all_rows, to_unit, depth, width, mean);
  }
  const AmxKernels& amx = amx_in_use();
  // With rows [first, last) of the right operand, packed.
  const auto multiply = [&](int64_t first, int64_t last, const uint16_t* packed) {
    const auto run = [&](int64_t begin, int64_t end) {
      const Scratch<uint16_t> left(
          operand_elements(kGroupsAtOnce * kTileGroup, kBlockDepth, panel_parts));
      for (int64_t group = begin; group < end; group += kGroupsAtOnce) {
        const int64_t row = group * kTileGroup, groups = std::min(kGroupsAtOnce, end - group);
        const int64_t rows = std::min(groups * kTileGroup, count - row);
        const Packed from = score_grads(b, factors, transposed, row);
        const uint16_t* part = packed;
        std::optional<SecondParts> second;
        float residuals[kGroupsAtOnce * kTileGroup] = {};
        if (in_part) {
          const Matrix& grads = from.matrix;
          second.emplace(transposed ? grads.from_row(first) : grads.from_column(first), rows,
                         last - first, transposed);
        }
        for (int64_t k = first; k < last; k += kBlockDepth) {
          const int64_t deep = std::min(kBlockDepth, last - k), steps = tiles(deep, kTileDepth);
          amx.pack(transposed ? Pack::pairs_transposed : Pack::rows, from, rows, k, deep,
                   panel_parts, left, {0, 2 * groups});
          const Operand of_panel = second ? second->operand(left, panel_parts,
                                                            (k - first) / kTileDepth, steps)
                                          : Operand{left, panel_parts, steps};
          amx.multiply(of_panel, rows, {part, parts, steps}, width, products + row * width,
                       add || k > 0, false, {0, tiles(width, kTileGroup)});
          if (in_part) amx.add_left_out(of_panel, rows, norms + k, residuals);
          part += operand_elements(width, deep, parts);
        }
        if (in_part) add_products(residuals, mean, rows, width, products + row * width);
      }
    };
    const int64_t cost = kTileGroup * (last - first) * width;
    torch::stable::parallel_for(0, tiles(count, kTileGroup), 1 + kProductGrain / (cost + 1), run);
  };
  if (of_caller) return multiply(0, depth, of_caller);
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
