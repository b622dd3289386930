#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const SigmoidPass&);
template void launch_tiles(const Launch&, const SquaredErrorPass&);
}  // namespace fastsim
