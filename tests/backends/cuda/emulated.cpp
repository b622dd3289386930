// The kernels of csrc/cuda on the host: see emulated.h. Built with csrc/cuda/ops.cpp into a
// library whose operators serve CPU tensors.
#include "emulated.h"

#include <ucontext.h>

#include <cstdlib>
#include <memory>

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

namespace emulated {

Thread* current = nullptr;

namespace {

constexpr size_t kStack = 256 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Thread thread;
  std::function<bool()> condition;
  bool done = false;
};

ucontext_t scheduler;
Fiber* running = nullptr;
const std::function<void()>* work = nullptr;
std::vector<std::unique_ptr<Fiber>> fibers;

void enter() {
  (*work)();
  running->done = true;
  swapcontext(&running->context, &scheduler);
}

void run_cluster(const std::vector<std::unique_ptr<Block>>& blocks, int threads, int count) {
  const size_t all = blocks.size() * threads;
  while (fibers.size() < all) fibers.push_back(std::make_unique<Fiber>());
  for (size_t i = 0; i < all; ++i) {
    Fiber& f = *fibers[i];
    f.thread = {blocks[i / threads].get(), static_cast<int>(i % threads), count, {}, {}};
    f.condition = nullptr;
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    makecontext(&f.context, enter, 0);
  }
  for (size_t left = all; left > 0;) {
    bool moved = false;
    for (size_t i = 0; i < all; ++i) {
      Fiber& f = *fibers[i];
      if (f.done || (f.condition && !f.condition())) continue;
      f.condition = nullptr;
      moved = true;
      running = &f;
      current = &f.thread;
      swapcontext(&scheduler, &f.context);
      left -= f.done;
    }
    if (!moved) throw std::runtime_error("emulated kernel: every thread waits");
  }
}

}  // namespace

void wait_until(const std::function<bool()>& condition) {
  if (condition()) return;
  running->condition = condition;
  swapcontext(&running->context, &scheduler);
}

void run(unsigned blocks, unsigned threads, unsigned shared, unsigned cluster,
         const std::function<void()>& body) {
  work = &body;
  for (unsigned first = 0; first < blocks; first += cluster) {
    Cluster group;
    group.threads = static_cast<int>(cluster * threads);
    std::vector<std::unique_ptr<Block>> members;
    for (unsigned rank = 0; rank < cluster; ++rank) {
      auto b = std::make_unique<Block>();
      b->storage.assign(shared + 1024, '\xff');  // NaN in every type
      b->memory = b->storage.data() + (1024 - reinterpret_cast<uintptr_t>(b->storage.data()) % 1024);
      b->warps.resize(threads / 32);
      b->cluster = &group;
      b->index = static_cast<int>(first + rank);
      b->rank = static_cast<int>(rank);
      b->threads = static_cast<int>(threads);
      group.blocks.push_back(b.get());
      members.push_back(std::move(b));
    }
    run_cluster(members, static_cast<int>(threads), static_cast<int>(blocks));
  }
}

}  // namespace emulated

// ---- what device.cu and scan.cu are on a GPU ----

OnDevice::OnDevice(int) : device_(0), before_(0) {}
OnDevice::~OnDevice() {}
int multiprocessors() { return 4; }
bool on_hopper() {
  const char* engine = std::getenv("FASTSIM_EMULATED_ENGINE");
  return engine && std::string(engine) == "hopper";
}
TensorMap tensor_map(const void* data, int64_t width, int64_t rows, int64_t row_bytes,
                     int box_rows) {
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
template void launch_tiles(const Launch&, const SigmoidBoth&);
template void launch_tiles(const Launch&, const SquaredErrorBoth&);
template void launch_tiles(const Launch&, const LevelsForward&);
template void launch_tiles(const Launch&, const LevelsScoreGrad&);
template void launch_tiles(const Launch&, const ClosestForward&);
template void launch_tiles(const Launch&, const Diagonal&);

}  // namespace fastsim
