// Which rows have chosen a column.
#pragma once

#include <vector>

#include "block.h"

namespace fastsim {

// A counting sort: its first (columns + 1,), then its entries.
template <class T>
std::vector<int64_t> sorted_by_column(const Partners<T>& p, int64_t columns) {
  const int64_t count = p.count * p.rows;
  std::vector<int64_t> sorted(columns + 1 + count);
  int64_t *first = sorted.data(), *entries = first + columns + 1;
  for (int64_t at = 0; at < count; ++at) {
    if (p.columns[at] >= 0) ++first[p.columns[at] + 1];
  }
  for (int64_t j = 0; j < columns; ++j) first[j + 1] += first[j];
  std::vector<int64_t> next(first, first + columns);
  for (int64_t at = 0; at < count; ++at) {
    if (p.columns[at] >= 0) entries[next[p.columns[at]]++] = at;
  }
  return sorted;
}

}  // namespace fastsim
