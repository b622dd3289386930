// One side of the scores of a small batch: its rows as they are multiplied, and the way back.
#pragma once

#include <cmath>
#include <numeric>
#include <vector>

#include "passes.h"
#include "scratch.h"

namespace fastsim {

// A sum that keeps what each addition rounds away (Neumaier 1974): a row's term may already be a
// double, and long double is no wider than that on some platforms.
class Sum {
 public:
  void operator+=(double term) {
    const double next = sum_ + term;
    const bool larger = std::abs(sum_) >= std::abs(term);
    lost_ += larger ? (sum_ - next) + term : (term - next) + sum_;
    sum_ = next;
  }
  void operator-=(double term) { *this += -term; }
  // Of a sum that is not finite, what was lost is not a number.
  operator double() const { return std::isfinite(lost_) ? sum_ + lost_ : sum_; }

 private:
  double sum_ = 0, lost_ = 0;
};

// The unit rows of x, or without `cosine` its rows as they are.
template <class T>
class Side {
 public:
  // memory: null, or where the rows are to lie. width: how many first numbers of the rows are meant.
  Side(const Tensor& x, bool cosine, T* memory = nullptr) : Side(x, x.size(1), cosine, memory) {}
  Side(const Tensor& x, int64_t width, bool cosine, T* memory)
      : count(x.size(0)), width(width), from_(matrix(x)), own_(memory ? 0 : count * width),
        rows_(memory ? memory : own_), inverse_(cosine ? count : 0), cosine_(cosine) {
    if (cosine) {
      make_unit_rows<T>(from_, count, width, rows_, inverse_);
      return;
    }
    std::vector<int64_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    kernels().of<T>().token_rows(from_, all.data(), count, width, false, rows_);
  }

  operator const T*() const { return rows_; }

  // dL/dx in the place of dL/drows, which may be where the unit rows were; returns sum_i row_i . drow_i.
  double finish(T* grad) const {
    Sum sum;
    if (cosine_) {
      Scratch<T> dots(count);
      through_unit_rows<T>(grad, from_, count, width, inverse_, T(1), grad, kDtypeOf<T>, dots);
      for (int64_t i = 0; i < count; ++i) sum += dots[i];
      return sum;
    }
    const T* row = rows_;
    for (int64_t i = 0; i < count; ++i, row += width, grad += width) {
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(grad[k]);
      sum += dot;
    }
    return sum;
  }

  // The same of the rows [begin, end) of a side of cosines; dots: row_i . drow_i.
  void finish(T* grad, T* dots, int64_t begin, int64_t end) const {
    kernels().of<T>().unit_rows_backward(grad, from_, width, inverse_, T(1), grad, kDtypeOf<T>, dots,
                                         begin, end);
  }

  const int64_t count, width;

 private:
  const Matrix from_;
  const Scratch<T> own_;
  T* const rows_;
  const Scratch<T> inverse_;
  const bool cosine_;
};

}  // namespace fastsim
