// Whether the processor's matrix unit may be used, and the products of amx.h as operators.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "amx.h"
#include "arguments.h"
#include "operators.h"
#include "passes.h"

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

const AmxKernels& amx_in_use() {
  const AmxKernels* found = amx_kernels();
  STD_TORCH_CHECK(found, "fastsim: no AMX here");
  return *found;
}

// Packs all strips of (a block of) a matrix, shared out over the threads.
bool pack_all(Pack form, const Packed& from, int64_t count, int64_t first, int64_t depth,
              int64_t parts, uint16_t* to) {
  std::atomic<bool> finite{true};
  over(2 * tiles(count, kTileGroup), kTileSide * depth * parts, [&](int64_t begin, int64_t end) {
    if (!amx_in_use().pack(form, from, count, first, depth, parts, to, {begin, end})) {
      finite = false;
    }
  });
  return finite;
}

int64_t operand_elements(int64_t count, int64_t depth, int64_t parts) {
  return 2 * tiles(count, kTileGroup) * parts * tiles(depth, kTileDepth) * kTileElements;
}

// Memory for the time of a call, its values undefined; a tile's rows are lines of the cache.
class Tiles {
 public:
  explicit Tiles(int64_t elements)
      : memory_(static_cast<uint16_t*>(std::aligned_alloc(64, elements * sizeof(uint16_t))),
                std::free) {
    STD_TORCH_CHECK(memory_ || elements == 0, "fastsim: out of memory");
  }
  uint16_t* data() { return memory_.get(); }

 private:
  std::unique_ptr<uint16_t, void (*)(void*)> memory_;
};

int64_t amx_group() { return kTileGroup; }  // rows and depth of operands are a multiple
static_assert(kTileGroup == kTileDepth);

std::string amx_name() { return amx_kernels() ? amx_kernels()->name : ""; }

int64_t check_parts(int64_t parts) {
  STD_TORCH_CHECK(parts >= 1 && parts <= 3, "fastsim: one to three parts");
  return parts;
}

// The matrix and, where they are given, the powers of two of its rows.
Packed packed_matrix(const Tensor& x, const Optional& powers) {
  const Dtype dtype = dtype_of(x);
  STD_TORCH_CHECK(x.stride(1) == 1 && (dtype == Dtype::float32 || dtype == Dtype::float16 ||
                                       dtype == Dtype::bfloat16),
                  "fastsim: row-major float32, float16 or bfloat16");
  return {matrix(x), input<float>(powers), nullptr};
}

// inverse, powers, rest (N,): see AmxKernels.
void amx_norms(Tensor x, Tensor inverse, Tensor powers, Tensor rest) {
  const Matrix rows = packed_matrix(x, {}).matrix;
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
  return pack_all(Pack::rows_transposed, packed_matrix(y, powers), y.size(0), 0, y.size(1), parts,
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
  Tiles rows(operand_elements(b.rows, width, parts));
  const bool finite =
      pack_all(Pack::rows, packed_matrix(x, powers), b.rows, 0, width, parts, rows.data());
  if (!finite && !rest) return false;
  const Operand left{rows.data(), parts, steps};
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

void amx_pack_right(Tensor right, Optional powers, bool transposed, int64_t parts, Tensor packed) {
  const int64_t depth = right.size(0), width = right.size(1);
  const int64_t full = operand_elements(width, kBlockDepth, check_parts(parts));
  STD_TORCH_CHECK(packed.numel() == operand_elements(width, depth, parts), "fastsim: packed");
  const Pack form = transposed ? Pack::pairs_transposed : Pack::pairs;
  const Packed from = packed_matrix(right, powers);
  uint16_t* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    pack_all(form, from, width, k, std::min(kBlockDepth, depth - k), parts,
             to + k / kBlockDepth * full);
  }
}

// out (+)= panel right, or with `transposed` panel^T right, for `right` of amx_pack_right whose
// rows still lack the factors `rest`.
void amx_multiply(Tensor panel, Tensor right, Optional rest, Tensor out, bool transposed, bool add,
                  int64_t panel_parts, int64_t parts) {
  Block<float> b{};
  take_panel(panel, b);
  check_parts(parts);
  check_parts(panel_parts);
  const int64_t width = out.size(1), depth = transposed ? b.rows : b.columns;
  const int64_t count = transposed ? b.columns : b.rows;
  STD_TORCH_CHECK(right.numel() == operand_elements(width, depth, parts) && out.size(0) == count,
                  "fastsim: operands that fit");
  const GradProduct product{b.scores, b.stride, count, depth, input<float>(rest), panel_parts,
                            static_cast<const uint16_t*>(right.const_data_ptr()), parts, width,
                            output<float>(out), add};
  const auto run = transposed ? amx_in_use().multiply_columns : amx_in_use().multiply_rows;
  const int64_t cost = kTileGroup * depth * width;
  torch::stable::parallel_for(0, tiles(count, kTileGroup), 1 + kProductGrain / (cost + 1),
                              [&](int64_t begin, int64_t end) { run(product, {begin, end}); });
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
      OPERATOR(amx_pack_right, "(Tensor right, Tensor? powers, bool transposed, int parts, "
                               "Tensor(packed!) packed) -> ()"),
      OPERATOR(amx_multiply, "(Tensor panel, Tensor right, Tensor? rest, Tensor(out!) out, "
                             "bool transposed, bool add, int panel_parts, int parts) -> ()"),
  };
}

}  // namespace

const AmxKernels* amx_kernels() {
  static const AmxKernels* chosen = choose();
  return chosen;
}

}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
