// Where things lie: tiles in the matrix, scores in the registers of threads, bytes in shared
// memory. Constant functions for host and device, so that tests/backends/cuda/layout.cpp can check each
// against its definition.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTSIM_BOTH __host__ __device__ __forceinline__
#else
#define FASTSIM_BOTH inline
#endif

namespace fastsim {

constexpr int kTile = 128;  // rows and columns of a tile
constexpr int kWarp = 32;

// ---- scores in registers ----

// The accumulator of a 16 x 8 block of a warp's product: element e, 0 to 3, of a lane.
FASTSIM_BOTH constexpr int block_row(int lane, int e) { return lane / 4 + 8 * (e / 2); }
FASTSIM_BOTH constexpr int block_column(int lane, int e) { return 2 * (lane % 4) + e % 2; }

// How a group of threads shares a tile: a thread has row_blocks x column_blocks blocks of 16 x 8.
// The epilogue takes the targets and score gradients of the tile in `parts`, and `together` blocks of a row
// at a time.

// 8 warps, 64 x 32 scores each: 32 rows in each half of the tile.
struct PortableShape {
  static constexpr int threads = 256, row_blocks = 4, column_blocks = 4;
  static constexpr int row_warps = 2, column_warps = 4, parts = 2, together = 2;

  FASTSIM_BOTH static constexpr int row_of(int thread, int block, int e) {
    return block / 2 * 64 + thread / kWarp / column_warps * 32 + block % 2 * 16 +
           block_row(thread % kWarp, e);
  }
  FASTSIM_BOTH static constexpr int column_of(int thread, int block, int e) {
    return thread / kWarp % column_warps * 32 + 8 * block + block_column(thread % kWarp, e);
  }
};

// A warpgroup, two products of 64 x 128; warp w has rows 16 w to 16 w + 15 of each.
struct HopperShape {
  static constexpr int threads = 128, row_blocks = 2, column_blocks = 16;
  static constexpr int row_warps = 4, column_warps = 1, parts = 2, together = 4;

  FASTSIM_BOTH static constexpr int row_of(int thread, int block, int e) {
    return 64 * block + thread / kWarp * 16 + block_row(thread % kWarp, e);
  }
  FASTSIM_BOTH static constexpr int column_of(int thread, int block, int e) {
    return 8 * block + block_column(thread % kWarp, e);
  }
};

// The 8 lanes of a warp that share columns reduce `count` values by halves, three times: this is
// the first value, of count / 8 consecutive ones, that stays with the lane.
FASTSIM_BOTH constexpr int kept_value(int lane, int count) {
  return (lane / 16 % 2) * (count / 2) + (lane / 8 % 2) * (count / 4) + (lane / 4 % 2) * (count / 8);
}

// ---- bytes in shared memory ----

// Rows of 128 bytes whose 16-byte chunks are permuted by the row, as TMA and wgmma do it: eight
// rows at one chunk are in eight different groups of banks.
FASTSIM_BOTH constexpr int swizzled128(int row, int chunk) {
  return row * 128 + (chunk ^ (row % 8)) * 16;
}

// The same for rows of 64 bytes, two of which make a line of banks.
FASTSIM_BOTH constexpr int swizzled64(int row, int chunk) {
  return row * 64 + (chunk ^ (row / 2 % 4)) * 16;
}

// A tile of score gradients in boxes of 64 rows by 128 bytes, as TMA stores them.
FASTSIM_BOTH constexpr int box_byte(int row, int chunk) {
  return chunk / 8 * (64 * 128) + swizzled128(row, chunk % 8);
}

// Elements from row to row of a tile in staging memory that no instruction lays out: the rows of
// block_row then start in different banks.
constexpr int kPitch = kTile + 8;

// The descriptor of an operand of wgmma in such rows of 128 bytes, eight rows 1024 bytes apart;
// the next 32 bytes of depth are two further, 64 rows kDescriptorRows further.
FASTSIM_BOTH constexpr uint64_t descriptor(uint32_t address) {
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
constexpr int kDescriptorDepth = 32 >> 4, kDescriptorRows = 64 * 128 >> 4;

// ---- tiles ----

struct Place {
  int row, column;
};

// Tile `index` of rows x columns: bands of `band` rows, column by column within a band, so that
// the tiles alive at one time share few rows and columns of the operands in the L2 cache.
FASTSIM_BOTH constexpr Place tile_place(int64_t index, int rows, int columns, int band) {
  const int64_t in_band = static_cast<int64_t>(band) * columns;
  const int first = static_cast<int>(index / in_band) * band;
  const int height = rows - first < band ? rows - first : band;
  const int within = static_cast<int>(index % in_band);
  return {first + within % height, within / height};
}

}  // namespace fastsim
