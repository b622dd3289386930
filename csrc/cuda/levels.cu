#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const LevelsFold&);
template void launch_tiles(const Launch&, const LevelsSlope&);
}  // namespace fastsim
