// The instructions of csrc/cuda/instructions.cuh on the host, one fiber per GPU thread, so that
// the kernels run without a GPU. Written from the PTX manual's definitions: layouts of fragments,
// swizzling and descriptors share nothing with csrc/cuda/layout.h. Shared memory starts as NaN,
// copies in the background land when they are waited for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "arguments.h"

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

namespace emulated {

struct Barrier {
  int arrived = 0, phase = 0;
};
struct Transactions {
  int expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  void settle() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = expected;
    }
  }
};
struct Warp {
  uint64_t slots[32][8];
  Barrier barrier;
};
struct Block;
struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
  int threads;
};
struct Block {
  std::vector<char> storage;
  char* memory;  // aligned to 1024 bytes
  std::map<int, Barrier> barriers;
  std::map<uint32_t, Transactions> transactions;
  std::vector<Warp> warps;
  Cluster* cluster;
  int index, rank, threads;
};
struct Copy {
  char* to;
  const char* from;
};
struct Thread {
  Block* block;
  int index, blocks;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

extern Thread* current;
// Until the condition holds; other threads run meanwhile.
void wait_until(const std::function<bool()>& condition);
// Runs `body` once per thread of blocks in clusters.
void run(unsigned blocks, unsigned threads, unsigned shared, unsigned cluster,
         const std::function<void()>& body);

inline void meet(Barrier& barrier, int count) {
  const int phase = barrier.phase;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.phase;
  } else {
    wait_until([&] { return barrier.phase != phase; });
  }
}
inline Warp& warp() { return current->block->warps[current->index / 32]; }
inline int lane() { return current->index % 32; }
// Everyone's 64-bit words, seen by the whole warp.
template <class F>
auto together(const uint64_t* words, int count, const F& read) {
  Warp& w = warp();
  for (int i = 0; i < count; ++i) w.slots[lane()][i] = words[i];
  meet(w.barrier, 32);
  auto result = read(w);
  meet(w.barrier, 32);
  return result;
}

// What TMA and wgmma make of an address in rows of 128 bytes.
inline uint32_t swizzle(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

}  // namespace emulated

inline int thread_index() { return emulated::current->index; }
inline int block_index() { return emulated::current->block->index; }
inline int block_count() { return emulated::current->blocks; }
inline void block_sync() {
  emulated::Block& b = *emulated::current->block;
  emulated::meet(b.barriers[0], b.threads);
}
inline void conceal(int&) {}
inline void conceal(float&) {}

template <class T>
T lane_exchange(T value, int mask) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const int other = emulated::lane() ^ mask;
  word = emulated::together(&word, 1, [&](emulated::Warp& w) { return w.slots[other][0]; });
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline char* shared_memory() { return emulated::current->block->memory; }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory());
}

// ---- sm_80 ----

inline void copy_async(uint32_t to, const void* from, bool inside) {
  emulated::current->open.push_back(
      {shared_memory() + to, inside ? static_cast<const char*>(from) : nullptr});
}
inline void copy_async_commit() {
  emulated::current->groups.push_back(std::move(emulated::current->open));
  emulated::current->open.clear();
}
template <int N>
void copy_async_wait() {
  auto& groups = emulated::current->groups;
  while (groups.size() > N) {
    for (const emulated::Copy& copy : groups.front()) {
      copy.from ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  const uint64_t word = address;
  const int lane = emulated::lane();
  emulated::together(&word, 1, [&](emulated::Warp& w) {
    for (int m = 0; m < 4; ++m) {
      // Thread 4 i + j has the j-th 32 bits of row i.
      const char* row = shared_memory() + w.slots[8 * m + lane / 4][0];
      std::memcpy(&r[m], row + lane % 4 * 4, 4);
    }
    return 0;
  });
}

// d += a b for m16n8 and 32 bytes of depth: `parts` numbers to a 32-bit register.
template <int parts, class Value>
void multiply_fragments(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        const Value& value) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const int lane = emulated::lane(), group = lane / 4, within = lane % 4;
  emulated::together(words, 6, [&](emulated::Warp& w) {
    for (int e = 0; e < 4; ++e) {
      const int row = group + (e >= 2 ? 8 : 0), column = within * 2 + (e & 1);
      for (int k = 0; k < 8 * parts; ++k) {
        // Registers hold depth 0 to 4 parts - 1, then the rest.
        const int high = k / (4 * parts), thread = k % (4 * parts) / parts, part = k % parts;
        const uint64_t x = w.slots[row % 8 * 4 + thread][(row >= 8 ? 1 : 0) + 2 * high];
        const uint64_t y = w.slots[column * 4 + thread][4 + high];
        d[e] += value(x, part) * value(y, part);
      }
    }
    return 0;
  });
}
inline float half_of(uint64_t word, int part) {
  const uint16_t bits = static_cast<uint16_t>(word >> 16 * part);
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline float tf32_of(uint64_t word, int) {
  const uint32_t bits = static_cast<uint32_t>(word) & 0xffffe000u;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void multiply_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<2>(d, a, b0, b1, half_of);
}
inline void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<1>(d, a, b0, b1, tf32_of);
}

inline void store_two(__half* to, float a, float b) {
  to[0] = __float2half_rn(a);
  to[1] = __float2half_rn(b);
}
inline void store_two(float* to, float a, float b) {
  to[0] = a;
  to[1] = b;
}
inline float round_to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isfinite(x)) bits = (bits + 0x1000u) & 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// ---- sm_90a ----

