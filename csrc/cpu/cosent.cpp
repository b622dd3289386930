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
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "operators.h"
#include "threads.h"

namespace fastsim {
namespace {

constexpr int64_t kPartScores = 1 << 15;  // scores that a thread takes at a time
constexpr int64_t kChunk = 1024;          // scores in a call of the vectorised exponential
constexpr size_t kFewLabels = 256;
constexpr double kWidestSpread = 600;     // e^600 * 2^64 is still finite

// ---- labels as keys ----

// A label as an unsigned key. Keys have the order of the labels.
template <class L>
uint64_t key_of(L label) {
  if constexpr (std::is_floating_point_v<L>) {
    using Bits = std::conditional_t<sizeof(L) == 4, uint32_t, uint64_t>;
    const L value = label + L(0);  // -0 and 0 are one label
    Bits bits;
    std::memcpy(&bits, &value, sizeof bits);
    constexpr Bits sign = Bits(1) << (sizeof(Bits) * 8 - 1);
    return bits & sign ? Bits(~bits) : Bits(bits | sign);
  } else if constexpr (std::is_signed_v<L>) {
    return static_cast<uint64_t>(static_cast<int64_t>(label)) ^ (uint64_t(1) << 63);
  } else {
    return label;
  }
}

// Calls f with a pointer to the labels, of their type.
template <class F>
void with_labels(const Tensor& t, const F& f) {
  const void* data = t.const_data_ptr();
  switch (t.scalar_type()) {
    case ScalarType::Float: return f(static_cast<const float*>(data));
    case ScalarType::Double: return f(static_cast<const double*>(data));
    case ScalarType::Long: return f(static_cast<const int64_t*>(data));
    case ScalarType::Int: return f(static_cast<const int32_t*>(data));
    case ScalarType::Short: return f(static_cast<const int16_t*>(data));
    case ScalarType::Char: return f(static_cast<const int8_t*>(data));
    case ScalarType::Byte: return f(static_cast<const uint8_t*>(data));
    default: STD_TORCH_CHECK(false, "fastsim: label dtype without a kernel");
  }
}

// Numbers the distinct keys of one part of the labels, by a small hash table.
class KeyIds {
 public:
  KeyIds() { slots_.fill(-1); }

  // The id of a key: the number of distinct keys that came before it. -1 if there are kFewLabels
  // other keys already.
  int id(uint64_t key) {
    if (!keys_.empty() && key == keys_[last_]) return last_;
    for (size_t at = (key * 0x9e3779b97f4a7c15u) >> 54;; at = (at + 1) % slots_.size()) {
      if (slots_[at] < 0) {
        if (keys_.size() == kFewLabels) return -1;
        slots_[at] = static_cast<int16_t>(keys_.size());
        keys_.push_back(key);
      }
      if (keys_[slots_[at]] == key) return last_ = slots_[at];
    }
  }

  const std::vector<uint64_t>& keys() const { return keys_; }

 private:
  std::array<int16_t, 1024> slots_;
  std::vector<uint64_t> keys_;
  int last_ = 0;
};

// The scores, their scale, and the least and the largest logit.
template <class T>
struct Logits {
  const T* scores;
  int64_t count;
  double scale, low, high;

  // The number of parts into which the scores are divided for the threads.
  int64_t parts() const { return (count + kPartScores - 1) / kPartScores; }

