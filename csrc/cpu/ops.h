// What the CPU registrations share.
#pragma once

#include "block.h"
#include "tensors.h"

namespace fastsim {

// The kernels for this processor.
const KernelTable& kernels();

// CoSENT over a list of scores (cosent.cpp): loss 0-d float64, score gradient dL/dscore in the scores'
// compute type if given.
void cosent(Tensor scores, Tensor labels, double scale, Tensor loss, Optional score_grad);

// Cosines of paired rows, centred rows, rows against the few columns chosen for each (rows.cpp).
void paired_cosines(Tensor x, Tensor y, Tensor cosines, Tensor inverse);
void paired_cosines_backward(Tensor grad, Tensor x, Tensor y, Tensor cosines, Tensor inverse,
                             Optional grad_x, Optional grad_y);
void centred(Tensor x, Optional y, Tensor rows, Optional columns, Tensor offsets, Tensor largest);
void chosen_rows(Tensor x, Optional y, Tensor columns, bool distances, Tensor values);
void chosen_rows_backward(Tensor grad, Optional values, Tensor x, Optional y, Tensor columns,
                       Optional grad_x, Optional grad_y);

// A loss whose scores are one block, and its gradient (whole.cpp).
void whole(Tensor x, Optional y, Optional positives, Optional row_ids, Optional column_ids,
           Optional row_groups, Optional column_groups, Optional dense, double negative_target,
           int64_t skip, int64_t kind, double scale, double bias, double margin, bool normalise,
           bool symmetric, Tensor weights, Optional grad_x, Optional grad_y, Tensor total,
           Tensor parameters, Optional seen);

}  // namespace fastsim
