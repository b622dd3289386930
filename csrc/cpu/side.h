// One side of a matrix of scores: all of its rows as they are multiplied, and the way back.
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
  // memory: null, or what the unit rows may lie in. width: how many first numbers of the rows are
  // meant.
  Side(const Tensor& x, bool cosine, T* memory = nullptr) : Side(x, x.size(1), cosine, memory) {}
  Side(const Tensor& x, int64_t width, bool cosine, T* memory)
      : count(x.size(0)), width(width), from_(matrix(x)), cosine_(cosine),
        as_given_(!cosine && width == x.size(1) && has_type<T>(x) && x.is_contiguous()),
        own_(as_given_ || memory ? 0 : count * width), inverse_(cosine ? count : 0),
        rows_(as_given_ ? static_cast<const T*>(from_.data) : memory ? memory : own_) {
    T* const made = memory ? memory : own_;
    if (cosine) {
      make_unit_rows<T>(from_, count, width, made, inverse_);
    } else if (!as_given_) {
      copy_rows(made);
    }
  }

  operator const T*() const { return rows_; }

  // dL/dx in the place of dL/drows, which may be where the unit rows were; returns
  // sum_i row_i . drow_i where that is wanted, else 0.
  double finish(T* grad, bool wants_sum = false) const {
    if (cosine_) {
      const Scratch<T> dots(count);
      through_unit_rows<T>(grad, from_, count, width, inverse_, T(1), grad, kDtypeOf<T>, dots);
      return wants_sum ? sum_of(dots) : 0;
    }
    if (!wants_sum) return 0;
    const Scratch<double> dots(count);
    over(count, width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *row = rows_ + i * width, *of_row = grad + i * width;
        double dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(of_row[k]);
        dots[i] = dot;
      }
    });
    return sum_of(dots);
  }

  const int64_t count, width;

 private:
  void copy_rows(T* to) const {
    std::vector<int64_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    over(count, width, [&](int64_t begin, int64_t end) {
      kernels().of<T>().token_rows(from_, all.data() + begin, end - begin, width, false,
                                   to + begin * width);
    });
  }

  template <class Number>
  double sum_of(const Scratch<Number>& dots) const {
    Sum sum;
    for (int64_t i = 0; i < count; ++i) sum += dots[i];
    return sum;
  }

  const Matrix from_;
  const bool cosine_, as_given_;  // as_given: they are multiplied where they lie
  const Scratch<T> own_, inverse_;
  const T* const rows_;
};

}  // namespace fastsim
