// Memory for the time of a call, its values undefined.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>

#include "arguments.h"

namespace fastsim {

constexpr int64_t kAligned = 64;  // bytes: a vector, a line of the cache
constexpr int64_t kHugePage = 2 << 20;

// Asks the system for huge pages (memory.cpp).
void ask_for_huge_pages(void* data, int64_t bytes);

inline void* aligned_memory(int64_t bytes) {
  void* data = std::aligned_alloc(kAligned, bytes);
  if (data && bytes >= kHugePage) ask_for_huge_pages(data, bytes);
  return data;
}

// Pieces of memory that a thread keeps from call to call, no more than kKept bytes each and kAll
// together: the pages of fresh memory cost a small batch more than its products, and one of thousands
// of rows a tenth of them.
class Pieces {
 public:
  static constexpr int64_t kKept = 16 << 20, kAll = 64 << 20;

  // One of at least so many bytes that is not in use, or -1.
  int take(int64_t bytes) {
    int found = -1;
    for (int at = 0; at < kCount; ++at) {
      if (pieces_[at].used) continue;
      if (found < 0 || better(pieces_[at].bytes, pieces_[found].bytes, bytes)) found = at;
    }
    if (found < 0 || bytes > kKept) return -1;
    Piece& piece = pieces_[found];
    if (piece.bytes < bytes) {
      if (all_ - piece.bytes + bytes > kAll) return -1;
      all_ -= piece.bytes;
      piece.memory.reset(aligned_memory(bytes));
      piece.bytes = piece.memory ? bytes : 0;
      all_ += piece.bytes;
      if (!piece.memory) return -1;
    }
    piece.used = true;
    return found;
  }
  void give_back(int place) { pieces_[place].used = false; }
  void* data(int place) const { return pieces_[place].memory.get(); }

 private:
  struct Piece {
    std::unique_ptr<void, void (*)(void*)> memory{nullptr, std::free};
    int64_t bytes = 0;
    bool used = false;
  };
  static constexpr int kCount = 16;

  // The smallest that is large enough, else the largest.
  static bool better(int64_t one, int64_t other, int64_t wanted) {
    const bool fits = one >= wanted, other_fits = other >= wanted;
    return fits != other_fits ? fits : (fits ? one < other : one > other);
  }

  std::array<Piece, kCount> pieces_;
  int64_t all_ = 0;  // bytes
};

inline thread_local Pieces pieces;

template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + kAligned - 1) / kAligned * kAligned;
    place_ = pieces.take(bytes);
    data_ = place_ < 0 ? aligned_memory(bytes) : pieces.data(place_);
    STD_TORCH_CHECK(data_ || bytes == 0, "fastsim: out of memory");
  }
  ~Scratch() { place_ < 0 ? std::free(data_) : pieces.give_back(place_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() const { return static_cast<T*>(data_); }

 private:
  int place_;
  void* data_;
};

}  // namespace fastsim
