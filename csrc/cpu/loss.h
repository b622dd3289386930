// A loss over a matrix of scores: its kind, its parameters, and the result of its passes.
#pragma once

#include <string>
#include <unordered_map>

#include "side.h"

namespace fastsim {
namespace {

// The kinds of fastsim/kinds that can run in one operator call, with their names there.
enum class Kind {
  softmax,
  sigmoid,
  squared_error,
  decoupled,
  multi_similarity,
  multi_positive,
  circle,
  debiased,
  distillation,
  hard_triplet,
  semi_hard_triplet,
  margins,
};

inline Kind kind_of(const std::string& name) {
  static const std::unordered_map<std::string, Kind> kinds{
      {"softmax", Kind::softmax},
      {"sigmoid", Kind::sigmoid},
      {"squared_error", Kind::squared_error},
      {"decoupled", Kind::decoupled},
      {"multi_similarity", Kind::multi_similarity},
      {"multi_positive", Kind::multi_positive},
      {"circle", Kind::circle},
      {"debiased", Kind::debiased},
      {"distillation", Kind::distillation},
      {"hard_triplet", Kind::hard_triplet},
      {"semi-hard_triplet", Kind::semi_hard_triplet},
      {"margins", Kind::margins},
  };
  const auto found = kinds.find(name);
  STD_TORCH_CHECK(found != kinds.end(), "fastsim: no loss here of kind ", name);
  return found->second;
}

// The kind and the parameters of a loss. score_grad: whether the scores become score gradients.
struct Loss {
  Kind kind;
  double scale, bias, margin, positive_scale, base;
  bool normalise, symmetric, score_grad;
};

// The loss, and the parts of its derivatives by scale and bias that do not follow from the score
// gradients.
struct Result {
  Sum loss, scale_score_grad, bias_score_grad;

  // Adds the result of more rows.
  void operator+=(const Result& term) {
    loss += term.loss;
    scale_score_grad += term.scale_score_grad;
    bias_score_grad += term.bias_score_grad;
  }
};

// Whether the only target of a row is its positive.
template <class T>
bool one_positive(const Block<T>& b) {
  return !b.row_groups && !b.dense.data;
}

// An error unless the pairs have the targets that the loss requires.
template <class T>
void check_targets(const Block<T>& b, const Loss& loss) {
  switch (loss.kind) {
    case Kind::softmax:
      if (!loss.symmetric && !one_positive(b)) return;
      [[fallthrough]];
    case Kind::decoupled:
    case Kind::hard_triplet:
    case Kind::semi_hard_triplet:
      STD_TORCH_CHECK(b.positives && one_positive(b), "fastsim: kind: wanted positives for it");
      return;
    case Kind::multi_similarity:
    case Kind::multi_positive:
    case Kind::circle:
    case Kind::debiased:
      STD_TORCH_CHECK(b.row_groups, "fastsim: kind: wanted row_groups for it");
      return;
    case Kind::margins:
      STD_TORCH_CHECK(b.positives, "fastsim: kind: wanted positives for it");
      [[fallthrough]];
    default:
      STD_TORCH_CHECK(!one_positive(b), "fastsim: kind: wanted row_groups or dense for it");
  }
}

}  // namespace
}  // namespace fastsim
