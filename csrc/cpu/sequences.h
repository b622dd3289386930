// Queries and documents that are sequences of tokens, as the MaxSim operators are given them.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "arguments.h"

namespace fastsim {

// Sequences of tokens: the rows [starts[i], starts[i + 1]) of `rows`, those that `mask` keeps.
struct Sequences {
  Matrix rows;
  int64_t count, tokens;
  const int64_t* starts;
  const bool* mask;

  // Appends the numbers of the rows of sequence i.
  void append(int64_t i, std::vector<int64_t>& to) const {
    for (int64_t row = starts[i]; row < starts[i + 1]; ++row) {
      if (!mask || mask[row]) to.push_back(row);
    }
  }
};

// name: of the starts; name_of_mask: of the mask.
inline Sequences sequences(const Tensor& rows, const Tensor& starts, const char* name,
                           const Optional& mask, const char* name_of_mask) {
  STD_TORCH_CHECK(rows.stride(1) == 1 || rows.size(1) == 1,
                  "fastsim: x, y: wanted the numbers of a row side by side");
  const int64_t tokens = rows.size(0), count = starts.numel() - 1;
  const int64_t* first = input_of_most<int64_t>(starts, name, 1);
  for (int64_t i = 0; i <= count; ++i) {
    STD_TORCH_CHECK(first[i] >= (i ? first[i - 1] : 0) && first[i] <= tokens,
                    "fastsim: ", name, ": wanted ascending tokens of ", tokens, ", got ", first[i],
                    " at ", i);
  }
  STD_TORCH_CHECK(first[0] == 0 && first[count] == tokens, "fastsim: ", name,
                  ": wanted them from 0 to ", tokens, ", got ", first[0], " to ", first[count]);
  return {matrix(rows), count, tokens, first, input<bool>(mask, name_of_mask, tokens)};
}

inline int64_t longest_of(const Sequences& s) {
  int64_t longest = 1;
  for (int64_t i = 0; i < s.count; ++i) longest = std::max(longest, s.starts[i + 1] - s.starts[i]);
  return longest;
}

// Of how many documents (B, K) has the scores of each query, or what is of their shape.
inline int64_t documents_of(const Tensor& scores, const char* name, const Sequences& x,
                            const Sequences& y, bool own) {
  const int64_t each = scores.dim() == 2 ? scores.size(1) : -1;
  if (each < 0 || scores.size(0) != x.count || (own ? x.count * each : each) != y.count) {
    refuse(name, scores, "a row for each of ", x.count, " queries, of ", y.count,
           own ? " documents in all" : " documents");
  }
  return each;
}

// Whether winners (K, P) are of int32, or else of int16, if that has a number for every token of a
// document.
inline bool check_winners(const Tensor& winners, int64_t documents, int64_t tokens,
                          const Sequences& y) {
  const bool wide = winners.scalar_type() == ScalarType::Int;
  check(winners, "winners", wide ? ScalarType::Int : ScalarType::Short, documents * tokens);
  const int64_t longest = longest_of(y), most = 1 + std::numeric_limits<int16_t>::max();
  if (!wide && longest > most) {
    refuse("winners", winners, "Int for a document of ", longest, " tokens");
  }
  return wide;
}

}  // namespace fastsim
