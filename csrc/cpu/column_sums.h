// Sums over the rows of a block, by column, to which all rows add.
#pragma once

#include "passes.h"
#include "scratch.h"

namespace fastsim {

// Where column sums are added: `count` rows of them, `stride` apart.
struct ColumnTotals {
  double* data = nullptr;
  int64_t count = 0, stride = 0;
};

// Runs over `rows` rows in groups of kSumRows. make() is called once for each piece of the work;
// the result is a function run(begin, end, sums) that adds the terms of the rows [begin, end) of
// one group to `sums` (totals.count, columns). The sums of the groups are then added to `totals` in
// float64, in one order. cost: the number of elements of a row.
template <class T, class Make>
void over_row_groups(int64_t rows, int64_t columns, int64_t cost, const ColumnTotals& totals,
                     const Make& make) {
  const int64_t groups = ceil_div(rows, kSumRows), group_size = totals.count * columns;
  const Scratch<T> sums(groups * group_size);
  over(groups, kSumRows * cost, [&](int64_t begin, int64_t end) {
    auto run = make();
    for (int64_t group = begin; group < end; ++group) {
      T* group_sums = sums + group * group_size;
      std::fill_n(group_sums, group_size, T(0));
      run(group * kSumRows, std::min(rows, (group + 1) * kSumRows), group_sums);
    }
  });
  over(columns, groups * totals.count, [&](int64_t begin, int64_t end) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t k = 0; k < totals.count; ++k) {
        const T* group_sums = sums + group * group_size + k * columns;
        double* total = totals.data + k * totals.stride;
        for (int64_t j = begin; j < end; ++j) total[j] += double(group_sums[j]);
      }
    }
  });
}

}  // namespace fastsim
