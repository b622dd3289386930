// The engine for float16 operands on sm_90a. It runs persistent clusters of two thread blocks. Each
// thread block has one producer, which loads operands by TMA into a pipeline of four stages, and
// two consumer warp groups. These take whole tiles in turns, so that the epilogue of one overlaps
// the products of the other. The two blocks of a cluster take tiles one above the other, which have
// the same columns: each block loads half of the columns' operand for both.
#pragma once

#include "tile.cuh"

namespace fastsim {
namespace hopper {

// The threads of a thread block and of a warp group, the thread blocks of a cluster, and the stages
// of the pipeline.
constexpr int kThreads = 384, kGroup = 128, kCluster = 2, kStages = 4;
constexpr int kRowBytes = 128;  // bytes of an operand's row in a stage
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kHalfTile = kTile / kCluster;  // rows of y that a block loads for the cluster
constexpr int kStagingBytes = kTile / HopperShape::parts * kPitch * sizeof(float);
static_assert(kStagingBytes % 1024 == 0);
constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kScratchOffset = kStagingOffset + 2 * kStagingBytes;
constexpr int kBarriersOffset = kScratchOffset + 2 * kScratch * static_cast<int>(sizeof(float));
constexpr int kSharedBytes = kBarriersOffset + 2 * kStages * 8;
// Named barriers of a thread block, two for each warp group. The numbers are those of group 0: at
// kGroupBarrier the threads of the group meet, at kTurnBarrier the group waits for its turn to
// multiply.
constexpr int kGroupBarrier = 1, kTurnBarrier = 3;

// The rows of a box of each tensor map. A box is 128 bytes wide.
constexpr int kXBoxRows = kTile, kYBoxRows = kHalfTile, kPanelBoxRows = kTile / HopperShape::parts;

}  // namespace hopper

#if defined(FASTSIM_HOPPER_CODE)
namespace hopper {

struct Tile : TileBase<HopperShape, __half> {
  const TensorMap& panel;
  int barrier;  // the named barrier of the warp group's threads

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
          const int row = HopperShape::row_of(thread, part, e) - part * kPanelBoxRows;
          // Column block j is the 16-byte chunk j of the row.
          char* target = staging + box_byte(row, j) + HopperShape::column_of(thread, 0, e) * size;
          store_two(reinterpret_cast<Element*>(target), s[part][j][e], s[part][j][e + 1]);
        }
      }
      bulk_fence();
      sync();
      if (thread == 0) {
        const int row = tile_row * kTile + part * kPanelBoxRows;
        for (int box = 0; box < boxes; ++box) {
          const int column = tile_column * kTile + box * (kRowBytes / size);
          bulk_store(panel, column, row, shared_address(staging) + box * kPanelBoxRows * kRowBytes);
        }
        bulk_store_commit();
      }
    }
  }
};

// The protocol of the pipeline. A step is kRowBytes of the operands' depth. Step n uses stage
// n % kStages and belongs to phase n / kStages of the stage's mbarriers.
// * Each stage has two mbarriers. A phase of `full` needs 1 arrival, that of the block's own
//   producer, and the bytes of a stage. A phase of `empty` needs 1 arrival from each consumer warp
//   of both blocks.
// * A producer writes to both blocks, so it issues step n once both have released step n - kStages.
//   Bytes from the producer of the other block may come before the arrival of the block's own
//   producer, but never a phase early.
// * A warp group reads a step once its stage is full, and releases the stage once its product has
//   read it.
// * A wait by parity is correct if it waits for the barrier's current phase or the one before. The
//   producers' waits are correct: a producer waits for every phase in order. The warp groups' waits
//   are correct if steps are read in order. Therefore a group begins its tile only when the other
//   group has seen all steps of its own tile full.
// tests/backends/cuda/pipeline.py searches every interleaving of this protocol.

// Addresses in shared memory of a step's operands x and y and of its stage's mbarriers, and the
// parity of its phase. `step` counts through all tiles of the thread block.
struct Pipeline {
  uint32_t memory;

