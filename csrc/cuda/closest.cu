#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const ClosestForward&);
template void launch_tiles(const Launch&, const Diagonal&);
}  // namespace fastsim
