#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const SoftmaxFold&);
template void launch_tiles(const Launch&, const SoftmaxSlope&);
}  // namespace fastsim
