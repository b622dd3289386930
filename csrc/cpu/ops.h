// What the CPU registrations share.
#pragma once

#include "block.h"
#include "tensors.h"

namespace fastsim {

// The kernels for this processor.
const KernelTable& kernels();

// CoSENT over a list of scores (ranking.cpp): loss 0-d float64, slope dL/dscore in the scores'
// compute type if given.
void cosent(Tensor scores, Tensor labels, double scale, Tensor loss, Optional slope);

}  // namespace fastsim
