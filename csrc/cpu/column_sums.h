// Sums over the rows of a block that rows share: those of columns.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

// Where `count` rows of sums of columns go, `stride` apart.
struct ColumnTotals {
  double* data = nullptr;
  int64_t count = 0, stride = 0;
};

// Runs over the rows in groups. make() -> run(begin, end, sums) of the rows of one group, which
// adds what these have to `sums` (totals.count, columns); each thread makes one. cost: of a row.
template <class T, class Make>
void over_groups(int64_t rows, int64_t columns, int64_t cost, const ColumnTotals& totals,
                 const Make& make) {
  const int64_t groups = tiles(rows, kSumRows), of_group = totals.count * columns;
  const Scratch<T> sums(groups * of_group);
  over(groups, kSumRows * cost, [&](int64_t begin, int64_t end) {
    auto run = make();
    for (int64_t group = begin; group < end; ++group) {
      T* of_rows = sums + group * of_group;
      std::fill_n(of_rows, of_group, T(0));
      run(group * kSumRows, std::min(rows, (group + 1) * kSumRows), of_rows);
    }
  });
  over(columns, groups * totals.count, [&](int64_t begin, int64_t end) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t k = 0; k < totals.count; ++k) {
        const T* of_rows = sums + group * of_group + k * columns;
        double* total = totals.data + k * totals.stride;
        for (int64_t j = begin; j < end; ++j) total[j] += double(of_rows[j]);
      }
    }
  });
}

}  // namespace fastsim
