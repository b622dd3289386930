// For each row of a matrix of pairs, the columns with its id or its group.
#pragma once

#include <bit>
#include <vector>

#include "block.h"

namespace fastsim {

// Finds the columns with the id of each row, by a hash table. Columns with one id form a chain.
class ColumnsByRow {
 public:
  // Returns false, and finds nothing, if all rows together have more than `most` such columns.
  bool find(const int64_t* row_ids, int64_t rows, const int64_t* column_ids, int64_t columns,
            int64_t most) {
    ids_ = column_ids;
    chains_.assign(std::bit_ceil(uint64_t(2 * columns)), -1);
    next_.resize(columns);
    for (int64_t j = columns - 1; j >= 0; --j) {  // from the last, so that chains ascend
      int64_t& head = chains_[place(column_ids[j])];
      next_[j] = head;
      head = j;
    }
    first_.reserve(rows + 1);
    for (int64_t i = 0; i < rows; ++i) {
      first_.push_back(int64_t(columns_.size()));
      for (int64_t j = chains_[place(row_ids[i])]; j >= 0; j = next_[j]) columns_.push_back(j);
      if (int64_t(columns_.size()) > most) return false;
    }
    first_.push_back(int64_t(columns_.size()));
    return true;
  }

  ColumnsOfRows lists() const { return {first_.data(), columns_.data()}; }

 private:
  // The place of an id in the table, which is at most half full.
  size_t place(int64_t id) const {
    const size_t mask = chains_.size() - 1;
    size_t at = (uint64_t(id) * 0x9e3779b97f4a7c15u) >> 32 & mask;
    while (chains_[at] >= 0 && ids_[chains_[at]] != id) at = (at + 1) & mask;
    return at;
  }

  const int64_t* ids_ = nullptr;
  std::vector<int64_t> chains_, next_, first_, columns_;
};

}  // namespace fastsim
