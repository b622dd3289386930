// The engine for float16 operands on sm_90a: persistent clusters of two blocks; in each block one
// producer, which brings operands by bulk copies in four stages, and two groups of consumers,
// which take whole tiles in turns, so that the epilogue of one runs under the products of the
// other. The blocks of a cluster take tiles above one another: each brings half of the columns'
// operand to both.
#pragma once

#include "tile.cuh"

namespace fastsim {
namespace hopper {

constexpr int kThreads = 384, kGroup = 128, kCluster = 2, kStages = 4;
constexpr int kRowBytes = 128;                        // of an operand in a stage
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kHalfTile = kTile / kCluster;           // rows of the box that a block shares
constexpr int kStagingBytes = kTile / HopperShape::parts * kPitch * sizeof(float);
static_assert(kStagingBytes % 1024 == 0);
constexpr int kStaging = kStages * kStageBytes;
constexpr int kScratchAt = kStaging + 2 * kStagingBytes;
constexpr int kBarriers = kScratchAt + 2 * kScratch * static_cast<int>(sizeof(float));
constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;
// Named barriers of a block, one for each group: its own threads meet; its turn to multiply.
constexpr int kGroupBarrier = 1, kTurnBarrier = 3;

// Boxes of the tensor maps: 128 bytes by so many rows.
constexpr int kRowsOfX = kTile, kRowsOfY = kHalfTile, kRowsOfPanel = kTile / HopperShape::parts;

}  // namespace hopper

#if defined(FASTSIM_HOPPER_CODE)
namespace hopper {

struct Tile : TileBase<HopperShape, __half> {
  const TensorMap& panel;
  int barrier;

  FASTSIM_DEVICE void sync() const { group_sync(barrier, HopperShape::threads); }
  FASTSIM_DEVICE void acquire_staging() const {
    if (thread == 0) bulk_store_read();
    sync();
  }

  FASTSIM_DEVICE void store(const Scores& s) const {
    constexpr int size = sizeof(Element), boxes = kTile * size / kRowBytes;
#pragma unroll
    for (int part = 0; part < HopperShape::parts; ++part) {
      acquire_staging();
#pragma unroll
      for (int j = 0; j < HopperShape::column_blocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int row = HopperShape::row_of(thread, part, e) - part * kRowsOfPanel;
          // Column block j is chunk j of the row.
          char* to = staging + box_byte(row, j) + HopperShape::column_of(thread, 0, e) * size;
          store_two(reinterpret_cast<Element*>(to), s[part][j][e], s[part][j][e + 1]);
        }
      }
      bulk_fence();
      sync();
      if (thread == 0) {
        const int row = tile_row * kTile + part * kRowsOfPanel;
        for (int box = 0; box < boxes; ++box) {
          const int column = tile_column * kTile + box * (kRowBytes / size);
          bulk_store(panel, column, row,
                     shared_address(staging) + box * kRowsOfPanel * kRowBytes);
        }
        bulk_store_commit();
      }
    }
  }
};

// The protocol. Step n is in stage n % kStages and belongs to phase n / kStages of its barriers.
// * Of each stage a barrier `full` (1 arrival, its producer's, and the bytes of a stage) and a
//   barrier `empty` (1 arrival from each consumer warp of both blocks).
// * The producer of a block issues step n once n - kStages is given back by both blocks, as it
//   writes to both. Bytes of the other block may come before its own arrival, never a phase early.
// * A group takes step n once it is full, and gives it back once its product has read it.
// * A wait by parity is right if its phase is the barrier's present one or the one before. For a
//   producer it is: it waits for every phase in order. For the groups it is if steps are taken in
//   order, so each begins its tile only when the other has seen all steps of its own full.
// tests/backends/cuda/pipeline.py searches every interleaving of this.

// The stages as both sides count them: `step` runs over all tiles of the block.
struct Pipeline {
  uint32_t memory;