inline void group_sync(int barrier, int threads) {
  emulated::meet(emulated::current->block->barriers[barrier], threads);
}
inline void group_arrive(int barrier, int threads) {
  emulated::Barrier& b = emulated::current->block->barriers[barrier];
  if (++b.arrived == threads) b.arrived = 0, ++b.phase;
}
template <int N>
void more_registers() {}
template <int N>
void fewer_registers() {}
inline int cluster_rank() { return emulated::current->block->rank; }
inline void cluster_sync() {
  emulated::Cluster& c = *emulated::current->block->cluster;
  emulated::meet(c.barrier, c.threads);
}

inline emulated::Transactions& transactions(uint32_t barrier, int rank) {
  return emulated::current->block->cluster->blocks[rank]->transactions.at(barrier);
}
inline void barrier_init(uint32_t barrier, int arrivals) {
  emulated::current->block->transactions[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier, int rank) {
  emulated::Transactions& t = transactions(barrier, rank);
  --t.pending;
  t.settle();
}
inline void barrier_expect(uint32_t barrier, int bytes) {
  emulated::Transactions& t = transactions(barrier, cluster_rank());
  t.bytes += bytes;
  --t.pending;
  t.settle();
}
inline void barrier_wait(uint32_t barrier, int parity) {
  emulated::Transactions& t = transactions(barrier, cluster_rank());
  emulated::wait_until([&] { return t.phase % 2 != parity; });
}

// f(address of 16 bytes in the box, pointer in the matrix or null)
template <class F>
void for_box(const TensorMap& map, int column, int row, uint32_t at, const F& f) {
  for (int r = 0; r < map.box_rows; ++r) {
    for (int byte = 0; byte < 128; byte += 2) {
      const int64_t c = column + byte / 2, line = row + r;
      const bool inside = c >= 0 && c < map.width && line >= 0 && line < map.rows;
      f(emulated::swizzle(at + r * 128 + byte),
        inside ? map.data + line * map.row_bytes + c * 2 : nullptr);
    }
  }
}
inline void bulk_load_shared(uint32_t to, const TensorMap& map, int column, int row,
                             uint32_t barrier, uint16_t blocks) {
  for (emulated::Block* block : emulated::current->block->cluster->blocks) {
    if (!(blocks >> block->rank & 1)) continue;
    for_box(map, column, row, to, [&](uint32_t address, const char* from) {
      from ? std::memcpy(block->memory + address, from, 2)
           : std::memset(block->memory + address, 0, 2);
    });
    emulated::Transactions& t = block->transactions.at(barrier);
    t.bytes -= 128 * map.box_rows;
    t.settle();
  }
}
inline void bulk_load(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier) {
  bulk_load_shared(to, map, column, row, barrier, static_cast<uint16_t>(1 << cluster_rank()));
}
inline void bulk_store(const TensorMap& map, int column, int row, uint32_t from) {
  for_box(map, column, row, from, [&](uint32_t address, char* to) {
    if (to) std::memcpy(to, shared_memory() + address, 2);
  });
}
inline void bulk_store_commit() {}
inline void bulk_store_read() {}
inline void bulk_store_wait() {}
inline void bulk_fence() {}
inline void group_product_begin() {}
inline void group_product_commit() {}
template <int N>
void group_product_wait() {}

// A half at (row, depth) of an operand in rows of 128 bytes, by its descriptor.
inline float operand(uint64_t descriptor, int row, int depth) {
  const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const uint32_t at = emulated::swizzle(start + row / 8 * stride + row % 8 * 128 + depth * 2);
  _Float16 value;
  std::memcpy(&value, shared_memory() + at, 2);
  return value;
}
inline void group_multiply(float (&d)[16][4], uint64_t a, uint64_t b) {
  const int lane = emulated::lane(), warp = thread_index() / 32 % 4;
  for (int i = 0; i < 64; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) d[i / 4][i % 4] += operand(a, row, k) * operand(b, column, k);
  }
}

}  // namespace fastsim
