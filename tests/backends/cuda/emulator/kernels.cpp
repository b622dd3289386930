// The kernels of csrc/cuda on the host: see emulated.h. Built with csrc/cuda/ops.cpp into a
// library whose operators serve CPU tensors.
#include "emulated.h"

#include <cstdlib>

#include "check.cuh"

namespace fastsim {

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Shape& shape, void*,
                   Arguments... arguments) {
  emulated::run(shape.blocks, shape.threads, shape.shared, shape.cluster,
                [&] { kernel(static_cast<Parameters>(arguments)...); });
}

}  // namespace fastsim

#include "launch.cuh"
#include "rows.cu"

namespace fastsim {

// ---- what device.cu and scan.cu are on a GPU ----

DeviceGuard::DeviceGuard(int) : device_(0), previous_(0) {}
DeviceGuard::~DeviceGuard() {}
int multiprocessors() { return 4; }
bool on_hopper() {
  const char* engine = std::getenv("FASTSIM_EMULATED_ENGINE");
  return engine && std::string(engine) == "hopper";
}
TensorMap tensor_map(const void* data, int64_t width, int64_t rows, int64_t row_bytes,
                     int box_rows) {
  if (reinterpret_cast<uintptr_t>(data) % 16 || row_bytes % 16 || box_rows > 256) {
    emulated::fail("a matrix that no tensor map describes");
  }
  return {static_cast<char*>(const_cast<void*>(data)), width, rows, row_bytes, box_rows};
}

int64_t scan_parts(int64_t) { return 1; }
void launch_scan(const float* logits, int64_t count, double*, double* out, void*) {
  double forward = -INFINITY, backward = -INFINITY;
  const auto add = [](double a, double b) {
    const double most = std::fmax(a, b);
    return most == -INFINITY ? most : most + std::log(std::exp(a - most) + std::exp(b - most));
  };
  for (int64_t i = 0; i < count; ++i) out[i] = forward = add(forward, logits[i]);
  for (int64_t i = count; i-- > 0;) out[count + i] = backward = add(backward, -logits[i]);
}

template void launch_tiles(const Launch&, const SoftmaxForward&);
template void launch_tiles(const Launch&, const SoftmaxScoreGrad&);
template void launch_tiles(const Launch&, const SigmoidPass&);
template void launch_tiles(const Launch&, const SquaredErrorPass&);
template void launch_tiles(const Launch&, const LevelsForward&);
template void launch_tiles(const Launch&, const LevelsScoreGrad&);
template void launch_tiles(const Launch&, const ClosestForward&);
template void launch_tiles(const Launch&, const Diagonal&);

}  // namespace fastsim
