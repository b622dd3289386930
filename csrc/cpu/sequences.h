// Queries and documents as sequences of tokens, and the checks of the MaxSim operators' arguments.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "arguments.h"

namespace fastsim {

// Sequences of tokens. The tokens of sequence i are the rows [starts[i], starts[i + 1]) of `rows`
// that `mask` keeps; a null mask keeps all. tokens: the number of all rows.
struct Sequences {
  Matrix rows;
  int64_t count, tokens;
  const int64_t* starts;
  const bool* mask;

  // Appends the row numbers of the tokens of sequence i.
  void append(int64_t i, std::vector<int64_t>& to) const {
    for (int64_t row = starts[i]; row < starts[i + 1]; ++row) {
      if (!mask || mask[row]) to.push_back(row);
    }
  }
};

// Checks tensors and makes sequences of them. name: the argument that `starts` is. mask_name: that
// of `mask`.
inline Sequences sequences(const Tensor& rows, const Tensor& starts, const char* name,
                           const Optional& mask, const char* mask_name) {
  STD_TORCH_CHECK(rows.stride(1) == 1 || rows.size(1) == 1,
                  "fastsim: x, y: wanted the numbers of a row side by side");
  const int64_t tokens = rows.size(0), count = starts.numel() - 1;
  const int64_t* first = input_at_least<int64_t>(starts, name, 1);
  for (int64_t i = 0; i <= count; ++i) {
    STD_TORCH_CHECK(first[i] >= (i ? first[i - 1] : 0) && first[i] <= tokens,
                    "fastsim: ", name, ": wanted ascending tokens of ", tokens, ", got ", first[i],
                    " at ", i);
  }
  STD_TORCH_CHECK(first[0] == 0 && first[count] == tokens, "fastsim: ", name,
                  ": wanted them from 0 to ", tokens, ", got ", first[0], " to ", first[count]);
  return {matrix(rows), count, tokens, first, input<bool>(mask, mask_name, tokens)};
}

// The number of rows of the longest sequence, at least 1.
inline int64_t longest_of(const Sequences& s) {
  int64_t longest = 1;
  for (int64_t i = 0; i < s.count; ++i) longest = std::max(longest, s.starts[i + 1] - s.starts[i]);
  return longest;
}

// The number K of documents that each query is scored against: the second size of the scores (B, K)
// or of a tensor of their shape. With `own` each query has K documents of its own.
inline int64_t documents_of(const Tensor& scores, const char* name, const Sequences& x,
                            const Sequences& y, bool own) {
  const int64_t documents = scores.dim() == 2 ? scores.size(1) : -1;
  if (documents < 0 || scores.size(0) != x.count ||
      (own ? x.count * documents : documents) != y.count) {
    refuse(name, scores, "a row for each of ", x.count, " queries, of ", y.count,
           own ? " documents in all" : " documents");
  }
  return documents;
}

// Checks winners (K, P), and returns whether they are int32. They may be int16 if int16 has a
// number for every token of a document.
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
