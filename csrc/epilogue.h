// The mathematics of each loss on one score: its logit, its terms in the state of its row or
// column, and its score gradient dL/ds. These are plain scalar functions of values, for host and
// device, without torch headers. An engine decides how scores arrive and in which order; csrc/cpu
// vectorises loops over these functions.
//
// Symbols: s score (cosine or dot product), z logit, t target, w weight of a row in the loss.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FASTSIM_INLINE __host__ __device__ __forceinline__
#define FASTSIM_UNROLL _Pragma("unroll")
#else
#define FASTSIM_INLINE inline __attribute__((always_inline))
#define FASTSIM_UNROLL _Pragma("GCC unroll 32")
#endif

namespace fastsim {

// The score that marks a left-out pair. It is far below every score, and finite, so that 0 * s
// stays 0.
template <class T>
constexpr T kLeftOut = T(-1e30);

// ---- elementary functions, written so that a loop over them vectorises ----

template <class T>
struct Format;

// Constants of a floating-point type. Adding `shift` to a number of moderate size rounds the number
// to an integer n, and the lowest bits of the sum are n + bias, the exponent bits of 2^n.
// `smallest` and `largest` are the sums for the smallest and the largest n.
template <>
struct Format<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23, bias = 127, log_terms = 8;
  static constexpr float shift = 0x1.8p23f + bias;
  static constexpr float smallest = shift - (bias - 2), largest = shift + bias;
  static constexpr float log2e = 1.44269502f, log2e_rest = 1.92596299e-8f;
};

template <>
struct Format<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52, bias = 1023, log_terms = 17;
  static constexpr double shift = 0x1.8p52 + bias;
  static constexpr double smallest = shift - (bias - 2), largest = shift + bias;
  static constexpr double log2e = 1.4426950408889634, log2e_rest = 2.0355273740931033e-17;
};

FASTSIM_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FASTSIM_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
FASTSIM_INLINE float magnitude(float x) { return __builtin_fabsf(x); }
FASTSIM_INLINE double magnitude(double x) { return __builtin_fabs(x); }

// c0 + c1 x + c2 x^2 + ...
template <class T>
FASTSIM_INLINE T polynomial(T, T c0) {
  return c0;
}
template <class T, class... Rest>
FASTSIM_INLINE T polynomial(T x, T c0, Rest... rest) {
  return fused(polynomial(x, rest...), x, c0);
}

// 2^f for |f| <= 1/2. In float it is the polynomial of degree 6 with the least maximum relative
// error, 2e-9; in double it is the Taylor series.
FASTSIM_INLINE float power_of_two(float f) {
  return polynomial(f, 1.0f, 0.69314721f, 0.240226469f, 0.0555032878f, 0.00961848896f,
                    0.00133999312f, 0.00015345812f);
}
FASTSIM_INLINE double power_of_two(double f) {
  return polynomial(f, 1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158,
                    0.009618129107628477, 0.0013333558146428443, 0.0001540353039338161,
                    1.5252733804059841e-05, 1.3215486790144307e-06, 1.0178086009239699e-07,
                    7.054911620801123e-09, 4.4455382718708116e-10, 2.5678435993488206e-11,
                    1.3691488853904128e-12);
}

// e^(scale x). The error is at most 2 ulp, as if the product scale x were exact. Results below
// twice the smallest normal number become 0, and a NaN stays a NaN. The result is 2^n 2^f with
// scale x log2(e) = n + f and |f| <= 1/2. log2(e) is split into two parts, so that f does not carry
// the rounding error of a large product. A GPU has an instruction for 2^x: its error is 2 ulp plus
// the rounding of x log2(e).
template <class T>
FASTSIM_INLINE T exponential(T x, T scale = T(1)) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) return __expf(scale * x);
#endif
  using F = Format<T>;
  using Bits = typename F::Bits;
  const T factor = scale * F::log2e;
  const T rest = fused(scale, F::log2e, -factor) + scale * F::log2e_rest;
  const T sum = fused(x, factor, F::shift);
  const T f = fused(x, rest, fused(x, factor, F::shift - sum));
  const T largest = F::largest;
  Bits bits, most;
  std::memcpy(&bits, &sum, sizeof(T));
  std::memcpy(&most, &largest, sizeof(T));
  bits = (bits < most ? bits : most) << F::mantissa;  // f keeps a NaN
  T power;
  std::memcpy(&power, &bits, sizeof(T));
  return sum < F::smallest ? T(0) : power_of_two(f) * power;
}

// log(1 + e) for 0 <= e <= 1, computed as 2 artanh(e / (2 + e)): accurate in relative terms down to
// e = 0.
template <class T>
FASTSIM_INLINE T log_one_plus(T e) {
  const T u = e / (T(2) + e);
  const T square = u * u;
  T series = T(0);
  FASTSIM_UNROLL
  for (int k = Format<T>::log_terms - 1; k >= 0; --k) {
    series = fused(series, square, T(1) / T(2 * k + 1));
  }
  return T(2) * u * series;
}

// a / (1 + e) for 0 <= e <= 1. A float is not divided on a CPU, where the division of a vector
// takes as long as 20 multiplications. 1 / (1 + e) is at first the polynomial of degree 2 with the
// least maximum relative error, 1 / 99. The next step, r (1 + h + h^2) with the error h, makes the
// error 1e-6. The last step adds what is left of a: the quotient is rounded as a division would
// round it, or to the neighbour.
template <class T>
FASTSIM_INLINE T divided_by_one_plus(T e, T a) {
#if !defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) {
    const T start = polynomial(e, T(98.0 / 99), T(-80.0 / 99), T(32.0 / 99));
    const T error = fused(-start, e, T(1) - start);
    const T inverse = fused(fused(error, error, error), start, start);
    const T quotient = a * inverse;
    return fused(fused(-quotient, e, a - quotient), inverse, quotient);
  }
