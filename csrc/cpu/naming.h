// Sorts the columns that rows have chosen, for `Naming` (block.h).
#pragma once

#include <vector>

#include "block.h"

namespace fastsim {

// Sorts the indices into p.columns by the column they hold, with a counting sort. Returns the two
// arrays of a `Naming`: `first` (columns + 1,), and after it `entries`.
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
