#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const LevelsForward&);
template void launch_tiles(const Launch&, const LevelsScoreGrad&);
}  // namespace fastsim
