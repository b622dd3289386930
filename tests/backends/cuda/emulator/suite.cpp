// Runs the tiles of an engine in several orders and prints what came out: one line an order, a
// hash of all outputs or an error. Nothing but the kernels and the emulator, so that each of many
// mutants is quick to build. Arguments: the line that is wanted, then the orders; without one,
// lines are printed, else the program returns 0 at the first line that differs from it.
// FASTSIM_MUTANT is the number of the mutant to show, of a program that has several.
// SUITE_PART: which of two halves of the epilogues; most mutants show in the first, which is built
// in half the time.
#include "emulated.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace fastsim {
namespace emulated {
int mutated = -1;  // the number of a mutant, of those that this program has
}  // namespace emulated
}  // namespace fastsim

#include "epilogues.cuh"
#include "hopper.cuh"
#include "portable.cuh"

using namespace fastsim;

namespace {

// More steps than stages; on sm_90 four tiles for each block of a cluster. Ragged. The last step of
// the other engine is in the stage whose place its scratch memory takes.
#if defined(SUITE_HOPPER)
constexpr int kColumns = 470, kRowBytes = hopper::kRowBytes, kSteps = 5;
#else
constexpr int kColumns = 200, kRowBytes = portable::kRowBytes, kSteps = 6;
#endif
constexpr int kRows = 150, kLevels = 2;
constexpr int kDepth = (kSteps * kRowBytes + 127) / 128 * 64;  // whole lines
constexpr Grid kGrid{0, kRows, 0, kColumns, 2, (kColumns + kTile - 1) / kTile, false, false};

std::vector<__half> halves(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<__half> made(count);
  for (__half& value : made) value = __float2half_rn((random() % 257 - 128.0f) / 1024);
  return made;
}
std::vector<int64_t> integers(int count, int below, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> made(count);
  for (int64_t& value : made) value = random() % below;
  return made;
}

struct Inputs {
  std::vector<__half> x = halves(kRows * kDepth, 1), y = halves(kColumns * kDepth, 2);
  std::vector<int64_t> row_ids = integers(kRows, 9, 3), column_ids = integers(kColumns, 9, 4);
  std::vector<int64_t> positives = integers(kRows, kColumns, 5);
  std::vector<int64_t> row_groups = integers(kRows, 3, 7), column_groups = integers(kColumns, 3, 8);
  std::vector<__half> dense = halves(kRows * kColumns, 6);
  std::vector<float> numbers = std::vector<float>(kColumns, 0.5f);
  float scale = 3.0f, bias = -1.0f, levels[kLevels] = {1.0f, -1.0f};
};

struct Outputs {
  static constexpr int kStride = (kColumns + 7) / 8 * 8;
  std::vector<__half> panel = std::vector<__half>(kRows * kStride);
  std::vector<float> rows[2], columns[2], partials;
  std::vector<float> positive = std::vector<float>(kRows);

  Outputs() : partials(2 * 4 * 4 * kLevels) {
    for (auto& part : rows) part.resize(4 * kRows);
    for (auto& part : columns) part.resize(2 * kColumns);
  }
  template <class T>
  static void add(uint64_t& hash, const std::vector<T>& part) {
    const char* bytes = reinterpret_cast<const char*>(part.data());
    for (size_t i = 0; i < part.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  }
  uint64_t hash() const {
    uint64_t hash = 14695981039346656037u;
    add(hash, panel);
    for (const auto& part : rows) add(hash, part);
    for (const auto& part : columns) add(hash, part);
    add(hash, partials);
    add(hash, positive);
    return hash;
  }
};

template <class Epilogue>
void launch(const Inputs& in, Outputs& out, const Epilogue& epilogue) {
#if defined(SUITE_HOPPER)
  const auto map = [](const std::vector<__half>& data, int width, int rows, int stride, int box) {
    const void* bytes = data.data();
    return TensorMap{static_cast<char*>(const_cast<void*>(bytes)), width, rows, 2 * stride, box};
  };
  const TensorMap x = map(in.x, kDepth, kRows, kDepth, hopper::kXBoxRows);
  const TensorMap y = map(in.y, kDepth, kColumns, kDepth, hopper::kYBoxRows);
  const TensorMap panel = map(out.panel, kColumns, kRows, Outputs::kStride, hopper::kPanelBoxRows);
  emulated::run(hopper::kCluster, hopper::kThreads, hopper::kSharedBytes, hopper::kCluster,
                [&] { hopper::run(x, y, panel, kGrid, kSteps, epilogue); });
#else
  const Operands operands{in.x.data(), in.y.data(), kRows, kColumns, 2 * kDepth, Product::half};
  const Panel panel{out.panel.data(), Outputs::kStride};
  emulated::run(static_cast<unsigned>(kGrid.stack_count(1)), PortableShape::threads,
                portable::kSharedBytes, 1,
                [&] { portable::run<portable::Half>(operands, kGrid, panel, epilogue); });
#endif
}

uint64_t everything() {
  Inputs in;
  const int64_t *ids = in.row_ids.data(), *column_ids = in.column_ids.data();
  const Matrix dense{in.dense.data(), Dtype::float16, kColumns, 1};
  const float* n = in.numbers.data();
  uint64_t hash = 0;
  const auto with = [&](const Pairs& pairs, const auto& make) {
    Outputs out;
    launch(in, out, make(pairs, out));
    hash = (hash ^ out.hash()) * 1099511628211u;
  };
  const Pairs one{in.positives.data(), ids, column_ids, nullptr, nullptr, {}, -1.0f, Skip::nothing};
  const Pairs targets{nullptr, nullptr, nullptr, nullptr, nullptr, dense, -1.0f, Skip::diagonal};
  const Pairs groups{in.positives.data(),     ids, column_ids, in.row_groups.data(),
                     in.column_groups.data(), {},  -1.0f,      Skip::lower};
#if SUITE_PART == 0
  with(targets, [&](const Pairs& p, Outputs& o) {
    return SigmoidPass{p, &in.scale, &in.bias, n, o.rows[0].data(), o.rows[1].data()};
  });
  with(targets, [&](const Pairs& p, Outputs&) {
    return SigmoidPass{p, &in.scale, &in.bias, n, nullptr, nullptr};
  });
  with(one, [&](const Pairs& p, Outputs& o) {
    return SoftmaxForward{p, &in.scale, 0.1f, o.rows[0].data(), o.rows[1].data(),
                          o.positive.data(), nullptr, nullptr, o.columns[0].data(),
                          o.columns[1].data()};
  });
#else
  with(one, [&](const Pairs& p, Outputs&) {
    return SoftmaxScoreGrad{p, &in.scale, 0.1f, n, n, n, n, n};
  });
  with(groups, [&](const Pairs& p, Outputs& o) {
    return LevelsForward{p, &in.scale, in.levels, kLevels, o.partials.data()};
  });
#endif
  return hash;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string wanted = arguments[1];
  if (const char* number = std::getenv("FASTSIM_MUTANT")) emulated::mutated = std::atoi(number);
  for (int i = 2; i < count; ++i) {
    setenv("FASTSIM_EMULATED_ORDER", arguments[i], 1);
    std::string line;
    try {
      line = std::to_string(everything());
    } catch (const std::exception& error) {
      line = error.what();
    }
    if (wanted.empty()) {
      std::printf("%s\n", line.c_str());
    } else if (line != wanted) {
      std::printf("order %s: %s\n", arguments[i], line.c_str());
      return 0;
    }
  }
  return wanted.empty() ? 0 : 1;
}
