// CoSENT over a list of scores: the loss and its score gradient in one call.
//
//   L = log(1 + sum_{label_a > label_b} exp(z_b - z_a)),  z = scale * score.
//
// Let low and high be the least and the largest logit z. With p = e^{z - high} and n = e^{low - z},
// both in (0, 1], the sum factors:
//
//   total = e^{high - low} sum_a n_a P_a,  P_a = sum of p over smaller labels,
//   dL/dz_a = e^{high - low} / (1 + total) * (p_a N_a - n_a P_a),
//   N_a = sum of n over larger labels.
//
// All of this is computed in double. There are three algorithms. With few distinct labels, p and n
// are summed by label, without a sort. With many, the labels are sorted by one radix sort, and a
// scan in each direction follows. If a sum might exceed the range of a double, the scans are in
// logarithms.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "labels.h"
#include "operators.h"

namespace fastsim {
namespace {

constexpr int64_t kChunk = 1024;       // scores in a call of the vectorised exponential
constexpr double kWidestSpread = 600;  // e^600 * 2^64 is still finite

// The scores, their scale, and the least and the largest logit.
template <class T>
struct Logits {
  const T* scores;
  int64_t count;
  double scale, low, high;

  // Computes p and n of the scores [first, first + size).
  void exponentials(int64_t first, int64_t size, double* p, double* n) const {
    for (int64_t k = 0; k < size; ++k) {
      const double z = scale * scores[first + k];
      p[k] = z - high;
      n[k] = low - z;
    }
    kernels().of_double.exponentials(p, p, size);
    kernels().of_double.exponentials(n, n, size);
  }
};

// Finds the least and the largest logit. Both are NaN if a score is not finite.
template <class T>
Logits<T> logits_of(const T* scores, int64_t count, double scale) {
  Logits<T> logits{scores, count, scale, 0, 0};
  std::vector<std::array<double, 2>> extremes(part_count(count));
  for_parts(count, [&](int64_t part, int64_t begin, int64_t end) {
    T low = scores[begin], high = low, check = 0;
    for (int64_t a = begin; a < end; ++a) {
      low = std::min(low, scores[a]);
      high = std::max(high, scores[a]);
      check += scores[a] * T(0);
    }
    // `check` is 0, or NaN if a score is not finite.
    const double first = scale * low + check, second = scale * high + check;
    extremes[part] = {first < second ? first : second, first < second ? second : first};
  });
  logits.low = extremes[0][0];
  logits.high = extremes[0][1];
  for (const auto& [low, high] : extremes) {
    logits.low = low < logits.low || low != low ? low : logits.low;
    logits.high = high > logits.high || high != high ? high : logits.high;
  }
  return logits;
}

// ---- few distinct labels ----

// The sums of p and of n over the entries of each distinct label, (labels,) each.
struct LabelSums {
  std::vector<double> p, n;
};

// Adds up p and n by part and label, then the parts in a fixed order.
template <class T>
LabelSums sums_by_label(const Logits<T>& logits, const DistinctLabels& labels) {
  const int64_t parts = part_count(logits.count);
  const size_t count = labels.count();
  std::vector<double> sums(parts * 2 * count, 0.0);
  for_parts(logits.count, [&](int64_t part, int64_t begin, int64_t end) {
    double *sum = sums.data() + part * 2 * count, p[kChunk], n[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t size = std::min(kChunk, end - at);
      logits.exponentials(at, size, p, n);
      for (int64_t k = 0; k < size; ++k) {
        const uint8_t l = labels.rank(part, at + k);
        sum[l] += p[k];
        sum[count + l] += n[k];
      }
    }
  });
  LabelSums total{std::vector<double>(count, 0.0), std::vector<double>(count, 0.0)};
  for (int64_t part = 0; part < parts; ++part) {
    for (size_t l = 0; l < count; ++l) {
      total.p[l] += sums[(part * 2) * count + l];
      total.n[l] += sums[(part * 2 + 1) * count + l];
    }
  }
  return total;
}

// Computes the loss, and the score gradient if it is not null, from few distinct labels.
template <class T>
void loss_by_label(const Logits<T>& logits, const DistinctLabels& labels, double* loss,
                   T* score_grad) {
  const auto [p, n] = sums_by_label(logits, labels);
  const size_t count = labels.count();
  std::vector<double> below(count, 0.0), above(count, 0.0);
  for (size_t l = 1; l < count; ++l) below[l] = below[l - 1] + p[l - 1];
  for (size_t l = count - 1; l-- > 0;) above[l] = above[l + 1] + n[l + 1];
  const double spread = std::exp(logits.high - logits.low);
  const double total = spread * std::inner_product(n.begin(), n.end(), below.begin(), 0.0);
  *loss = std::log1p(total);
  if (!score_grad) return;

  const double coefficient = logits.scale * spread / (1 + total);
  for_parts(logits.count, [&](int64_t part, int64_t begin, int64_t end) {
    double p[kChunk], n[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t size = std::min(kChunk, end - at);
      logits.exponentials(at, size, p, n);
      for (int64_t k = 0; k < size; ++k) {
        const uint8_t l = labels.rank(part, at + k);
        score_grad[at + k] = static_cast<T>(coefficient * (p[k] * above[l] - n[k] * below[l]));
      }
    }
  });
}

// ---- many labels: a scan of the sorted list ----

// Computes the loss, and the score gradient if it is not null, from the sorted labels.
template <class T>
void scan(const Logits<T>& logits, const std::vector<Entry>& order, double* loss, T* score_grad) {
  std::vector<double> p(logits.count), n(logits.count);
  for_parts(logits.count, [&](int64_t, int64_t begin, int64_t end) {
    T gathered[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t size = std::min(kChunk, end - at);
      for (int64_t k = 0; k < size; ++k) gathered[k] = logits.scores[order[at + k].index];
      Logits<T> chunk = logits;
      chunk.scores = gathered;
      chunk.exponentials(0, size, p.data() + at, n.data() + at);
    }
  });
  std::vector<double> below_terms(score_grad ? logits.count : 0);
  double below = 0, total = 0;
  for_groups(order, [&](int64_t begin, int64_t end) {
    double group = 0;
    for (int64_t k = begin; k < end; ++k) {
      const double pairs = n[k] * below;
      total += pairs;
      group += p[k];
      if (score_grad) below_terms[k] = pairs;
    }
    below += group;
  });
  const double spread = std::exp(logits.high - logits.low);
  total *= spread;
  *loss = std::log1p(total);
  if (!score_grad) return;
  const double coefficient = logits.scale * spread / (1 + total);
  double above = 0;
  for_groups_backward(order, [&](int64_t begin, int64_t end) {
    double group = 0;
    for (int64_t k = begin; k < end; ++k) {
      group += n[k];
      score_grad[order[k].index] = static_cast<T>(coefficient * (p[k] * above - below_terms[k]));
    }
    above += group;
  });
}

// log(e^a + e^b). -inf stands for an empty sum.
double log_add(double a, double b) {
  const double top = std::max(a, b);
  return top == -std::numeric_limits<double>::infinity()
             ? top
             : top + std::log1p(std::exp(-std::abs(a - b)));
}

// The same as `scan`, with logarithms of all sums.
template <class T>
void scan_logarithms(const Logits<T>& logits, const std::vector<Entry>& order, double* loss,
                     T* score_grad) {
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  const auto logit = [&](int64_t k) { return logits.scale * logits.scores[order[k].index]; };
  std::vector<double> below_terms(logits.count);
  double below = kEmpty, total = 0;  // total begins as log(1)
  for_groups(order, [&](int64_t begin, int64_t end) {
    double group = kEmpty;
    for (int64_t k = begin; k < end; ++k) {
      below_terms[k] = below - logit(k);
      total = log_add(total, below_terms[k]);
      group = log_add(group, logit(k));
    }
    below = log_add(below, group);
  });
  *loss = total;
  if (!score_grad) return;
  double above = kEmpty;
  for_groups_backward(order, [&](int64_t begin, int64_t end) {
    double group = kEmpty;
    for (int64_t k = begin; k < end; ++k) {
      group = log_add(group, -logit(k));
      score_grad[order[k].index] = static_cast<T>(
          logits.scale * (std::exp(above + logit(k) - total) - std::exp(below_terms[k] - total)));
    }
    above = log_add(above, group);
  });
}

// Chooses the algorithm, and computes the loss, and the score gradient if it is not null.
template <class T>
void loss_of_list(const T* scores, int64_t count, const Tensor& labels, double scale, double* loss,
                  T* score_grad) {
  *loss = 0;
  if (count == 0) return;
  const auto logits = logits_of(scores, count, scale);
  const double spread = logits.high - logits.low;
  if (!(spread < std::numeric_limits<double>::infinity())) {  // a score is not finite
    *loss = std::numeric_limits<double>::quiet_NaN();
    if (score_grad) std::fill(score_grad, score_grad + count, static_cast<T>(*loss));
    return;
  }
  const bool wide = spread > kWidestSpread;
  if (!wide) {
    const DistinctLabels distinct(labels, count);
    if (distinct.are_few()) return loss_by_label(logits, distinct, loss, score_grad);
  }
  const std::vector<Entry> order = sorted_by_label(labels, count);
  wide ? scan_logarithms(logits, order, loss, score_grad) : scan(logits, order, loss, score_grad);
}

// Sets `loss` (), float64. If score_grad (N,) is given, sets it to dL/dscore. scores (N,) and
// score_grad have the compute type. labels (N,).
void cosent(Tensor scores, Tensor labels, double scale, Tensor loss, Optional score_grad) {
  const int64_t count = scores.numel();
  check(labels, "labels", labels.scalar_type(), count);
  double* const out = output<double>(loss, "loss", 1);
  with_type(scores, "scores", [&](auto type) {
    using T = decltype(type);
    T* const grad = output<T>(score_grad, "score_grad", count);
    loss_of_list(input<T>(scores, "scores", count), count, labels, scale, out, grad);
  });
}

std::vector<Operator> operators() {
  return {
      OPERATOR(cosent, "(Tensor scores, Tensor labels, float scale, Tensor(loss!) loss, "
                       "Tensor(score_grad!)? score_grad) -> ()"),
  };
}

}  // namespace
}  // namespace fastsim

REGISTER_OPERATORS(fastsim::operators)