  FASTSIM_DEVICE uint32_t x(int step) const { return memory + step % kStages * kStageBytes; }
  FASTSIM_DEVICE uint32_t y(int step) const { return x(step) + kOperandBytes; }
  FASTSIM_DEVICE uint32_t full(int step) const { return memory + kBarriers + step % kStages * 8; }
  FASTSIM_DEVICE uint32_t empty(int step) const { return full(step) + kStages * 8; }
  FASTSIM_DEVICE int parity(int step) const { return step / kStages % 2; }
};

// A pair of tiles above one another. The groups of a block take the work in turns.
struct Work {
  Place place;
  int steps;  // of its product
  bool first, last;
};

// f(work) for the work of this cluster, one by one.
template <class F>
FASTSIM_DEVICE void for_work(const Grid& grid, int steps, const F& f) {
  const int64_t count = grid.count(kCluster), stride = block_count() / kCluster;
  const int64_t begin = block_index() / kCluster;
  for (int64_t i = begin; i < count; i += stride) {
    const Place place = grid.place(i, kCluster);
    const int own = grid.has_product(place, kCluster) ? steps : 0;
    f(Work{place, own, i == begin, i + stride >= count});
  }
}

FASTSIM_DEVICE void produce(const TensorMap& x, const TensorMap& y, const Grid& grid, int steps,
                            const Pipeline& pipe, int rank) {
  constexpr int depth = kRowBytes / sizeof(__half);
  int step = 0;
  for_work(grid, steps, [&](const Work& work) {
    const int row = grid.row0 + (work.place.row * kCluster + rank) * kTile;
    const int column = grid.column0 + work.place.column * kTile + rank * kHalfTile;
    for (int k = 0; k < work.steps; ++k, ++step) {
      barrier_wait(pipe.empty(step), pipe.parity(step) ^ 1);
      barrier_expect(pipe.full(step), kStageBytes);
      bulk_load(pipe.x(step), x, k * depth, row, pipe.full(step));
      bulk_load_shared(pipe.y(step) + rank * kHalfTile * kRowBytes, y, k * depth, column,
                       pipe.full(step), (1 << kCluster) - 1);
    }
  });
}

// Gives the stage back to the producers of both blocks, which write into it.
FASTSIM_DEVICE void release(const Pipeline& pipe, int step, int thread) {
  if (thread % kWarp < kCluster) barrier_arrive(pipe.empty(step), thread % kWarp);
}

// The order of the groups, who hand the tensor cores over: each begins its products when the
// other has begun all of its own, and has seen their stages full.
FASTSIM_DEVICE void await_turn(int group, const Work& work) {
  if (!work.first) group_sync(kTurnBarrier + group, 2 * kGroup);
}
FASTSIM_DEVICE void pass_turn(int group, const Work& work) {
  if (!work.last) group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup);
}

// Begins the products of all steps; at the end only the last is under way.
FASTSIM_DEVICE void begin_products(const Pipeline& pipe, int step, int count, int thread,
                                   Tile::Scores& s) {
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    barrier_wait(pipe.full(step + k), pipe.parity(step + k));
    const uint64_t x = descriptor(pipe.x(step + k)), y = descriptor(pipe.y(step + k));
    group_product_begin();
#pragma unroll
    for (int piece = 0; piece < kRowBytes / 32; ++piece) {
#pragma unroll
      for (int i = 0; i < HopperShape::row_blocks; ++i) {
        group_multiply(s[i], x + i * kDescriptorRows + piece * kDescriptorDepth,
                       y + piece * kDescriptorDepth);
      }
    }
    group_product_commit();
    group_product_wait<1>();
    if (k > 0) release(pipe, step + k - 1, thread);
  }
}

FASTSIM_DEVICE void end_products(const Pipeline& pipe, int step, int count, int thread) {
  group_product_wait<0>();
  if (count > 0) release(pipe, step + count - 1, thread);
}

template <class Epilogue>
FASTSIM_DEVICE void consume(const TensorMap& panel, const Grid& grid, int steps,
                            const Pipeline& pipe, int rank, int group, const Epilogue& epilogue) {
  char* memory = shared_memory();
  char* staging = memory + kStaging + group * kStagingBytes;
  float* scratch = reinterpret_cast<float*>(memory + kScratchAt) + group * kScratch;
  const int thread = thread_index() % kGroup;
  int step = 0, turn = 0;
  for_work(grid, steps, [&](const Work& work) {
    if (turn == group) {
      const int row = work.place.row * kCluster + rank;
      Tile tile{{grid, thread, row, work.place.column, staging, scratch},
                panel,
                kGroupBarrier + group};
      Tile::Scores s{};
      await_turn(group, work);
      begin_products(pipe, step, work.steps, thread, s);
      pass_turn(group, work);
      end_products(pipe, step, work.steps, thread);
      epilogue(tile, s);
    }
    step += work.steps;
    turn ^= 1;
  });
  if (thread == 0) bulk_store_wait();
}

template <class Epilogue>
FASTSIM_DEVICE void run(const TensorMap& x, const TensorMap& y, const TensorMap& panel,
                        const Grid& grid, int steps, const Epilogue& epilogue) {
  const Pipeline pipe{shared_address(shared_memory())};
  const int rank = cluster_rank(), group = thread_index() / kGroup;
  if (thread_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(pipe.full(stage), 1);
      barrier_init(pipe.empty(stage), kCluster * kGroup / kWarp);
    }
    barrier_init_fence();
  }
  cluster_sync();
  if (group == 0) {
    fewer_registers<40>();
    if (thread_index() == 0) {
      produce(x, y, grid, steps, pipe, rank);
    }
  } else {
    more_registers<232>();
    consume(panel, grid, steps, pipe, rank, group - 1, epilogue);
  }
  cluster_sync();  // no block ends while the other may write to it
}

}  // namespace hopper
#endif  // sm_90a code

}  // namespace fastsim
