// Distillation: compares the softmax of a row's scores with the softmax of its targets, the scores
// of a teacher.
#pragma once

#include "isa.h"
#include "pairs.h"

namespace fastsim::FASTSIM_ISA {
namespace {

// The largest target of a row.
template <class T>
T largest_target(const Block<T>& b, int64_t row) {
  T top = kLeftOut<T>;
  for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
    T targets[kChunk];
    load_targets(b, row, at, n, targets);
    const T chunk_top = maximum(targets, n);
    top = chunk_top > top ? chunk_top : top;
  });
  return top;
}

// The sums of a chunk, relative to the maxima: of the exponentials of the scores and of the
// teacher's scores, and of the logits of both, weighted by the teacher's exponentials.
template <class T>
struct DistillationSums {
  T sum = 0, teacher_sum = 0, own_logits = 0, teacher_logits = 0;
};

// A function with arguments by value: a loop in a lambda would read its captures again for each
// score, and would not be vectorised. The sums use no `fused`, which clang does not take for a sum.
template <class T>
FASTSIM_INLINE DistillationSums<T> distillation_sums(const T* s, const T* targets, int64_t count,
                                                     Softmax<T> student, Softmax<T> teacher, T top,
                                                     T teacher_top) {
  T sum = 0, teacher_sum = 0, own_logits = 0, teacher_logits = 0;
#pragma omp simd reduction(+ : sum, teacher_sum, own_logits, teacher_logits)
  for (int64_t j = 0; j < count; ++j) {
    const T p = teacher.share(targets[j], teacher_top);
    sum += student.share(s[j], top);
    teacher_sum += p;
    own_logits += p * (student.scale * (s[j] - top));
    teacher_logits += p * (teacher.scale * (targets[j] - teacher_top));
  }
  return {sum, teacher_sum, own_logits, teacher_logits};
}

// Adds the scores of a block to the states of its rows.
template <class T>
void distillation_forward(const Block<T>& b, DistillationForward<T> a, int64_t begin, int64_t end) {
  const Softmax<T> student{a.scale}, teacher{a.positive_scale};
  for (int64_t row = begin; row < end; ++row) {
    const T* s = b.scores + row * b.stride;
    const T top = maximum(s, b.columns), teacher_top = largest_target(b, row);
    double sum = 0, teacher_sum = 0, own_logits = 0, teacher_logits = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      const auto sums =
          distillation_sums<T>(s + at, targets, n, student, teacher, top, teacher_top);
      sum += sums.sum;
      teacher_sum += sums.teacher_sum;
      own_logits += sums.own_logits;
      teacher_logits += sums.teacher_logits;
    });
    merge({a.max, a.sum}, row, top, sum, a.scale);
    // The logits above are relative to the maxima, so that large maxima cost no digits.
    const double teacher_scale = a.positive_scale;
    own_logits += teacher_sum * (double(a.scale) * double(top));
    teacher_logits += teacher_sum * (teacher_scale * double(teacher_top));
    // All three sums over the teacher's exponentials are relative to its maximum.
    const double state_top = a.teacher_max[row];
    const double merged_top = teacher_top > state_top ? double(teacher_top) : state_top;
    const double state_factor = exponential(teacher_scale * (state_top - merged_top));
    const double block_factor = exponential(teacher_scale * (teacher_top - merged_top));
    a.teacher_max[row] = merged_top;
    a.teacher_sum[row] = a.teacher_sum[row] * state_factor + teacher_sum * block_factor;
    a.own_logits[row] = a.own_logits[row] * state_factor + own_logits * block_factor;
    a.teacher_logits[row] = a.teacher_logits[row] * state_factor + teacher_logits * block_factor;
  }
}

// Replaces the scores of a chunk by score gradients: `weight` times the exponential of the score,
// minus `teacher_weight` times that of the teacher's score.
template <class T>
FASTSIM_INLINE void difference_of_shares(T* s, const T* targets, int64_t count, Softmax<T> student,
                                         Softmax<T> teacher, T top, T teacher_top, T weight,
                                         T teacher_weight) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const T teacher_term = teacher_weight * teacher.share(targets[j], teacher_top);
    s[j] = weight * student.share(s[j], top) - teacher_term;
  }
}

// Turns the scores of a block into score gradients.
template <class T>
void distillation_score_grad(const Block<T>& b, DistillationScoreGrad<T> a, int64_t begin,
                             int64_t end) {
  const Softmax<T> student{a.scale}, teacher{a.positive_scale};
  for (int64_t row = begin; row < end; ++row) {
    const T top = a.top[row], weight = a.weight[row];
    const T teacher_top = a.teacher_top[row], teacher_weight = a.teacher_weight[row];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      T* s = b.scores + row * b.stride + at;
      difference_of_shares<T>(s, targets, n, student, teacher, top, teacher_top, weight,
                              teacher_weight);
    });
  }
}

}  // namespace
}  // namespace fastsim::FASTSIM_ISA
