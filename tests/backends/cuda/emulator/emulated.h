// The instructions of csrc/cuda/instructions.cuh on the host, so that the kernels run without a
// GPU. Written from the PTX manual's definitions: layouts of fragments, swizzling and descriptors
// share nothing with csrc/cuda/layout.h. Shared memory starts as NaN, and so does what a copy or
// a product under way will write: who reads it early, or writes it before others have read it,
// shows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

#include "arguments.h"
#include "machine.h"

#ifndef __grid_constant__
#define __grid_constant__
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#define FASTSIM_HOPPER_CODE 1

namespace fastsim {

struct TensorMap {
  char* data;
  int64_t width, rows, row_bytes;  // width in halves
  int box_rows;
};

// ---- threads ----

inline int thread_index() { return emulated::current->index; }
inline int block_index() { return emulated::current->block->index; }
inline int block_count() { return emulated::current->blocks; }
inline void block_sync() {
  emulated::Block& b = *emulated::current->block;
  emulated::meet(b.barriers[0], b.threads);
}
inline void trap() { emulated::fail("a kernel that its architecture does not serve"); }
inline void conceal(int&) {}
inline void conceal(float&) {}

namespace emulated {

inline int lane() { return current->index % 32; }

// Everyone's 64-bit words, seen by the whole warp.
template <class F>
auto together(const uint64_t* words, int count, const F& read) {
  Warp& w = current->block->warps[current->index / 32];
  auto& slots = w.slots[current->exchanges++ & 1];
  for (int i = 0; i < count; ++i) slots[lane()][i] = words[i];
  meet(w.barrier, 32);
  return read(slots);
}

}  // namespace emulated

template <class T>
T lane_exchange(T value, int mask) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const int other = emulated::lane() ^ mask;
  word = emulated::together(&word, 1, [&](const auto& slots) { return slots[other][0]; });
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline char* shared_memory() { return emulated::current->block->memory; }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory());
}

void store_two(__half* to, float a, float b);
void store_two(float* to, float a, float b);
float round_to_tf32(float x);

// ---- sm_80 ----

void copy_async(uint32_t to, const void* from, bool inside);
void copy_async_commit();
void wait_for_copies(size_t under_way);
template <int N>
void copy_async_wait() {
  wait_for_copies(N);
}
void load_matrices(uint32_t (&r)[4], uint32_t address);
void multiply_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// ---- sm_90a ----

inline void group_sync(int barrier, int threads) {
  emulated::meet(emulated::current->block->barriers[barrier], threads);
}
inline void group_arrive(int barrier, int threads) {
  emulated::meet(emulated::current->block->barriers[barrier], threads, false);
}
void set_registers(int count, bool more);
template <int N>
void more_registers() {
  set_registers(N, true);
}
template <int N>
void fewer_registers() {
  set_registers(N, false);
}
inline int cluster_rank() { return emulated::current->block->rank; }
inline void cluster_sync() {
  emulated::Cluster& c = *emulated::current->block->cluster;
  emulated::meet(c.barrier, c.threads);
}

void barrier_init(uint32_t barrier, int arrivals);
void barrier_init_fence();
void barrier_arrive(uint32_t barrier, int rank);
void barrier_expect(uint32_t barrier, int bytes);
void barrier_wait(uint32_t barrier, int parity);

void bulk_load(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier);
void bulk_load_shared(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier,
                      uint16_t blocks);
void bulk_store(const TensorMap& map, int column, int row, uint32_t from);
void bulk_store_commit();
void bulk_store_read();
void bulk_store_wait();
void bulk_fence();

void group_product_begin();
void group_multiply(float (&d)[16][4], uint64_t a, uint64_t b);
void group_product_commit();
void wait_for_products(size_t under_way);
template <int N>
void group_product_wait() {
  wait_for_products(N);
}

}  // namespace fastsim
