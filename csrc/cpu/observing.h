// Has the first kernel that looks at a block observe its scores (observe.h), and finds once for all
// rows what would take a comparison a pair there.
#pragma once

#include <bit>
#include <vector>

#include "arguments.h"

namespace fastsim {

// The columns that have the id of a row, for every row.
class ColumnsByRow {
 public:
  // False, and nothing is found, where the rows have more than `most` such columns together.
  bool find(const int64_t* row_ids, int64_t rows, const int64_t* column_ids, int64_t columns,
            int64_t most) {
    ids_ = column_ids;
    chains_.assign(std::bit_ceil(uint64_t(2 * columns)), -1);
    next_.resize(columns);
    for (int64_t j = columns - 1; j >= 0; --j) {  // so that a chain ascends
      int64_t& head = chains_[place(column_ids[j])];
      next_[j] = head;
      head = j;
    }
    first_.reserve(rows + 1);
    for (int64_t i = 0; i < rows; ++i) {
      first_.push_back(int64_t(found_.size()));
      for (int64_t j = chains_[place(row_ids[i])]; j >= 0; j = next_[j]) found_.push_back(j);
      if (int64_t(found_.size()) > most) return false;
    }
    first_.push_back(int64_t(found_.size()));
    return true;
  }

  ColumnsOfRows found() const { return {first_.data(), found_.data()}; }

 private:
  // Of an id: its place in the table, which is at most half full.
  size_t place(int64_t id) const {
    const size_t mask = chains_.size() - 1;
    size_t at = (uint64_t(id) * 0x9e3779b97f4a7c15u) >> 32 & mask;
    while (chains_[at] >= 0 && ids_[chains_[at]] != id) at = (at + 1) & mask;
    return at;
  }

  const int64_t* ids_ = nullptr;
  std::vector<int64_t> chains_, next_, first_, found_;
};

// Until it is gone, the first look at the block adds to `seen` (rows, kObserved).
template <class T>
class Observing {
 public:
  Observing(Block<T>& b, double* seen) {
    b.seen = seen;
    const bool by_id = b.row_ids, by_group = b.row_groups && !b.dense.data;
    if (by_id == by_group || b.dense.data) return;
    const int64_t* rows = by_id ? b.row_ids : b.row_groups;
    const int64_t* columns = by_id ? b.column_ids : b.column_groups;
    // More, and comparing them all is faster.
    const int64_t most = b.rows * (1 + b.columns / kFew);
    if (akin_.find(rows, b.rows, columns, b.columns, most)) b.akin = akin_.found();
  }

  Observing(Block<T>& b, const Tensor& seen)
      : Observing(b, output<double>(seen, "seen", b.rows * kObserved)) {}

 private:
  static constexpr int64_t kFew = 16;

  ColumnsByRow akin_;
};

}  // namespace fastsim