#endif
  return a / (T(1) + e);
}

// ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----
// L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.

template <class T>
struct Softmax {
  T scale;

  // The term of one score in a sum of exponentials relative to the score `top`, the maximum.
  // Divided by that sum it is the probability of the score.
  FASTSIM_INLINE T share(T s, T top) const { return exponential(s - top, scale); }
};

// ---- elementwise losses ----

// SigLIP: binary cross entropy of z = scale s + bias against (t + 1) / 2. `score_grad` is dL/dz.
template <class T>
struct Sigmoid {
  T scale, bias;

  FASTSIM_INLINE void operator()(T s, T t, T& loss, T& score_grad) const {
    T e;
    loss = without_logarithm(s, t, e, score_grad);
    loss += log_one_plus(e);
  }

  // The loss without its term log(1 + e), for sums that take one logarithm of a product of many
  // 1 + e.
  FASTSIM_INLINE T without_logarithm(T s, T t, T& e, T& score_grad) const {
    const T z = fused(scale, s, bias);
    e = exponential(-magnitude(z));
    const T label = fused(T(0.5), t, T(0.5)), complement = T(1) - label;
    const T positive_part = T(0.5) * (z + magnitude(z));
    // sigma(z) - label, computed as complement sigma(z) - label sigma(-z), which does not cancel.
    // The larger of sigma(z) and sigma(-z) is 1 / (1 + e), the smaller is e / (1 + e).
    const T up = z < T(0) ? complement * e : complement, down = z < T(0) ? label : label * e;
    score_grad = divided_by_one_plus(e, up - down);
    return fused(-label, z, positive_part);
  }

  // The same for the target -1, in four fifths of the operations.
  FASTSIM_INLINE T of_negative(T s, T& e, T& score_grad) const {
    const T z = fused(scale, s, bias);
    e = exponential(-magnitude(z));
    score_grad = divided_by_one_plus(e, z < T(0) ? e : T(1));
    // The maximum of z and 0. With a second comparison of z, compilers divide both e and 1 by 1 + e
    // before they choose one.
    return T(0.5) * (z + magnitude(z));
  }
};

// Squared error (s - t)^2. `score_grad` is dL/ds.
template <class T>
struct SquaredError {
  // The interface of Sigmoid: there is no logarithm, so e is 0.
  FASTSIM_INLINE T without_logarithm(T s, T t, T& e, T& score_grad) const {
    T loss;
    (*this)(s, t, loss, score_grad);
    e = T(0);
    return loss;
  }

  FASTSIM_INLINE void operator()(T s, T t, T& loss, T& score_grad) const {
    const T difference = s - t;
    loss = difference * difference;
    score_grad = T(2) * difference;
  }
};

// ---- positives against negatives: multi-similarity, circle, NT-Xent ----
// Multi-similarity has two sums of exponentials per row (Softmax): one over the scores of the
// negatives, one over the negated scores of the positives. NT-Xent has one term for each positive:
// softplus(lse of the negatives - z).

// NT-Xent's term of a positive with score s. `log_sum` is the logarithm of the sum of exponentials
// of the negatives relative to the score `top`. `score_grad` is -dL/dz.
template <class T>
struct MultiPositive {
  T scale;

  FASTSIM_INLINE void operator()(T s, T top, T log_sum, T& loss, T& score_grad) const {
    const T x = fused(scale, top - s, log_sum);
    const T e = exponential(-magnitude(x));
    // max(x, 0) + log(1 + e), which is 0 for x = -Inf too: a positive with score Inf.
    loss = (x < T(0) ? T(0) : x) + log_one_plus(e);
    score_grad = divided_by_one_plus(e, x < T(0) ? e : T(1));
  }
};

// Circle loss has two sums of exponentials per row, over values computed from the scores of the
// negatives and of the positives. A value is a weight times a linear function of the score. The
// gradient treats the weight as a constant.
template <class T>
struct Circle {
  T margin;

  FASTSIM_INLINE T negative_weight(T s) const { return s > -margin ? s + margin : T(0); }
  FASTSIM_INLINE T positive_weight(T s) const { return s < 1 + margin ? 1 + margin - s : T(0); }
  FASTSIM_INLINE T negative_value(T s) const { return negative_weight(s) * (s - margin); }
  FASTSIM_INLINE T positive_value(T s) const { return positive_weight(s) * (1 - margin - s); }
};

// ---- CoSENT over a matrix ----
// The state of level l is A_l = lse z and B_l = lse -z over its pairs, each as a maximum and a sum.
// L is the loss. The score gradient of a pair in level l, in units of dL/dz, is
//
//   e^{z + lse_{m>l} B_m - L} - e^{-z + lse_{m<l} A_m - L}
//
// Both exponentials are taken relative to the level's own extremes, `high` of s and `low` of -s, so
// that the factors `up` and `down` carry everything large.

template <class T>
struct Levels {
  T scale;

  FASTSIM_INLINE T score_grad(T s, T high, T up, T low, T down) const {
    return up * exponential(s - high, scale) - down * exponential(-s - low, scale);
  }
};

// ---- selected losses: the closest negative of the triplet loss ----

template <class T>
struct Closest {
  bool semi_hard;

  // Whether a negative with score s may be chosen, given the score of the positive.
  FASTSIM_INLINE bool admits(T s, T positive) const { return !semi_hard || s <= positive; }
};

}  // namespace fastsim
