// The labels of a list: as keys in the order of the labels, as the numbers of few distinct labels,
// and sorted.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "threads.h"

namespace fastsim {

constexpr size_t kFewLabels = 256;

// The entries of a list are divided into parts of kPartEntries for the threads.
constexpr int64_t kPartEntries = 1 << 15;

inline int64_t part_count(int64_t entries) { return ceil_div(entries, kPartEntries); }

// Calls f(part, begin, end) for each part of a list of `entries` entries.
template <class F>
void for_parts(int64_t entries, const F& f) {
  share_out(part_count(entries), 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      f(part, part * kPartEntries, std::min(entries, (part + 1) * kPartEntries));
    }
  });
}

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
    default: refuse("labels", t, "integers, float32 or float64");
  }
}

// ---- few distinct labels ----

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

// The distinct labels of a list, if there are at most kFewLabels.
class DistinctLabels {
 public:
  DistinctLabels(const Tensor& labels, int64_t entries)
      : ids_(entries), part_ids_(part_count(entries)), few_(number_parts(labels)) {
    if (!few_) return;
    for (const KeyIds& part : part_ids_) {
      keys_.insert(keys_.end(), part.keys().begin(), part.keys().end());
    }
    std::sort(keys_.begin(), keys_.end());
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
    few_ = keys_.size() <= kFewLabels;
    if (few_) rank_parts();
  }

  // Whether there are at most kFewLabels. If there are more, count() and rank() may not be used.
  bool are_few() const { return few_; }

  // The number of distinct labels.
  size_t count() const { return keys_.size(); }

  // The number of distinct labels that are less than the label of an entry of a part.
  uint8_t rank(int64_t part, int64_t entry) const { return ranks_[part][ids_[entry]]; }

 private:
  // Numbers the labels of each part in the order in which they come. Returns false if a part has
  // more than kFewLabels.
  bool number_parts(const Tensor& labels) {
    const int64_t entries = ids_.size();
    std::vector<uint8_t> overflow(part_ids_.size(), 0);
    with_labels(labels, [&](const auto* label) {
      // If most labels are distinct, the first of them already exceed kFewLabels. Then the rest is
      // not read.
      for (int64_t a = 0; a < std::min(entries, kFirst) && !overflow[0]; ++a) {
        overflow[0] = part_ids_[0].id(key_of(label[a])) < 0;
      }
      if (overflow[0]) return;
      for_parts(entries, [&](int64_t part, int64_t begin, int64_t end) {
        for (int64_t a = begin; a < end; ++a) {
          const int id = part_ids_[part].id(key_of(label[a]));
          if (id < 0) {
            overflow[part] = 1;
            return;
          }
          ids_[a] = static_cast<uint8_t>(id);
        }
      });
    });
    return std::find(overflow.begin(), overflow.end(), 1) == overflow.end();
  }

  // Finds the rank of each id of each part.
  void rank_parts() {
    ranks_.resize(part_ids_.size());
    for (size_t part = 0; part < ranks_.size(); ++part) {
      const auto& keys = part_ids_[part].keys();
      for (size_t id = 0; id < keys.size(); ++id) {
        ranks_[part][id] = std::lower_bound(keys_.begin(), keys_.end(), keys[id]) - keys_.begin();
      }
    }
  }

  static constexpr int64_t kFirst = 2048;  // labels that are read before the threads begin

  std::vector<uint8_t> ids_;  // the number of each entry's label in its part
  std::vector<KeyIds> part_ids_;
  std::vector<uint64_t> keys_;
  std::vector<std::array<uint8_t, kFewLabels>> ranks_;
  bool few_;
};

// ---- many labels, sorted ----

// The key of a label, and its index in the list.
struct Entry {
  uint64_t key;
  int64_t index;
};

// Sorts the labels by a radix sort, least significant digit first. A digit that is the same in all
// keys is counted, but moves no entry.
inline std::vector<Entry> sorted_by_label(const Tensor& labels, int64_t count) {
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

}  // namespace fastsim
