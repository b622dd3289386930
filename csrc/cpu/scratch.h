// Memory that lives as long as a call. Its values are undefined at first.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>

#include "arguments.h"
#include "threads.h"

namespace fastsim {

constexpr int64_t kAligned = 64;  // bytes of a vector or a cache line, the alignment of memory
constexpr int64_t kHugePage = 2 << 20;

// The distance in memory of two rows of scores with so many columns. It exceeds their number, since
// rows a power of two apart would share few cache sets.
template <class T>
int64_t panel_stride(int64_t columns) {
  return columns + kAligned / int64_t(sizeof(T));
}

// Advises the system to use huge pages (memory.cpp).
void advise_huge_pages(void* data, int64_t bytes);

// Much memory is whole huge pages: with small pages at both ends, a product of 2,048 rows takes up
// to 10 % longer.
inline void* aligned_memory(int64_t bytes) {
  if (bytes < kHugePage) return std::aligned_alloc(kAligned, bytes);
  const int64_t whole = ceil_div(bytes, kHugePage) * kHugePage;
  void* data = std::aligned_alloc(kHugePage, whole);
  if (data) advise_huge_pages(data, whole);
  return data;
}

// The buffers that a thread keeps from call to call: at most kLargest bytes each and kTotal bytes
// together. The pages of fresh memory cost a small batch more time than its products. They cost a
// batch of thousands of rows a tenth of its time, and a symmetric loss that keeps its scores (KEPT
// in fastsim/backends/cpu/amx_loss.py) 6 %.
class MemoryPool {
 public:
  static constexpr int64_t kLargest = 72 << 20, kTotal = 128 << 20;

  // Takes a free buffer of at least `bytes` bytes and returns its index, or -1 if there is none.
  int take(int64_t bytes) {
    int found = -1;
    for (int i = 0; i < kCount; ++i) {
      if (buffers_[i].in_use) continue;
      if (found < 0 || is_better(buffers_[i].bytes, buffers_[found].bytes, bytes)) found = i;
    }
    if (found < 0 || bytes > kLargest) return -1;
    Buffer& buffer = buffers_[found];
    if (buffer.bytes < bytes) {
      if (total_ - buffer.bytes + bytes > kTotal) return -1;
      total_ -= buffer.bytes;
      buffer.memory.reset(aligned_memory(bytes));
      buffer.bytes = buffer.memory ? bytes : 0;
      total_ += buffer.bytes;
      if (!buffer.memory) return -1;
    }
    buffer.in_use = true;
    return found;
  }
  void give_back(int index) { buffers_[index].in_use = false; }
  void* data(int index) const { return buffers_[index].memory.get(); }

 private:
  struct Buffer {
    std::unique_ptr<void, void (*)(void*)> memory{nullptr, std::free};
    int64_t bytes = 0;
    bool in_use = false;
  };
  static constexpr int kCount = 16;

  // Whether a buffer of `a` bytes is a better choice than one of `b`. The best is the smallest that
  // is large enough, or else the largest.
  static bool is_better(int64_t a, int64_t b, int64_t wanted) {
    const bool a_fits = a >= wanted, b_fits = b >= wanted;
    return a_fits != b_fits ? a_fits : (a_fits ? a < b : a > b);
  }

  std::array<Buffer, kCount> buffers_;
  int64_t total_ = 0;  // bytes of all buffers
};

inline thread_local MemoryPool memory_pool;

// Uninitialised memory for `count` numbers, from the thread's pool if that has room.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    const int64_t bytes = ceil_div(count * int64_t(sizeof(T)), kAligned) * kAligned;
    index_ = memory_pool.take(bytes);
    data_ = index_ < 0 ? aligned_memory(bytes) : memory_pool.data(index_);
    STD_TORCH_CHECK(data_ || bytes == 0, "fastsim: out of memory");
  }
  ~Scratch() { index_ < 0 ? std::free(data_) : memory_pool.give_back(index_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() const { return static_cast<T*>(data_); }

 private:
  int index_;
  void* data_;
};

}  // namespace fastsim
