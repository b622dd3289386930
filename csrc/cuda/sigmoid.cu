#include "launch.cuh"

namespace fastsim {
template void launch_tiles(const Launch&, const SigmoidBoth&);
template void launch_tiles(const Launch&, const SquaredErrorBoth&);
}  // namespace fastsim