  // Calls f(part, begin, end) for each part.
  template <class F>
  void for_parts(const F& f) const {
    share_out(parts(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        f(part, part * kPartScores, std::min(count, (part + 1) * kPartScores));
      }
    });
  }

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
  std::vector<std::array<double, 2>> extremes(logits.parts());
  logits.for_parts([&](int64_t part, int64_t begin, int64_t end) {
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

// Computes the loss, and the score gradient if it is not null. Returns false, and writes nothing,
// if there are more than kFewLabels distinct labels.
template <class T>
bool loss_by_label(const Logits<T>& logits, const Tensor& labels, double* loss, T* score_grad) {
  const int64_t parts = logits.parts();
  std::vector<uint8_t> label_ids(logits.count);
  std::vector<KeyIds> part_ids(parts);
  std::vector<uint8_t> overflow(parts, 0);
  with_labels(labels, [&](const auto* label) {
    // If most labels are distinct, the first of them already exceed kFewLabels. Then the rest is
    // not read.
    for (int64_t a = 0; a < std::min(logits.count, 2 * kChunk) && !overflow[0]; ++a) {
      overflow[0] = part_ids[0].id(key_of(label[a])) < 0;
    }
    if (overflow[0]) return;
    logits.for_parts([&](int64_t part, int64_t begin, int64_t end) {
      for (int64_t a = begin; a < end; ++a) {
        const int id = part_ids[part].id(key_of(label[a]));
        if (id < 0) {
          overflow[part] = 1;
          return;
        }
        label_ids[a] = static_cast<uint8_t>(id);
      }
    });
  });
  if (std::find(overflow.begin(), overflow.end(), 1) != overflow.end()) return false;

  std::vector<uint64_t> keys;
  for (const KeyIds& part : part_ids) {
    keys.insert(keys.end(), part.keys().begin(), part.keys().end());
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const size_t count = keys.size();
  if (count > kFewLabels) return false;

  // Sums p and n by part and label. Then adds up the parts in a fixed order.
  std::vector<double> sums(parts * 2 * count, 0.0);
  logits.for_parts([&](int64_t part, int64_t begin, int64_t end) {
    std::array<uint8_t, kFewLabels> rank_of_id;
    const auto& local = part_ids[part].keys();
    for (size_t id = 0; id < local.size(); ++id) {
      rank_of_id[id] = std::lower_bound(keys.begin(), keys.end(), local[id]) - keys.begin();
    }
    double *sum = sums.data() + part * 2 * count, p[kChunk], n[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t size = std::min(kChunk, end - at);
      logits.exponentials(at, size, p, n);
      for (int64_t k = 0; k < size; ++k) {
        const uint8_t l = label_ids[at + k] = rank_of_id[label_ids[at + k]];
        sum[l] += p[k];
        sum[count + l] += n[k];
      }
    }
  });
  std::vector<double> p(count, 0.0), n(count, 0.0), below(count, 0.0), above(count, 0.0);
  for (int64_t part = 0; part < parts; ++part) {
    for (size_t l = 0; l < count; ++l) {
      p[l] += sums[(part * 2) * count + l];
      n[l] += sums[(part * 2 + 1) * count + l];
    }
  }
  for (size_t l = 1; l < count; ++l) below[l] = below[l - 1] + p[l - 1];
  for (size_t l = count - 1; l-- > 0;) above[l] = above[l + 1] + n[l + 1];
  const double spread = std::exp(logits.high - logits.low);
  const double total = spread * std::inner_product(n.begin(), n.end(), below.begin(), 0.0);
  *loss = std::log1p(total);
  if (!score_grad) return true;

  const double coefficient = logits.scale * spread / (1 + total);
  logits.for_parts([&](int64_t, int64_t begin, int64_t end) {
    double p[kChunk], n[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t size = std::min(kChunk, end - at);
      logits.exponentials(at, size, p, n);
      for (int64_t k = 0; k < size; ++k) {
        const uint8_t l = label_ids[at + k];
        score_grad[at + k] = static_cast<T>(coefficient * (p[k] * above[l] - n[k] * below[l]));
      }
    }
  });
  return true;
}

// ---- many labels: sort, then scan ----

// The key of a label, and its index in the list.
struct Entry {
  uint64_t key;
  int64_t index;
};

// Sorts the labels by a radix sort, least significant digit first. A digit that is the same in all
// keys is counted, but moves no entry.
std::vector<Entry> sorted_by_label(const Tensor& labels, int64_t count) {
  constexpr int kBits = 11, kDigits = 6;
  constexpr uint64_t kMask = (1u << kBits) - 1;
  std::vector<Entry> from(count), to(count);
  std::vector<std::array<int64_t, kMask + 1>> starts(kDigits);
  for (auto& digit : starts) digit.fill(0);
  with_labels(labels, [&](const auto* label) {
    for (int64_t a = 0; a < count; ++a) {
      const uint64_t key = key_of(label[a]);
      from[a] = {key, a};
      for (int d = 0; d < kDigits; ++d) ++starts[d][(key >> (d * kBits)) & kMask];
    }
  });
  for (int d = 0; d < kDigits; ++d) {
    auto& start = starts[d];
    if (start[(from[0].key >> (d * kBits)) & kMask] == count) continue;
    int64_t sum = 0;
    for (int64_t& entry : start) sum += std::exchange(entry, sum);
    for (const Entry& entry : from) to[start[(entry.key >> (d * kBits)) & kMask]++] = entry;
    from.swap(to);
  }
  return from;
}

// Calls f(begin, end) for each run of equal labels, in ascending order.
template <class F>
void for_groups(const std::vector<Entry>& order, const F& f) {
  const int64_t count = order.size();
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && order[end].key == order[begin].key;) ++end;
    f(begin, end);
  }
}

// The same in descending order.
template <class F>
void for_groups_backward(const std::vector<Entry>& order, const F& f) {
  for (int64_t end = order.size(), begin; end > 0; end = begin) {
    for (begin = end - 1; begin > 0 && order[begin - 1].key == order[end - 1].key;) --begin;
    f(begin, end);
  }
}

// Computes the loss, and the score gradient if it is not null, from the sorted labels.
template <class T>
void scan(const Logits<T>& logits, const std::vector<Entry>& order, double* loss, T* score_grad) {
  std::vector<double> p(logits.count), n(logits.count);
  logits.for_parts([&](int64_t, int64_t begin, int64_t end) {
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
  if (!wide && loss_by_label(logits, labels, loss, score_grad)) return;
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
