// The mathematics of each loss on one score: the logit, what a row or column keeps of it, and the
// score gradient dL/ds. Plain scalar functions of values, for host and device, without torch headers; an
// engine decides how scores arrive and in which order (csrc/cpu vectorises loops over them).
//
// Vocabulary: s score (cosine), z logit, t target, w the weight of a row in the loss.
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

// A pair that takes no part: far below every cosine, finite so that 0 * s stays 0.
template <class T>
constexpr T kLeftOut = T(-1e30);

// ---- elementary functions, written so that a loop over them vectorises ----

template <class T>
struct Format;

template <>
struct Format<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23, bias = 127, exp_degree = 7, log_terms = 8;
  static constexpr float exp_lowest = -87.33f, exp_highest = 88.37f;
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};

template <>
struct Format<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52, bias = 1023, exp_degree = 13, log_terms = 17;
  static constexpr double exp_lowest = -708.3, exp_highest = 709.4;
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
};

FASTSIM_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FASTSIM_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
FASTSIM_INLINE float magnitude(float x) { return __builtin_fabsf(x); }
FASTSIM_INLINE double magnitude(double x) { return __builtin_fabs(x); }
FASTSIM_INLINE float nearest(float x) { return __builtin_rintf(x); }
FASTSIM_INLINE double nearest(double x) { return __builtin_rint(x); }

// e^x within 2 ulp; exactly 0 below the smallest normal number, NaN for NaN.
// x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite), e^r by its Taylor series. A GPU has an
// instruction for 2^x: e^x within 2 ulp and the rounding of x log2(e).
template <class T>
FASTSIM_INLINE T exponential(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) return __expf(x);
#endif
  using F = Format<T>;
  using Bits = typename F::Bits;
  const T clamped = x > F::exp_highest ? F::exp_highest : x;  // a NaN stays one, but not in n
  const T n = nearest((clamped > F::exp_lowest ? clamped : F::exp_lowest) * T(1.4426950408889634));
  T r = fused(n, -F::ln2_high, clamped);
  r = fused(n, -F::ln2_low, r);
  T series = T(1);
  FASTSIM_UNROLL
  for (int k = F::exp_degree; k >= 1; --k) series = fused(series, r * (T(1) / T(k)), T(1));
  const Bits power = (static_cast<Bits>(n) + F::bias) << F::mantissa;
  T scale;
  std::memcpy(&scale, &power, sizeof(T));
  return x < F::exp_lowest ? T(0) : series * scale;
}

// log(1 + e) for 0 <= e <= 1: 2 artanh(e / (2 + e)), exact in relative terms down to e = 0.
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

// ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----
// L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.

template <class T>
struct Softmax {
  T scale;

  // What one score adds to a sum of exponentials whose maximum score is `top`; divided by that
  // sum, its probability.
  FASTSIM_INLINE T share(T s, T top) const { return exponential(scale * (s - top)); }
};

// ---- elementwise losses ----

// SigLIP: binary cross entropy of z = scale s + bias against (t + 1) / 2; the score gradient is dL/dz.
template <class T>
struct Sigmoid {
  T scale, bias;

  FASTSIM_INLINE void operator()(T s, T t, T& loss, T& score_grad) const {
    T e;
    loss = without_logarithm(s, t, e, score_grad);
    loss += log_one_plus(e);
  }

  // The loss less log(1 + e), for sums that take one logarithm of a product.
  FASTSIM_INLINE T without_logarithm(T s, T t, T& e, T& score_grad) const {
    const T z = fused(scale, s, bias);
    e = exponential(-magnitude(z));
    const T wanted = fused(T(0.5), t, T(0.5));
    const T positive = T(0.5) * (z + magnitude(z));
    score_grad = (z < T(0) ? e : T(1)) / (T(1) + e) - wanted;
    return fused(-wanted, z, positive);
  }
};

// Squared error (s - t)^2; the score gradient is dL/ds.
template <class T>
struct SquaredError {
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

// ---- positives against negatives: multi-similarity, NT-Xent ----
// Multi-similarity is two sums of exponentials by row (Softmax), of the negatives' scores and of
// the negated positives'. NT-Xent has a term for each positive: softplus(lse of the negatives - z).

// The negatives' sum of exponentials relative to the score `top` has the logarithm `log_sum`; the
// score gradient is -dL/dz.
template <class T>
struct MultiPositive {
  T scale;

  FASTSIM_INLINE void operator()(T s, T top, T log_sum, T& loss, T& score_grad) const {
    const T x = fused(scale, top - s, log_sum);
    const T e = exponential(-magnitude(x));
    loss = T(0.5) * (x + magnitude(x)) + log_one_plus(e);
    score_grad = (x < T(0) ? e : T(1)) / (T(1) + e);
  }
};

// Circle loss has two sums of exponentials of what it makes of the scores: `value` is that, and
// `weight` the factor whose gradient is not taken, of a negative and of a positive.
template <class T>
struct Circle {
  T margin;

  FASTSIM_INLINE T negative_weight(T s) const { return s > -margin ? s + margin : T(0); }
  FASTSIM_INLINE T positive_weight(T s) const { return s < 1 + margin ? 1 + margin - s : T(0); }
  FASTSIM_INLINE T negative_value(T s) const { return negative_weight(s) * (s - margin); }
  FASTSIM_INLINE T positive_value(T s) const { return positive_weight(s) * (1 - margin - s); }
};

// ---- CoSENT over a matrix ----
// Level l keeps A_l = lse z and B_l = lse -z, each as maximum and sum. The score gradient in level l, in
// units of dL/dz, is e^{z + lse_{m>l} B_m - L} - e^{-z + lse_{m<l} A_m - L}; both exponentials are
// taken relative to the level's own extremes, `high` of s and `low` of -s, so that the factors
// `up` and `down` carry everything large.

template <class T>
struct Levels {
  T scale;

  FASTSIM_INLINE T score_grad(T s, T high, T up, T low, T down) const {
    return up * exponential(scale * (s - high)) - down * exponential(scale * (-s - low));
  }
};

// ---- selected losses: the closest negative of the triplet loss ----

template <class T>
struct Closest {
  bool semi_hard;

  // Whether a negative's score may be chosen, given the score of the positive.
  FASTSIM_INLINE bool admits(T s, T positive) const { return !semi_hard || s <= positive; }
};

}  // namespace fastsim
