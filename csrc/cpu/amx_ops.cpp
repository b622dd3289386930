// Whether the processor's matrix unit may be used, and the products of amx.h as operators.
#include <cstdlib>
#include <string>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
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
#endif
namespace amx_emulated {
extern const AmxKernels amx;
}

namespace {

#if defined(__x86_64__) && defined(__linux__)
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
  if (!(d & kBfloat16) || !(d & kTiles)) return false;
  // What the packing is compiled for.
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("fma")) {
    return false;
  }
  // Linux saves the tiles of a process that has asked it to: ARCH_REQ_XCOMP_PERM, state 18.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

// FASTSIM_AMX=0: not used; =emulated: the same code over functions in place of the instructions.
const AmxKernels* choose() {
  const char* asked = std::getenv("FASTSIM_AMX");
  const std::string wish = asked ? asked : "";
  if (wish == "0") return nullptr;
  if (wish == "emulated") return &amx_emulated::amx;
#if defined(__x86_64__) && defined(__linux__)
  if (std::string(kernels().name) == "avx512" && has_amx()) return &amx::amx;
#endif
  return nullptr;
}

int64_t amx_group() { return kTileGroup; }  // rows and depth of operands are a multiple
static_assert(kTileGroup == kTileDepth);

std::string amx_name() { return amx_kernels() ? amx_kernels()->name : ""; }

// inverse, powers, rest (N,): see AmxKernels.
void amx_norms(Tensor x, Tensor inverse, Tensor powers, Tensor rest) {
  const Matrix rows = packed_matrix(x).matrix;
  float *one = output<float>(inverse), *power = output<float>(powers), *left = output<float>(rest);
  over(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
    amx_in_use().norms(rows, x.size(1), one, power, left, {begin, end});
  });
}

// y (M, D) -> packed (M to the next 32, parts * D to the next 32) int16; false if not finite.
bool amx_pack(Tensor y, Optional powers, Tensor packed) {
  const int64_t depth = tiles(y.size(1), kTileDepth) * kTileDepth;
  const int64_t parts = depth ? check_parts(packed.size(1) / depth) : 1;
  STD_TORCH_CHECK(packed.size(0) == tiles(y.size(0), kTileGroup) * kTileGroup, "fastsim: packed");
  const Packed from = packed_matrix(y, input<float>(powers));
  return pack_all(Pack::rows_transposed, from, y.size(0), 0, y.size(1), parts,
                  static_cast<uint16_t*>(packed.mutable_data_ptr()));
}

// panel (+)= x y^T for the packed columns of y, times what is left of both norms; false, and
// nothing done, if x is float32 and not finite.
bool amx_scores(Tensor x, Optional powers, Optional rest, Tensor packed, Optional column_rest,
                Tensor panel, bool add) {
  Block<float> b{};
  take_panel(panel, b);
  const int64_t width = x.size(1), steps = tiles(width, kTileDepth);
  const int64_t parts = steps ? check_parts(packed.size(1) / (steps * kTileDepth)) : 1;
  const Scratch<uint16_t> rows(operand_elements(b.rows, width, parts));
  const Packed from = packed_matrix(x, input<float>(powers));
  const bool finite = pack_all(Pack::rows, from, b.rows, 0, width, parts, rows);
  if (!finite && !rest) return false;
  const Operand left{rows, parts, steps};
  const Operand right{static_cast<const uint16_t*>(packed.const_data_ptr()), parts, steps};
  const ScoreScales scales{input<float>(rest), input<float>(column_rest)};
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
  STD_TORCH_CHECK(packed.numel() == operand_elements(width, depth, check_parts(parts)),
                  "fastsim: packed");
  pack_right(packed_matrix(right, input<float>(powers)), depth, width, parts,
             static_cast<uint16_t*>(packed.mutable_data_ptr()));
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
constexpr int64_t kTogether = 8;

// out (+)= panel right, or with `transposed` panel^T right. right: (depth, D) rows times their
// powers of two, that lack the factors `rest`. kept: of amx_pack_right, or null to pack `together`
// of them at a time here, into memory that is used again.
void amx_multiply(Tensor panel, Tensor right, Optional powers, Optional kept, Optional rest,
                  Tensor out, bool transposed, bool add, int64_t panel_parts, int64_t parts,
                  int64_t together) {
  Block<float> b{};
  take_panel(panel, b);
  check_parts(panel_parts);
  check_parts(parts);
  const int64_t width = out.size(1), depth = transposed ? b.rows : b.columns;
  const int64_t count = transposed ? b.columns : b.rows;
  STD_TORCH_CHECK(right.size(0) == depth && right.size(1) == width && out.size(0) == count &&
                      (!kept || kept->numel() == operand_elements(width, depth, parts)),
                  "fastsim: operands that fit");
  const Packed all_rows = packed_matrix(right, input<float>(powers));
  const float* const factors = input<float>(rest);
  float* const sums = output<float>(out);
  const AmxKernels& amx = amx_in_use();
  // With rows [first, last) of the right operand, packed.
  const auto multiply = [&](int64_t first, int64_t last, const uint16_t* packed) {
    const auto run = [&](int64_t begin, int64_t end) {
      const Scratch<uint16_t> left(
          operand_elements(kTogether * kTileGroup, kBlockDepth, panel_parts));
      for (int64_t group = begin; group < end; group += kTogether) {
        const int64_t row = group * kTileGroup, groups = std::min(kTogether, end - group);
        const int64_t rows = std::min(groups * kTileGroup, count - row);
        const Packed from = score_grads(b, factors, transposed, row);
        const uint16_t* part = packed;
        for (int64_t k = first; k < last; k += kBlockDepth) {
          const int64_t deep = std::min(kBlockDepth, last - k), steps = tiles(deep, kTileDepth);
          amx.pack(transposed ? Pack::pairs_transposed : Pack::rows, from, rows, k, deep,
                   panel_parts, left, {0, 2 * groups});
          amx.multiply({left, panel_parts, steps}, rows, {part, parts, steps}, width,
                       sums + row * width, add || k > 0, false);
          part += operand_elements(width, deep, parts);
        }
      }
    };
    const int64_t cost = kTileGroup * (last - first) * width;
    torch::stable::parallel_for(0, tiles(count, kTileGroup), 1 + kProductGrain / (cost + 1), run);
  };
  if (kept) return multiply(0, depth, static_cast<const uint16_t*>(kept->const_data_ptr()));
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
                             "Tensor? rest, Tensor(out!) out, bool transposed, bool add, "
                             "int panel_parts, int parts, int together) -> ()"),
  };
}

}  // namespace

const AmxKernels* amx_kernels() {
  static const AmxKernels* chosen = choose();
  return chosen;
}

}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
