// csrc/cuda/layout.h against plain definitions; prints nothing and returns 0 where all agree.
#include "layout.h"

#include <cstdio>
#include <set>
#include <utility>

using namespace fastsim;

namespace {

int failures = 0;

void expect(bool right, const char* what) {
  if (!right) std::printf("wrong: %s\n", what), ++failures;
}

// Every score of a tile belongs to exactly one register of one thread, and the lanes of a row or
// column are those that the reductions take together.
template <class Shape>
void check_shape(const char* name) {
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < Shape::threads; ++thread) {
    const int lane = thread % 32, warp = thread / 32;
    for (int i = 0; i < Shape::row_blocks; ++i) {
      for (int j = 0; j < Shape::column_blocks; ++j) {
        for (int e = 0; e < 4; ++e) {
          const int row = Shape::row_of(thread, i, e), column = Shape::column_of(thread, j, e);
          seen.insert({row, column});
          // The PTX manual: groupID = lane >> 2, row groupID or groupID + 8, column
          // threadID_in_group * 2 + (i & 1).
          expect(row % 16 == lane / 4 + (e >= 2 ? 8 : 0), name);
          expect(column % 8 == lane % 4 * 2 + (e & 1), name);
          expect(Shape::row_of(warp / Shape::column_warps * Shape::column_warps * 32 + lane, i, e) ==
                     row, name);  // rows depend on the warp's row
          expect(Shape::column_of(warp % Shape::column_warps * 32 + lane, j, e) == column, name);
          expect(row / (kTile / Shape::parts) ==
                     (Shape::parts == 1 ? 0 : i / (Shape::row_blocks / Shape::parts)), name);
        }
      }
    }
  }
  expect(seen.size() == kTile * kTile && seen.rbegin()->first == kTile - 1, name);
  expect(Shape::threads == 32 * Shape::row_warps * Shape::column_warps, name);
}

// Reduction by halves over the lanes 4 apart, followed by hand.
void check_kept(int count) {
  for (int lane = 0; lane < 32; ++lane) {
    int first = 0, size = count;
    for (int mask = 16; mask >= 4; mask /= 2) {
      size /= 2;
      if (lane & mask) first += size;
    }
    expect(first_lane_value(lane, count) == first, "first_lane_value");
  }
}

void check_swizzles() {
  for (int row = 0; row < 128; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      // Address bits 4 to 6 exclusive-or bits 7 to 9; for rows of 64 bytes 4 and 5 with 7 and 8.
      const int wide = row * 128 + chunk * 16;
      expect(swizzled128(row, chunk) == (wide ^ ((wide >> 7 & 7) << 4)), "swizzled128");
      if (chunk < 4) {
        const int narrow = row * 64 + chunk * 16;
        expect(swizzled64(row, chunk) == (narrow ^ ((narrow >> 7 & 3) << 4)), "swizzled64");
      }
    }
  }
  // Eight rows at one chunk touch all 32 banks.
  for (int row = 0; row < 64; row += 8) {
    for (int chunk = 0; chunk < 4; ++chunk) {
      std::set<int> wide, narrow;
      for (int r = row; r < row + 8; ++r) {
        wide.insert(swizzled128(r, chunk) % 128);
        narrow.insert(swizzled64(r, chunk) % 128);
      }
      expect(wide.size() == 8 && narrow.size() == 8, "banks");
    }
  }
  std::set<int> boxes;
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < 16; ++chunk) {
      const int at = box_byte(row, chunk);
      boxes.insert(at);
      expect(at / 8192 == chunk / 8 && at % 8192 / 128 == row, "box_byte");
    }
  }
  expect(boxes.size() == 64 * 16 && *boxes.rbegin() < 64 * 256, "box_byte");
}

void check_descriptor() {
  const uint64_t d = descriptor(0x1c400);
  expect((d & 0x3fff) << 4 == 0x1c400, "descriptor start");
  expect((d >> 32 & 0x3fff) << 4 == 1024, "descriptor stride");
  expect(d >> 62 == 1, "descriptor swizzle");
  expect((descriptor(0x1c400 + 32) - d) == kDescriptorDepth, "descriptor depth");
  expect((descriptor(0x1c400 + 64 * 128) - d) == kDescriptorRows, "descriptor rows");
}

// Every tile once; the tiles of a band of rows come one after the other.
void check_order(int rows, int columns, int band) {
  std::set<std::pair<int, int>> seen;
  int last = 0;
  for (int64_t i = 0; i < int64_t{rows} * columns; ++i) {
    const Position p = tile_position(i, rows, columns, band);
    expect(p.row >= 0 && p.row < rows && p.column >= 0 && p.column < columns, "tile_position range");
    expect(p.row / band >= last, "tile_position band");
    last = p.row / band;
    seen.insert({p.row, p.column});
  }
  expect(seen.size() == static_cast<size_t>(rows) * columns, "tile_position");
}

static_assert(tile_position(3, 2, 5, 16).row == 1 && tile_position(3, 2, 5, 16).column == 1);

}  // namespace

int main() {
  check_shape<PortableShape>("portable shape");
  check_shape<HopperShape>("hopper shape");
  check_kept(2 * PortableShape::column_blocks);
  check_kept(2 * HopperShape::column_blocks);
  check_swizzles();
  check_descriptor();
  for (int rows : {1, 2, 7, 16, 33}) {
    for (int columns : {1, 3, 40}) {
      for (int band : {1, 8, 16}) check_order(rows, columns, band);
    }
  }
  // Past 2^31 tiles of a row of bands.
  const Position far = tile_position((int64_t{1} << 33) + 5, 1 << 18, 1 << 18, 16);
  expect(int64_t{far.row / 16} * 16 * (1 << 18) + int64_t{far.column} * 16 + far.row % 16 ==
             (int64_t{1} << 33) + 5, "tile_position far");
  return failures != 0;
}
