// One side of a score matrix: all of its rows as operands of products, and the gradient of the
// input from theirs.
#pragma once

#include <cmath>
#include <numeric>
#include <vector>

#include "passes.h"
#include "scratch.h"

namespace fastsim {

// A sum that keeps what each addition rounds away (Neumaier 1974). A wider type would not do: a
// term of a row may already be a double, and on some platforms long double is no wider than that.
class Sum {
 public:
  void operator+=(double term) {
    const double next = sum_ + term;
    const bool sum_is_larger = std::abs(sum_) >= std::abs(term);
    lost_ += sum_is_larger ? (sum_ - next) + term : (term - next) + sum_;
    sum_ = next;
  }
  void operator-=(double term) { *this += -term; }
  // If the sum is not finite, lost_ is NaN.
  operator double() const { return std::isfinite(lost_) ? sum_ + lost_ : sum_; }

 private:
  double sum_ = 0, lost_ = 0;
};

// The unit rows of x, or without `cosine` the rows of x in the compute type.
template <class T>
class Side {
 public:
  // memory: where the rows may be written, (count, width), or null. width: the number of leading
  // columns of x that are used. lazy: products may read x itself, and multiply its rows by their
  // inverse norms. That saves the memory of the unit rows. The rows are then not read one by one.
  Side(const Tensor& x, bool cosine, T* memory = nullptr) : Side(x, x.size(1), cosine, memory) {}
  Side(const Tensor& x, int64_t width, bool cosine, T* memory, bool lazy = false)
      : Side(matrix(x), x.size(0), width, cosine, memory, lazy) {}
  Side(const Matrix& x, int64_t count, int64_t width, bool cosine, T* memory, bool lazy)
      : count(count), width(width), from_(x), cosine_(cosine),
        in_place_(cosine ? lazy && (lies_by_rows<T>(x) || lies_by_columns<T>(x))
                         : lies_by_rows<T>(x) && x.row_stride == width),
        memory_(in_place_ || memory ? 0 : count * width), inverse_(cosine ? count : 0),
        rows_(in_place_ ? static_cast<const T*>(from_.data) : memory ? memory : memory_) {
    T* const target = memory ? memory : memory_;
    if (cosine && in_place_) {
      make_inverse_norms<T>(from_, count, width, inverse_);
    } else if (cosine) {
      make_unit_rows<T>(from_, count, width, target, inverse_);
    } else if (!in_place_) {
      copy_rows(target);
    }
  }

  operator const T*() const { return rows_; }

  // The rows as products read them: x itself, if products multiply its rows by their inverse norms.
  Matrix operand() const { return inverse() ? from_ : row_major(rows_, width); }

  // The inverse norms by which products multiply the rows of operand(), (count,); null if these
  // stay as they are.
  const T* inverse() const {
    return cosine_ && in_place_ ? static_cast<const T*>(inverse_) : nullptr;
  }

  // Replaces dL/drows in `grad` (count, width) by dL/dx. With `cosine`, `grad` may be the memory of
  // the unit rows. Returns sum_i rows_i . (dL/drows)_i with `wants_sum`, otherwise 0.
  double finish(T* grad, bool wants_sum = false) const {
    if (cosine_) {
      const Scratch<T> dots(count);
      through_unit_rows<T>(grad, from_, count, width, inverse_, T(1), grad, kDtypeOf<T>, dots);
      return wants_sum ? sum_of(dots) : 0;
    }
    return wants_sum ? dot(grad) : 0;
  }

  // sum_i rows_i . (dL/drows)_i, for dL/drows in `grad` (count, width). Not for a lazy side.
  double dot(const T* grad) const {
    const Scratch<double> dots(count);
    over(count, width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *row = rows_ + i * width, *grad_row = grad + i * width;
        double dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t k = 0; k < width; ++k) dot += double(row[k]) * double(grad_row[k]);
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
  const bool cosine_, in_place_;  // in_place_: products read x itself
  const Scratch<T> memory_, inverse_;
  const T* const rows_;
};

}  // namespace fastsim
