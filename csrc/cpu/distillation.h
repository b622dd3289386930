// Distillation: the softmax of a row's scores against that of its targets, a teacher's scores.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

template <class T>
T largest_target(const Block<T>& b, int64_t row) {
  T top = kLeftOut<T>;
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    load_targets(b, row, at, n, targets);
    const T here = maximum(targets, n);
    top = here > top ? here : top;
  });
  return top;
}

// The sums of a chunk relative to the maxima. Everything by value: in a lambda the loop would read its
// captures anew for each score, and not be vectorised. No `fused`: clang takes it for no sum.
template <class T>
struct DistillationSums {
  T sum = 0, teacher_sum = 0, own = 0, teacher = 0;
};

template <class T>
FASTSIM_INLINE DistillationSums<T> distillation_sums(const T* s, const T* targets, int64_t count,
                                                     Softmax<T> own, Softmax<T> teacher, T top,
                                                     T teacher_top) {
  T part = 0, weight = 0, along = 0, teacher_along = 0;
#pragma omp simd reduction(+ : part, weight, along, teacher_along)
  for (int64_t j = 0; j < count; ++j) {
    const T p = teacher.share(targets[j], teacher_top);
    part += own.share(s[j], top);
    weight += p;
    along += p * (own.scale * (s[j] - top));
    teacher_along += p * (teacher.scale * (targets[j] - teacher_top));
  }
  return {part, weight, along, teacher_along};
}

template <class T>
void distillation_forward(const Block<T>& b, DistillationForward<T> a, int64_t begin, int64_t end) {
  const Softmax<T> own{a.scale}, teacher{a.positive_scale};
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    const T top = maximum(s, b.columns), teacher_top = largest_target(b, row);
    double sum = 0, teacher_sum = 0, own_logits = 0, teacher_logits = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      const auto here = distillation_sums<T>(s + at, targets, n, own, teacher, top, teacher_top);
      sum += here.sum;
      teacher_sum += here.teacher_sum;
      own_logits += here.own;
      teacher_logits += here.teacher;
    });
    merge({a.max, a.sum}, row, top, sum, a.scale);
    // Summed relative to the maxima, so that nothing is lost where they are large.
    const double scale = a.positive_scale;
    own_logits += teacher_sum * (double(a.scale) * double(top));
    teacher_logits += teacher_sum * (scale * double(teacher_top));
    // The teacher's three sums are relative to one maximum.
    const double old = a.teacher_max[row];
    const double now = teacher_top > old ? double(teacher_top) : old;
    const double before = exponential(scale * (old - now));
    const double here = exponential(scale * (teacher_top - now));
    a.teacher_max[row] = now;
    a.teacher_sum[row] = a.teacher_sum[row] * before + teacher_sum * here;
    a.own_logits[row] = a.own_logits[row] * before + own_logits * here;
    a.teacher_logits[row] = a.teacher_logits[row] * before + teacher_logits * here;
  }
}

template <class T>
FASTSIM_INLINE void difference_of_shares(T* s, const T* targets, int64_t count, Softmax<T> own,
                                         Softmax<T> teacher, T top, T teacher_top, T weight,
                                         T teacher_weight) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const T taught = teacher_weight * teacher.share(targets[j], teacher_top);
    s[j] = weight * own.share(s[j], top) - taught;
  }
}

template <class T>
void distillation_score_grad(const Block<T>& b, DistillationScoreGrad<T> a, int64_t begin,
                             int64_t end) {
  const Softmax<T> own{a.scale}, teacher{a.positive_scale};
  for (int64_t row = begin; row < end; ++row) {
    const T top = a.top[row], weight = a.weight[row];
    const T teacher_top = a.teacher_top[row], teacher_weight = a.teacher_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      T* s = b.scores + row * b.stride + at;
      difference_of_shares<T>(s, targets, n, own, teacher, top, teacher_top, weight, teacher_weight);
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
