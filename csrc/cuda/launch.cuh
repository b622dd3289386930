// Launches of the tile kernels: the choice of the engine, its tensor maps and its grid. Every CUDA
// call is checked.
#pragma once

#include <type_traits>

#include "check.cuh"
#include "epilogues.cuh"
#include "hopper.cuh"
#include "portable.cuh"

namespace fastsim {

// ---- kernels ----

// Whether the portable engine has code for a product on the architecture that is compiled. On
// sm_90a the Hopper engine computes products of float16 operands, so the portable kernel has no
// code for them. If it is launched all the same (a library of several architectures may have code
// for 9.0 beside that for 9.0a), the kernel traps. Without the trap the outputs would keep their
// old contents.
#if defined(FASTSIM_HOPPER_CODE) && !defined(FASTSIM_EMULATED)
template <class Product>
constexpr bool kHasCode = !std::is_same_v<Product, portable::Half>;
#else
template <class Product>
constexpr bool kHasCode = true;
#endif

// The number of thread blocks that run on a multiprocessor at once. With the product in full
// float32 one thread block takes all registers of a multiprocessor.
template <class Product>
constexpr int kBlocks = std::is_same_v<Product, portable::Full> ? 1 : 2;

template <class Product, class Epilogue>
__global__ void __launch_bounds__(PortableShape::threads, kBlocks<Product>)
    portable_tiles(const __grid_constant__ Operands operands, const __grid_constant__ Grid grid,
                   const __grid_constant__ Panel panel, const __grid_constant__ Epilogue epilogue) {
  if constexpr (kHasCode<Product>) {
    portable::run<Product>(operands, grid, panel, epilogue);
  } else {
    trap();
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    hopper_tiles(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
                 const __grid_constant__ TensorMap panel, const __grid_constant__ Grid grid,
                 int steps, const __grid_constant__ Epilogue epilogue) {
#if defined(FASTSIM_HOPPER_CODE)
  hopper::run(x, y, panel, grid, steps, epilogue);
#else
  trap();
#endif
}

// ---- launches ----

template <class Product, class Epilogue>
void launch_portable(const Launch& l, const Epilogue& epilogue) {
  launch_kernel(
      portable_tiles<Product, Epilogue>,
      {blocks_for(l.grid.stack_count(1), 1), PortableShape::threads, portable::kSharedBytes},
      l.stream, l.operands, l.grid, l.panel, epilogue);
}

// The tensor map of a float16 matrix (rows, width) at `data`, whose rows are `row_bytes` apart. Its
// boxes are 128 bytes wide and `box_rows` high.
TensorMap tensor_map(const void* data, int64_t width, int64_t rows, int64_t row_bytes,
                     int box_rows);

// The number of multiprocessors of the current device.
int multiprocessors();

template <class Epilogue>
void launch_hopper(const Launch& l, const Epilogue& epilogue) {
  const Operands& o = l.operands;
  const Grid& g = l.grid;
  const int64_t width = o.row_bytes / 2;
  const TensorMap x = tensor_map(o.x, width, o.x_rows, o.row_bytes, hopper::kXBoxRows);
  const TensorMap y = tensor_map(o.y, width, o.y_rows, o.row_bytes, hopper::kYBoxRows);
  const TensorMap panel = l.panel.data
                              ? tensor_map(l.panel.data, g.column1 - g.column0, g.row1 - g.row0,
                                           2 * l.panel.stride, hopper::kPanelBoxRows)
                              : x;
  const int64_t stacks = g.stack_count(hopper::kCluster);
  const int64_t limit = multiprocessors() / hopper::kCluster;
  const unsigned clusters = static_cast<unsigned>(stacks < limit ? stacks : limit);
  launch_kernel(
      hopper_tiles<Epilogue>,
      {clusters * hopper::kCluster, hopper::kThreads, hopper::kSharedBytes, hopper::kCluster},
      l.stream, x, y, panel, g, static_cast<int>(o.row_bytes / hopper::kRowBytes), epilogue);
}

// Whether the current device runs the sm_90a code of the library.
bool on_hopper();

template <class Epilogue>
void launch_tiles(const Launch& l, const Epilogue& epilogue) {
  switch (l.operands.product) {
    case Product::full: return launch_portable<portable::Full>(l, epilogue);
    case Product::tf32: return launch_portable<portable::Tf32>(l, epilogue);
    case Product::half: break;
  }
  on_hopper() ? launch_hopper(l, epilogue) : launch_portable<portable::Half>(l, epilogue);
}

}  // namespace fastsim
