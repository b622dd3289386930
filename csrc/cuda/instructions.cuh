// The instructions that C++ cannot express, one function each. Where FASTSIM_EMULATED is defined,
// tests/backends/cuda/emulator/emulated.h takes the place of this file, so that the kernels run on
// the host, without a GPU.
#pragma once

#if defined(FASTSIM_EMULATED)
#include "emulated.h"
#else

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "arguments.h"

namespace fastsim {

using TensorMap = CUtensorMap;

FASTSIM_DEVICE int thread_index() { return threadIdx.x; }
FASTSIM_DEVICE int block_index() { return blockIdx.x; }
FASTSIM_DEVICE int block_count() { return gridDim.x; }
FASTSIM_DEVICE void block_sync() { __syncthreads(); }  // bar.sync 0
FASTSIM_DEVICE void trap() { __trap(); }

// Makes the compiler assume nothing about the value of a variable. The asm is empty, so there is no
// instruction for it.
FASTSIM_DEVICE void conceal(int& value) { asm volatile("" : "+r"(value)); }
FASTSIM_DEVICE void conceal(float& value) { asm volatile("" : "+f"(value)); }

// shfl.sync.bfly: the value of the lane lane ^ mask.
template <class T>
FASTSIM_DEVICE T lane_exchange(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

FASTSIM_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// cvta.to.shared: the address of a byte of shared memory, as instructions take it.
FASTSIM_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- sm_80: asynchronous copies, products of a warp ----

// cp.async: copies 16 bytes to shared memory. Writes zeros where `inside` is not set.
FASTSIM_DEVICE void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0));
}
// cp.async.commit_group
FASTSIM_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
// cp.async.wait_group: waits until at most N groups of copies are in flight.
template <int N>
FASTSIM_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ldmatrix.x4: loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of
// matrix l / 8.
FASTSIM_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// mma.sync.m16n8k16 of float16 and mma.sync.m16n8k8 of TF32: d += a b^T in float32.
FASTSIM_DEVICE void multiply_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FASTSIM_DEVICE void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Stores two neighbouring elements at once.
FASTSIM_DEVICE void store_two(__half* to, float a, float b) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
FASTSIM_DEVICE void store_two(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = make_float2(a, b);
}

// cvt.rna.tf32: rounds to the nearest TF32 number.
FASTSIM_DEVICE float round_to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// ---- sm_90a: warp groups, clusters, TMA ----

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTSIM_HOPPER_CODE 1

// bar.sync: waits until `threads` threads have arrived at the named barrier.
FASTSIM_DEVICE void group_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// bar.arrive: this thread arrives at the named barrier and does not wait.
FASTSIM_DEVICE void group_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// setmaxnreg.inc, setmaxnreg.dec: each thread of the warp group has N registers from then on.
template <int N>
FASTSIM_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
FASTSIM_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// %cluster_ctarank: the number of this thread block in its cluster.
FASTSIM_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// barrier.cluster.arrive and wait: a barrier of all threads of the cluster.
FASTSIM_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// mbarrier.init: an mbarrier whose phases need `arrivals` arrivals.
FASTSIM_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// fence.mbarrier_init: makes initialised mbarriers visible to the cluster and to TMA.
FASTSIM_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive.expect_tx: arrives, and makes the phase wait for `bytes` bytes.
FASTSIM_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// mapa, mbarrier.arrive: arrives at the same mbarrier of the thread block `rank` of the cluster,
// which may be this one.
FASTSIM_DEVICE void barrier_arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// mbarrier.try_wait.parity: waits while the mbarrier's current phase has this parity. So it cannot
// tell apart phases of the same parity: it tells a phase from the one before it, and from no other.
FASTSIM_DEVICE void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// cp.async.bulk.tensor: loads the box at (column, row) of the tensor map to this thread block's
// shared memory. The mbarrier counts its bytes.
FASTSIM_DEVICE void bulk_load(uint32_t to, const TensorMap& map, int column, int row,
                              uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// cp.async.bulk.tensor.multicast: loads the box to every thread block of the cluster whose bit is
// set in `blocks`, at the same address in each.
FASTSIM_DEVICE void bulk_load_shared(uint32_t to, const TensorMap& map, int column, int row,
                                     uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}
// cp.async.bulk.tensor: stores a box from shared memory to (column, row) of the tensor map.
FASTSIM_DEVICE void bulk_store(const TensorMap& map, int column, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   &map),
               "r"(column), "r"(row), "r"(from)
               : "memory");
}
// cp.async.bulk.commit_group
FASTSIM_DEVICE void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }
// cp.async.bulk.wait_group.read: waits until this thread's stores have read shared memory.
FASTSIM_DEVICE void bulk_store_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// cp.async.bulk.wait_group: waits until this thread's stores are complete.
FASTSIM_DEVICE void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// fence.proxy.async: makes this thread's writes to shared memory visible to TMA.
FASTSIM_DEVICE void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma.fence, wgmma.commit_group, wgmma.wait_group: the last waits until at most N groups of
// products are in flight.
FASTSIM_DEVICE void group_product_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FASTSIM_DEVICE void group_product_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
FASTSIM_DEVICE void group_product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define FASTSIM_FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FASTSIM_SIXTY_FOUR                                                                      \
  FASTSIM_FOUR(0), FASTSIM_FOUR(1), FASTSIM_FOUR(2), FASTSIM_FOUR(3), FASTSIM_FOUR(4),          \
      FASTSIM_FOUR(5), FASTSIM_FOUR(6), FASTSIM_FOUR(7), FASTSIM_FOUR(8), FASTSIM_FOUR(9),      \
      FASTSIM_FOUR(10), FASTSIM_FOUR(11), FASTSIM_FOUR(12), FASTSIM_FOUR(13), FASTSIM_FOUR(14), \
      FASTSIM_FOUR(15)
#define FASTSIM_REGISTERS                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
// wgmma.mma_async: d += a b^T for 64 rows of a, 128 rows of b and 32 bytes of depth. `a` and `b`
// are descriptors of operands with rows of 128 bytes.
FASTSIM_DEVICE void group_multiply(float (&d)[16][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " FASTSIM_REGISTERS
               "%64, %65, 1, 1, 1, 0, 0;"
               : FASTSIM_SIXTY_FOUR
               : "l"(a), "l"(b));
}

#endif  // sm_90a

}  // namespace fastsim

#endif  // emulated
