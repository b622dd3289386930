// Layouts: the order of the tiles of a matrix, the scores in the registers of threads, the bytes in
// shared memory. All functions are constexpr, for host and device, so that
// tests/backends/cuda/layout.cpp can check each against its definition.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTSIM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTSIM_HOST_DEVICE inline
#endif

namespace fastsim {

constexpr int kTile = 128;  // rows and columns of a tile
constexpr int kWarp = 32;

// ---- scores in registers ----

// A fragment is the accumulator of a 16 x 8 block of a warp's product. Each lane holds four
// elements of it: block_row and block_column are the row and column of its element e, 0 to 3.
FASTSIM_HOST_DEVICE constexpr int block_row(int lane, int e) { return lane / 4 + 8 * (e / 2); }
FASTSIM_HOST_DEVICE constexpr int block_column(int lane, int e) { return 2 * (lane % 4) + e % 2; }

// A shape says how `threads` threads share a tile. They are row_warps x column_warps warps. A
// thread has elements of row_blocks x column_blocks fragments. A row block consists of the
// fragments of the same 16 rows, a column block of those of the same 8 columns. row_of and
// column_of are the row and column in the tile of element e of a fragment. An epilogue takes the
// targets and score gradients of a tile in `parts` parts of kTile / parts rows. Its loops take the
// column blocks of a row block in groups of `blocks_per_check`, and check before each group whether
// columns are left.

// 8 warps, each with 64 x 32 scores: 32 rows of each half of the tile.
struct PortableShape {
  static constexpr int threads = 256, row_blocks = 4, column_blocks = 4;
  static constexpr int row_warps = 2, column_warps = 4, parts = 2, blocks_per_check = 2;

  FASTSIM_HOST_DEVICE static constexpr int row_of(int thread, int block, int e) {
    return block / 2 * 64 + thread / kWarp / column_warps * 32 + block % 2 * 16 +
           block_row(thread % kWarp, e);
  }
  FASTSIM_HOST_DEVICE static constexpr int column_of(int thread, int block, int e) {
    return thread / kWarp % column_warps * 32 + 8 * block + block_column(thread % kWarp, e);
  }
};

// A warp group with two products of 64 x 128 scores. Warp w has rows 16 w to 16 w + 15 of each.
struct HopperShape {
  static constexpr int threads = 128, row_blocks = 2, column_blocks = 16;
  static constexpr int row_warps = 4, column_warps = 1, parts = 2, blocks_per_check = 4;

  FASTSIM_HOST_DEVICE static constexpr int row_of(int thread, int block, int e) {
    return 64 * block + thread / kWarp * 16 + block_row(thread % kWarp, e);
  }
  FASTSIM_HOST_DEVICE static constexpr int column_of(int thread, int block, int e) {
    return 8 * block + block_column(thread % kWarp, e);
  }
};

// The 8 lanes of a warp that share columns reduce `count` values each. In each of three steps, a
// lane keeps half of its values, so that count / 8 consecutive values stay with it. Returns the
// index of the first of these.
FASTSIM_HOST_DEVICE constexpr int first_lane_value(int lane, int count) {
  return (lane / 16 % 2) * (count / 2) + (lane / 8 % 2) * (count / 4) +
         (lane / 4 % 2) * (count / 8);
}

// ---- bytes in shared memory ----

// The first byte of a 16-byte chunk of a row, for rows of 128 bytes. The chunks of a row are
// permuted as in the 128-byte swizzle of TMA and wgmma: chunk c of eight consecutive rows is in
// eight different groups of banks.
FASTSIM_HOST_DEVICE constexpr int swizzled128(int row, int chunk) {
  return row * 128 + (chunk ^ (row % 8)) * 16;
}

// The same as swizzled128 for rows of 64 bytes. Two rows take all banks once.
FASTSIM_HOST_DEVICE constexpr int swizzled64(int row, int chunk) {
  return row * 64 + (chunk ^ (row / 2 % 4)) * 16;
}

// The first byte of a 16-byte chunk of a row of score gradients. These are in boxes of 64 rows by
// 128 bytes, as TMA stores them.
FASTSIM_HOST_DEVICE constexpr int box_byte(int row, int chunk) {
  return chunk / 8 * (64 * 128) + swizzled128(row, chunk % 8);
}

// The elements from one row of a tile to the next in staging memory, where no instruction
// prescribes the layout. With this distance the rows of a fragment (block_row) start in different
// banks.
constexpr int kPitch = kTile + 8;

// The wgmma descriptor of an operand whose rows have 128 bytes, laid out by swizzled128. Groups of
// eight rows are 1024 bytes apart. The descriptor of the next 32 bytes of depth is kDescriptorDepth
// larger, the descriptor of the next 64 rows is kDescriptorRows larger.
FASTSIM_HOST_DEVICE constexpr uint64_t descriptor(uint32_t address) {
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
constexpr int kDescriptorDepth = 32 >> 4, kDescriptorRows = 64 * 128 >> 4;

// ---- tiles ----

// The row and column of a tile, counted in tiles, or of a stack of tiles (Grid), where the row is
// counted in stacks.
struct Position {
  int row, column;
};

// The position of tile `index` of rows x columns tiles. Tiles are numbered by bands of `band` rows
// of tiles, and column by column within a band. The tiles that run at the same time then need few
// rows and columns of the operands, which they share in the L2 cache.
FASTSIM_HOST_DEVICE constexpr Position tile_position(int64_t index, int rows, int columns,
                                                     int band) {
  const int64_t tiles_of_band = static_cast<int64_t>(band) * columns;
  const int first_row = static_cast<int>(index / tiles_of_band) * band;
  const int height = rows - first_row < band ? rows - first_row : band;
  const int band_index = static_cast<int>(index % tiles_of_band);
  return {first_row + band_index % height, band_index / height};
}

}  // namespace fastsim
