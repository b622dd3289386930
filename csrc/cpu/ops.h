// What the CPU registrations share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "block.h"

namespace fastsim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// The kernels for this processor.
const KernelTable& kernels();

// CoSENT over a list of scores (ranking.cpp): loss 0-d float64, slope dL/dscore in the scores'
// compute type if given.
void cosent(Tensor scores, Tensor labels, double scale, Tensor loss, Optional slope);

}  // namespace fastsim
