// Threads of a GPU on the host: one fiber each, in clusters of blocks, with what they share. A
// thread runs until it waits; work in the background (copies, products, stores) completes when
// the `Order` says so. Whatever a GPU leaves undefined is an error here, or NaN.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace fastsim {
namespace emulated {

[[noreturn]] void fail(const std::string& what);

// The order in which threads run and background work completes. 0: at once, threads by their
// number. 1: as late as it may. From 2 on: drawn from the seed, never the same twice.
struct Order {
  explicit Order(unsigned seed);
  bool chance(int percent) { return static_cast<int>(random() % 100) < percent; }

  std::mt19937 random;
  int lands = 100;     // percent: a copy lands at once, or when a thread has run
  int executes = 100;  // percent: a product or store is carried out at once, not at its wait
  int runs = 100;      // percent: a warp takes part in a pass over the threads
  int slow = -1;       // 128 threads of the cluster that run when no others can
  int pick = 0;        // of the copies, 0: the oldest lands, 1: the newest, 2: any
  bool shuffled = false;
};

// bar.sync and bar.arrive, __syncthreads, barrier.cluster, the lanes of a warp.
struct Barrier {
  int arrived = 0, phase = 0, wanted = 0;
};
// An mbarrier.
struct Transactions {
  int expected = 0, pending = 0, phase = 0, bytes = 0;
  bool fenced = false;
  void settle();
};
struct Warp {
  uint64_t slots[2][32][8];  // in turns, so that one meeting is enough
  Barrier barrier;
};
struct Block;
struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
  int threads;
  std::vector<std::function<void()>> copies;  // under way
};
struct Block {
  std::vector<char> storage;
  char* memory;  // aligned to 1024 bytes
  uint32_t size;
  std::map<int, Barrier> barriers;
  std::map<uint32_t, Transactions> transactions;
  std::vector<Warp> warps;
  std::vector<int16_t> unfenced;  // by words of memory: 1 + the thread that wrote it
  int registers;                  // free
  Cluster* cluster;
  int index, rank, threads;
  int running;  // threads that have not ended
};

struct AsyncCopy {
  char* to;
  const char* from;  // null: zeros
};
// What becomes of a thread's 64 registers under products; they hold NaN meanwhile.
struct Accumulator {
  int pending = 0;
  float values[64];
};
struct GroupProduct {
  float* registers;
  uint64_t a, b;
  bool done = false;
};
struct BulkStore {
  std::function<void()> read, write;  // empty once done
};
struct Thread {
  Block* block;
  int index, blocks, registers;
  int exchanges = 0;
  std::vector<AsyncCopy> open_copies;
  std::deque<std::vector<AsyncCopy>> copies;
  bool fenced = false;
  std::map<float*, Accumulator> accumulators;
  std::vector<GroupProduct> open_products;
  std::deque<std::vector<GroupProduct>> products;
  std::vector<BulkStore> open_stores, stores;
  std::vector<uint32_t> unfenced;
};

extern Thread* current;
extern Order order;

// Until the number is no longer `old`; other threads run meanwhile.
void wait_while(const int& number, int old);
// Arrives among `wanted` threads and, if it waits, goes on when all are there.
void meet(Barrier& barrier, int wanted, bool waits = true);
// Adds a copy under way, or carries it out.
void start_copy(std::function<void()> copy);
// Runs `body` once per thread of blocks in clusters, in the order FASTSIM_EMULATED_ORDER.
void run(unsigned blocks, unsigned threads, unsigned shared, unsigned cluster,
         const std::function<void()>& body);

}  // namespace emulated
}  // namespace fastsim
