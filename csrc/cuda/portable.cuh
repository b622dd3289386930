// The engine for every GPU from sm_80 on. Each thread block has one tile. It loads the operands by
// cp.async into three stages, and each of its warps multiplies. Two thread blocks run on a
// multiprocessor, so that the epilogue of one overlaps the products of the other. Consumer cards
// have 100 KB of shared memory, of which each block takes 48 KB and the system 1 KB a block.
#pragma once

#include "tile.cuh"

namespace fastsim {
namespace portable {

constexpr int kStages = 3;
constexpr int kRowBytes = 64;  // bytes of an operand's row in a stage
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
// The epilogue has its staging memory and its scratch memory in the place of the stages.
constexpr int kScratchOffset = kTile / PortableShape::parts * kPitch * sizeof(float);
static_assert(kScratchOffset + kScratch * sizeof(float) <= kSharedBytes);
static_assert(2 * (kSharedBytes + 1024) <= 100 << 10);

template <class Element>
struct Tile : TileBase<PortableShape, Element> {
  using Base = TileBase<PortableShape, Element>;
  Panel panel;

  FASTSIM_DEVICE void sync() const { block_sync(); }
  FASTSIM_DEVICE void acquire_staging() const { block_sync(); }

  // Writes the score gradients to the panel, through shared memory, so that whole lines are
  // written. Each row of a panel is padded to whole chunks of 16 bytes.
  FASTSIM_DEVICE void store(const typename Base::Scores& s) const {
    constexpr int chunk = 16 / sizeof(Element), parts = PortableShape::parts;
    constexpr int height = kTile / parts, blocks = PortableShape::row_blocks / parts;
    Element* staged = reinterpret_cast<Element*>(this->staging);
    Element* out = static_cast<Element*>(panel.data);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      acquire_staging();
#pragma unroll
      for (int i = part * blocks; i < (part + 1) * blocks; ++i) {
#pragma unroll
        for (int j = 0; j < PortableShape::column_blocks; ++j) {
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            const int row = PortableShape::row_of(this->thread, i, e) - part * height;
            const int column = PortableShape::column_of(this->thread, j, e);
            store_two(staged + row * kPitch + column, s[i][j][e], s[i][j][e + 1]);
          }
        }
      }
      sync();
      for (int i = this->thread; i < height * kTile / chunk; i += PortableShape::threads) {
        const int r = i / (kTile / chunk), c = i % (kTile / chunk) * chunk;
        const int row = this->row0() + part * height + r, column = this->column0() + c;
        if (!this->in_rows(row) || !this->in_columns(column)) continue;
        const int64_t index =
            (row - this->grid.row0) * panel.stride + (column - this->grid.column0);
        *reinterpret_cast<uint4*>(out + index) =
            *reinterpret_cast<const uint4*>(staged + r * kPitch + c);
      }
    }
  }
};

// ---- products ----

// A product has the type of the operands' elements. multiply() adds the product of the fragments a
// and (b0, b1) of the operands, 32 bytes deep, to the fragment d of the scores.
struct Half {
  using Element = __half;
  FASTSIM_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    multiply_half(d, a, b0, b1);
  }
};
struct Tf32 {
  using Element = float;
  FASTSIM_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    multiply_tf32(d, a, b0, b1);
  }
};
struct Full {
  using Element = float;
};

using Scores = TileBase<PortableShape, float>::Scores;

