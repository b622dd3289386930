// Rows with their own negatives: each row of a band with K negatives that no other row has.
#pragma once

#include <vector>

#include "arguments.h"
#include "side.h"

namespace fastsim {
namespace {

// The scores (rows, K) of the rows of a band, each with its own K negatives, and the gradients.
template <class T>
class OwnNegatives {
 public:
  // own (N K, D): the negatives of row 0 first, then those of row 1. first: the first row of the
  // band. rows (count, D): its unit rows.
  OwnNegatives(const Tensor& own, int64_t per_row, bool cosine, int64_t first, const T* rows,
               int64_t count)
      : rows_(rows), count_(count), width_(own.size(1)), per_row_(per_row),
        negatives_(matrix(own).from_row(first * per_row), count * per_row, width_, cosine, nullptr,
                   false) {}

  // Computes the scores.
  void fill(const Block<T>& b) const {
    std::vector<int64_t> columns(negatives_.count);
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t k = 0; k < per_row_; ++k) columns[k * count_ + i] = i * per_row_ + k;
    }
    std::vector<T> values(negatives_.count);
    const Partners<T> pairs{rows_, negatives_, count_, width_, per_row_, columns.data(), false};
    over(count_, per_row_ * width_, [&](int64_t begin, int64_t end) {
      kernels().of<T>().chosen_rows(pairs, values.data(), begin, end);
    });
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t k = 0; k < per_row_; ++k) b.scores[i * b.stride + k] = values[k * count_ + i];
    }
  }

  // Adds the products of the score gradients and the negatives to the gradient of the rows of the
  // band, (count, D).
  void add_to_rows(const Block<T>& b, T* grad) const {
    over(count_, per_row_ * width_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Matrix row_negatives = row_major<T>(negatives_ + i * per_row_ * width_, width_);
        kernels().of<T>().multiply_rows(b.scores + i * b.stride, b.stride, per_row_,
                                        row_negatives, nullptr, width_, grad + i * width_, true,
                                        {0, 1});
      }
    });
  }

  // Sets `grad` (count K, D) to the gradient of the caller's negatives.
  void negatives_gradient(const Block<T>& b, T* grad) const {
    over(count_, per_row_ * width_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels().of<T>().multiply_columns(b.scores + i * b.stride, b.stride, 1,
                                           rows_ + i * width_, width_,
                                           grad + i * per_row_ * width_, false, {0, per_row_});
      }
    });
    negatives_.finish(grad);
  }

 private:
  const T* const rows_;
  const int64_t count_, width_, per_row_;
  const Side<T> negatives_;
};

}  // namespace
}  // namespace fastsim
