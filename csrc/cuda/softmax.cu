#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const SoftmaxForward&);
template void launch_tiles(const Launch&, const SoftmaxScoreGrad&);
}  // namespace fastsim