// Adds the products of a stage's operands x and y to the scores.
template <class Product>
FASTSIM_DEVICE void multiply_stage(Product, const char* x, const char* y, int thread, Scores& s) {
  const int lane = thread % kWarp, matrix = lane / 8, matrix_row = lane % 8;
  const int first = thread / kWarp * kWarp, column0 = PortableShape::column_of(first, 0, 0);
  const uint32_t x_address = shared_address(x), y_address = shared_address(y);
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint32_t a[PortableShape::row_blocks][4];
#pragma unroll
    for (int i = 0; i < PortableShape::row_blocks; ++i) {
      const int row = PortableShape::row_of(first, i, 0) + matrix % 2 * 8 + matrix_row;
      load_matrices(a[i], x_address + swizzled64(row, 2 * piece + matrix / 2));
    }
#pragma unroll
    for (int j = 0; j < PortableShape::column_blocks; j += 2) {
      uint32_t b[4];
      const int row = column0 + 8 * j + matrix / 2 * 8 + matrix_row;
      load_matrices(b, y_address + swizzled64(row, 2 * piece + matrix % 2));
#pragma unroll
      for (int i = 0; i < PortableShape::row_blocks; ++i) {
        Product::multiply(s[i][j], a[i], b[0], b[1]);
        Product::multiply(s[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The same for products in full float32: each thread computes its own scores with FMA.
FASTSIM_DEVICE void multiply_stage(Full, const char* x, const char* y, int thread, Scores& s) {
#pragma unroll 1
  for (int k = 0; k < kRowBytes / 8; ++k) {
    float2 b[PortableShape::column_blocks][2];
#pragma unroll
    for (int j = 0; j < PortableShape::column_blocks; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = PortableShape::column_of(thread, j, odd);
        b[j][odd] = *reinterpret_cast<const float2*>(y + swizzled64(row, k / 2) + k % 2 * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < PortableShape::row_blocks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = PortableShape::row_of(thread, i, e);
        const float2 a = *reinterpret_cast<const float2*>(x + swizzled64(row, k / 2) + k % 2 * 8);
#pragma unroll
        for (int j = 0; j < PortableShape::column_blocks; ++j) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            float& out = s[i][j][e + odd];
            out = fused(a.x, b[j][odd].x, out);
            out = fused(a.y, b[j][odd].y, out);
          }
        }
      }
    }
  }
}

// Starts copies of the tile's rows of both operands to a stage, for one step of their depth. Rows
// past the end are zeros.
FASTSIM_DEVICE void load_stage(const Operands& o, char* stage, int row0, int column0, int step,
                               int thread) {
#pragma unroll
  for (int i = 0; i < 2 * kTile * 4 / PortableShape::threads; ++i) {
    const int index = thread + i * PortableShape::threads, chunk = index % 4, line = index / 4;
    const bool is_x = line < kTile;
    const int row = is_x ? row0 + line : column0 + line - kTile;
    const bool inside = row < (is_x ? o.x_rows : o.y_rows);
    const char* source = static_cast<const char*>(is_x ? o.x : o.y) +
                         (inside ? row : 0) * o.row_bytes + int64_t{step} * kRowBytes + chunk * 16;
    copy_async(shared_address(stage) + (is_x ? 0 : kOperandBytes) + swizzled64(line % kTile, chunk),
               source, inside);
  }
}

// Adds the products of `steps` steps of depth to the scores of the tile at (row0, column0).
template <class Product>
FASTSIM_DEVICE void multiply(const Operands& o, int row0, int column0, int steps, int thread,
                             Scores& s) {
  char* stages = shared_memory();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load_stage(o, stages + step * kStageBytes, row0, column0, step, thread);
    copy_async_commit();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    block_sync();  // the stage is there, and all threads have read the one before it
    const int next = step + kStages - 1;
    if (next < steps) {
      load_stage(o, stages + next % kStages * kStageBytes, row0, column0, next, thread);
    }
    copy_async_commit();
    const char* stage = stages + step % kStages * kStageBytes;
    multiply_stage(Product{}, stage, stage + kOperandBytes, thread, s);
  }
  block_sync();  // no copy is under way, and all threads have read the last stage
}

template <class Product, class Epilogue>
FASTSIM_DEVICE void run(const Operands& operands, const Grid& grid, const Panel& panel,
                        const Epilogue& epilogue) {
  const Position position = grid.stack_position(block_index(), 1);
  char* memory = shared_memory();
  Tile<typename Product::Element> tile{{grid, thread_index(), position.row, position.column, memory,
                                        reinterpret_cast<float*>(memory + kScratchOffset)},
                                       panel};
  const int steps =
      grid.has_product(position, 1) ? static_cast<int>(operands.row_bytes / kRowBytes) : 0;
  Scores s{};
  multiply<Product>(operands, tile.row0(), tile.column0(), steps, tile.thread, s);
  epilogue(tile, s);
}

}  // namespace portable
}  // namespace fastsim
