"""The number of blocks of a kernel that a multiprocessor holds at a time."""

# NVIDIA (CUDA programming guide, compute capabilities): bytes of shared memory and warps of a
# multiprocessor. A block takes 1 KB more shared memory than the kernel asks for. A multiprocessor
# has 65,536 registers, which warps get in units of 256.
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
SHARED |= dict.fromkeys(("sm_86", "sm_89", "sm_120"), 100 << 10)
WARPS = {name: 48 if size == 100 << 10 else 64 for name, size in SHARED.items()}
TENSOR_COLUMNS = 512  # of the tensor memory of sm_100
# AMD (instruction set guides): registers of a lane for all waves of a SIMD, the unit in which waves
# get them, bytes of shared memory, most waves of a SIMD. There are four SIMDs, on RDNA in a pair of
# compute units.
AMD = {"gfx942": (512, 8, 64 << 10, 8), "gfx1100": (1536, 24, 128 << 10, 16)}


def resident(architecture, registers, shared, warps, columns=0):
    """The number of blocks that fit.

    registers: of a thread. shared: bytes of a block. warps: of a block. columns: of tensor memory.
    """
    if architecture in AMD:
        file, unit, memory, most = AMD[architecture]
        waves = min(most, file // (-(-registers // unit) * unit))
        return min(4 * waves // warps, memory // max(shared, 1))
    block_registers = -(-registers // 8) * 8 * 32 * warps
    limits = [
        65536 // block_registers,
        SHARED[architecture] // (shared + 1024),
        WARPS[architecture] // warps,
    ]
    if columns:
        limits.append(TENSOR_COLUMNS // columns)
    return min(limits)
