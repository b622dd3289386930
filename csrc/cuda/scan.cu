// Running log-sum-exps of a list, from both ends at once, for CoSENT. There are three kernels. The
// first computes the total of each part of the list. The second computes the total of all parts
// before each part. The third scans each part and joins the result with the total before it. They
// use the block-wide scan of CUB: the order of additions of its device-wide scan differs from run
// to run.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "check.cuh"
#include "epilogue.h"
#include "instructions.cuh"

namespace fastsim {

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;                 // logits of a thread
constexpr int kPart = kThreads * kItems;  // logits of a part

// A sum of exponentials relative to `top`, the maximum of the logits, so that logits of any spread
// neither overflow nor vanish.
struct RunningSum {
  double top, sum;
};
constexpr double kEmptyTop = kLeftOut<double>;

// The factor that makes a sum relative to `top` one relative to `joined_top`.
FASTSIM_DEVICE double share(double top, double joined_top) {
  return exponential(static_cast<float>(top - joined_top));
}

struct Join {
  FASTSIM_DEVICE RunningSum operator()(const RunningSum& a, const RunningSum& b) const {
    const double joined_top = fmax(a.top, b.top);
    return {joined_top, a.sum * share(a.top, joined_top) + b.sum * share(b.top, joined_top)};
  }
};

// The index of the logit at `step` of a scan: forward over the logits, or backward over the negated
// logits.
FASTSIM_DEVICE int64_t index_of(int64_t step, int64_t count, bool backward) {
  return backward ? count - 1 - step : step;
}

FASTSIM_DEVICE RunningSum load(const float* logits, int64_t step, int64_t count, bool backward) {
  if (step >= count) return {kEmptyTop, 0.0};
  const double value = logits[index_of(step, count, backward)];
  return {backward ? -value : value, 1.0};
}

__global__ void __launch_bounds__(kThreads)
    totals_kernel(const float* logits, int64_t count, RunningSum* totals) {
  using Reduce = cub::BlockReduce<RunningSum, kThreads, cub::BLOCK_REDUCE_RAKING>;
  __shared__ typename Reduce::TempStorage storage;
  RunningSum items[kItems];
  const int64_t first = int64_t{blockIdx.x} * kPart + threadIdx.x * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) items[i] = load(logits, first + i, count, blockIdx.y);
  const RunningSum total = Reduce(storage).Reduce(items, Join{});
  if (threadIdx.x == 0) totals[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = total;
}

// Replaces the total of each part by the total of all parts before it. Each of the two thread
// blocks takes one direction.
__global__ void __launch_bounds__(kThreads) carries_kernel(RunningSum* totals, int64_t parts) {
  using Scan = cub::BlockScan<RunningSum, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  RunningSum* part_totals = totals + blockIdx.x * parts;
  RunningSum previous{kEmptyTop, 0.0};
  for (int64_t first = 0; first < parts; first += kThreads) {
    const int64_t part = first + threadIdx.x;
    RunningSum total = part < parts ? part_totals[part] : RunningSum{kEmptyTop, 0.0}, chunk_total;
    Scan(storage).ExclusiveScan(total, total, RunningSum{kEmptyTop, 0.0}, Join{}, chunk_total);
    if (part < parts) part_totals[part] = Join{}(previous, total);
    previous = Join{}(previous, chunk_total);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    scan_kernel(const float* logits, int64_t count, const RunningSum* carries, double* out) {
  using Scan = cub::BlockScan<RunningSum, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const bool backward = blockIdx.y;
  RunningSum items[kItems];
  const int64_t first = int64_t{blockIdx.x} * kPart + threadIdx.x * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) items[i] = load(logits, first + i, count, backward);
  Scan(storage).InclusiveScan(items, items, Join{});
  const RunningSum previous = carries[int64_t{blockIdx.y} * gridDim.x + blockIdx.x];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i >= count) break;
    const RunningSum total = Join{}(previous, items[i]);
    out[(backward ? count : 0) + index_of(first + i, count, backward)] = total.top + log(total.sum);
  }
}

}  // namespace

int64_t scan_parts(int64_t count) { return (count + kPart - 1) / kPart; }

void launch_scan(const float* logits, int64_t count, double* scratch, double* out, void* stream) {
  RunningSum* totals = reinterpret_cast<RunningSum*>(scratch);
  const dim3 grid(blocks_for(count, kPart), 2);
  totals_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(logits, count, totals);
  check(cudaGetLastError(), "launch of a scan's totals");
  carries_kernel<<<2, kThreads, 0, stream_of(stream)>>>(totals, scan_parts(count));
  check(cudaGetLastError(), "launch of a scan's carries");
  scan_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(logits, count, totals, out);
  check(cudaGetLastError(), "launch of a scan");
}

}  // namespace fastsim
