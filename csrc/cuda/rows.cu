// Unit rows and the gradient through them, with one warp for each row; the merge of partial sums of
// exponentials.
#include <cfloat>
#include <type_traits>

#include "check.cuh"
#include "epilogue.h"
#include "instructions.cuh"

namespace fastsim {

namespace {

constexpr int kBlockRows = 4;  // rows of a thread block
constexpr int kMergeThreads = 128;

FASTSIM_DEVICE float to_float(float x) { return x; }
FASTSIM_DEVICE float to_float(__half x) { return __half2float(x); }
FASTSIM_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

FASTSIM_DEVICE void write(__half* to, float x, bool) { *to = __float2half_rn(x); }
FASTSIM_DEVICE void write(__nv_bfloat16* to, float x, bool) { *to = __float2bfloat16_rn(x); }
FASTSIM_DEVICE void write(float* to, float x, bool tf32) { *to = tf32 ? round_to_tf32(x) : x; }

// The sum of x over the lanes of a warp, in every lane. The order of the sum is the same in every
// lane, so all lanes have the same bits.
FASTSIM_DEVICE double sum_of_lanes(double x) {
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) x += lane_exchange(x, mask);
  return x;
}

// A row of the caller's matrix, read in the matrix's dtype.
template <class In>
struct Row {
  const In* data;
  int64_t stride;
  FASTSIM_DEVICE float operator()(int64_t k) const { return to_float(data[k * stride]); }
};

template <class In>
FASTSIM_DEVICE Row<In> row_of(const Matrix& x, int64_t row) {
  return {static_cast<const In*>(x.data) + row * x.row_stride, x.column_stride};
}

template <class In, class Out>
__global__ void __launch_bounds__(kBlockRows* kWarp)
    unit_rows_kernel(Matrix x, int64_t rows, int64_t depth, Out* unit, int64_t width,
                     float* inverse, bool tf32) {
  const int64_t row = int64_t{block_index()} * kBlockRows + thread_index() / kWarp;
  const int lane = thread_index() % kWarp;
  if (row >= rows) return;
  const Row<In> source = row_of<In>(x, row);
  float factor = 1.0f;
  if (inverse) {
    // In float64, because the squares of float32 numbers exceed the range of float32.
    double square_sum = 0.0;
    for (int64_t k = lane; k < depth; k += kWarp) {
      const double value = source(k);
      square_sum = fused(value, value, square_sum);
    }
    const double norm = sqrt(sum_of_lanes(square_sum));
    factor = norm < static_cast<double>(FLT_MIN) ? 0.0f : static_cast<float>(1.0 / norm);
    if (lane == 0) inverse[row] = factor;
  }
  Out* out = unit + row * width;
  for (int64_t k = lane; k < width; k += kWarp) {
    write(out + k, k < depth ? source(k) * factor : 0.0f, tf32);
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kBlockRows* kWarp)
    unit_rows_backward_kernel(const float* grad_unit, Matrix x, int64_t rows, int64_t depth,
                              const float* inverse, const float* factor, Out* grad, float* dots) {
  const int64_t row = int64_t{block_index()} * kBlockRows + thread_index() / kWarp;
  const int lane = thread_index() % kWarp;
  if (row >= rows) return;
  const Row<In> source = row_of<In>(x, row);
  const float* g = grad_unit + row * depth;
  const float r = inverse[row];
  double dot = 0.0;
  for (int64_t k = lane; k < depth; k += kWarp) {
    dot = fused(static_cast<double>(source(k)), static_cast<double>(g[k]), dot);
  }
  const float unit_dot = static_cast<float>(sum_of_lanes(dot) * r);
  if (lane == 0) dots[row] = unit_dot;
  const float row_factor = *factor * r, unit_factor = unit_dot * r;
  for (int64_t k = lane; k < depth; k += kWarp) {
    write(grad + row * depth + k, row_factor * (g[k] - unit_factor * source(k)), false);
  }
}

__global__ void merge_kernel(const float* tops, const float* sums, int64_t tiles, int64_t count,
                             const float* scale, bool accumulate, float* top, float* sum) {
  const int64_t index = int64_t{block_index()} * kMergeThreads + thread_index();
  if (index >= count) return;
  const Softmax<float> softmax{*scale};
  float maximum = accumulate ? top[index] : kLeftOut<float>;
  double total = accumulate ? sum[index] : 0.0f;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const float tile_top = tops[tile * count + index];
    const float merged_top = fmaxf(maximum, tile_top);
    total = total * softmax.share(maximum, merged_top) +
            static_cast<double>(sums[tile * count + index]) * softmax.share(tile_top, merged_top);
    maximum = merged_top;
  }
  top[index] = maximum;
  sum[index] = static_cast<float>(total);
}

// Calls f with a value of the C++ type of a dtype.
template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::float16: return f(__half{});
    case Dtype::bfloat16: return f(__nv_bfloat16{});
    default: return f(float{});  // float32, the only other dtype that ops.cpp passes on
  }
}

}  // namespace

void launch_unit_rows(const Matrix& x, int64_t rows, int64_t depth, void* unit, int64_t width,
                      float* inverse, Product product, void* stream) {
  with_dtype(x.dtype, [&](auto in) {
    using In = decltype(in);
    const auto launch = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      launch_kernel(unit_rows_kernel<In, Out>, {blocks_for(rows, kBlockRows), kBlockRows * kWarp},
                    stream, x, rows, depth, out, width, inverse, product == Product::tf32);
    };
    product == Product::half ? launch(static_cast<__half*>(unit))
                             : launch(static_cast<float*>(unit));
  });
}

void launch_unit_rows_backward(const float* grad_unit, const Matrix& x, int64_t rows, int64_t depth,
                               const float* inverse, const float* factor, void* grad,
                               bool float32_grad, float* dots, void* stream) {
  with_dtype(x.dtype, [&](auto in) {
    using In = decltype(in);
    const auto launch = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      launch_kernel(unit_rows_backward_kernel<In, Out>,
                    {blocks_for(rows, kBlockRows), kBlockRows * kWarp}, stream, grad_unit, x, rows,
                    depth, inverse, factor, out, dots);
    };
    float32_grad ? launch(static_cast<float*>(grad)) : launch(static_cast<In*>(grad));
  });
}

void launch_merge(const float* tops, const float* sums, int64_t tiles, int64_t count,
                  const float* scale, bool accumulate, float* top, float* sum, void* stream) {
  launch_kernel(merge_kernel, {blocks_for(count, kMergeThreads), kMergeThreads}, stream, tops, sums,
                tiles, count, scale, accumulate, top, sum);
}

}  // namespace fastsim