  FASTSIM_DEVICE uint32_t x(int step) const { return memory + step % kStages * kStageBytes; }
  FASTSIM_DEVICE uint32_t y(int step) const { return x(step) + kOperandBytes; }
  FASTSIM_DEVICE uint32_t full(int step) const {
    return memory + kBarriersOffset + step % kStages * 8;
  }
  FASTSIM_DEVICE uint32_t empty(int step) const { return full(step) + kStages * 8; }
  FASTSIM_DEVICE int parity(int step) const { return step / kStages % 2; }
};

// The work of a cluster at one time: a stack of two tiles, one for each of its thread blocks. In a
// block the two warp groups take their tiles in turns.
struct Work {
  Position stack;
  int steps;         // steps of the product, 0 if all pairs of the stack are left out
  bool first, last;  // whether it is the first or the last work of the cluster
};

// Calls f(work) for each stack of tiles that this cluster takes, in order.
template <class F>
FASTSIM_DEVICE void for_work(const Grid& grid, int steps, const F& f) {
  const int64_t count = grid.stack_count(kCluster), stride = block_count() / kCluster;
  const int64_t begin = block_index() / kCluster;
  for (int64_t i = begin; i < count; i += stride) {
    const Position stack = grid.stack_position(i, kCluster);
    const int product_steps = grid.has_product(stack, kCluster) ? steps : 0;
    f(Work{stack, product_steps, i == begin, i + stride >= count});
  }
}

// Loads the operands of all steps: this block's rows of x for itself, and its half of y's rows for
// both blocks.
FASTSIM_DEVICE void produce(const TensorMap& x, const TensorMap& y, const Grid& grid, int steps,
                            const Pipeline& pipe, int rank) {
  constexpr int depth = kRowBytes / sizeof(__half);
  int step = 0;
  for_work(grid, steps, [&](const Work& work) {
    const int row = grid.row0 + (work.stack.row * kCluster + rank) * kTile;
    const int column = grid.column0 + work.stack.column * kTile + rank * kHalfTile;
    for (int k = 0; k < work.steps; ++k, ++step) {
      barrier_wait(pipe.empty(step), pipe.parity(step) ^ 1);
      barrier_expect(pipe.full(step), kStageBytes);
      bulk_load(pipe.x(step), x, k * depth, row, pipe.full(step));
      bulk_load_shared(pipe.y(step) + rank * kHalfTile * kRowBytes, y, k * depth, column,
                       pipe.full(step), (1 << kCluster) - 1);
    }
  });
}

// Releases the stage of a step to the producers of both blocks, which write into it.
FASTSIM_DEVICE void release(const Pipeline& pipe, int step, int thread) {
  if (thread % kWarp < kCluster) barrier_arrive(pipe.empty(step), thread % kWarp);
}

// The warp groups hand the tensor cores over to each other: a group begins its products when the
// other group has begun all products of its tile and has seen their stages full.
FASTSIM_DEVICE void await_turn(int group, const Work& work) {
  if (!work.first) group_sync(kTurnBarrier + group, 2 * kGroup);
}
FASTSIM_DEVICE void pass_turn(int group, const Work& work) {
  if (!work.last) group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup);
}

// Begins the products of `count` steps from `step` on, and releases the stages of all but the last
// of these. On return at most the product of the last step is still running.
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

// Waits for the product of the last step and releases its stage.
FASTSIM_DEVICE void end_products(const Pipeline& pipe, int step, int count, int thread) {
  group_product_wait<0>();
  if (count > 0) release(pipe, step + count - 1, thread);
}

// Computes this warp group's tiles, every second one of the block: products, then epilogue.
template <class Epilogue>
FASTSIM_DEVICE void consume(const TensorMap& panel, const Grid& grid, int steps,
                            const Pipeline& pipe, int rank, int group, const Epilogue& epilogue) {
  char* memory = shared_memory();
  char* staging = memory + kStagingOffset + group * kStagingBytes;
  float* scratch = reinterpret_cast<float*>(memory + kScratchOffset) + group * kScratch;
  const int thread = thread_index() % kGroup;
  int step = 0, turn = 0;
  for_work(grid, steps, [&](const Work& work) {
    if (turn == group) {
      const int row = work.stack.row * kCluster + rank;
      Tile tile{
          {grid, thread, row, work.stack.column, staging, scratch}, panel, kGroupBarrier + group};
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
  cluster_sync();  // no block ends while the other block may write to it
}

}  // namespace hopper
#endif  // sm_90a code

}  // namespace fastsim
