#include "machine.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace fastsim {
namespace emulated {

Thread* current = nullptr;
Order order{0};

void fail(const std::string& what) { throw std::runtime_error("emulated kernel: " + what); }

Order::Order(unsigned seed) : random(seed) {
  if (seed == 0) return;
  lands = executes = 0;
  if (seed == 1) return;
  const auto one_of = [&](std::initializer_list<int> all) { return all.begin()[random() % all.size()]; };
  lands = one_of({0, 1, 20});
  executes = one_of({0, 50});
  runs = one_of({100, 50, 20});
  slow = one_of({-1, 0, 1, 2, 3, 4, 5});
  pick = one_of({0, 1, 2});
  shuffled = true;
}

void Transactions::settle() {
  if (pending < 0) fail("more arrivals at a barrier than it expects");
  if (pending > 0 || bytes != 0) return;
  ++phase;
  pending = expected;
}

namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kRegisters = 65536;

struct Fiber {
  ucontext_t start;
  jmp_buf state;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Thread thread;
  const int* number;  // it waits as long as this is `old`
  int old;
  bool begun, done;
};

jmp_buf scheduler;
Fiber* running = nullptr;
const std::function<void()>* work = nullptr;
std::exception_ptr error;
std::vector<std::unique_ptr<Fiber>> fibers;

void enter() {
  try {
    (*work)();
  } catch (...) {
    error = std::current_exception();
  }
  running->done = true;
  _longjmp(scheduler, 1);
}

void resume(Fiber& f) {
  running = &f;
  current = &f.thread;
  f.number = nullptr;
  if (_setjmp(scheduler) == 0) {
    if (f.begun) _longjmp(f.state, 1);
    f.begun = true;
    setcontext(&f.start);
  }
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
}

void land(std::vector<std::function<void()>>& copies) {
  const size_t last = copies.size() - 1;
  const size_t at = order.pick == 0 ? 0 : order.pick == 1 ? last : order.random() % copies.size();
  const std::function<void()> copy = std::move(copies[at]);
  copies.erase(copies.begin() + at);
  copy();
}

void check_balance(const Cluster& cluster) {
  if (!cluster.copies.empty()) fail("a block ended before a copy to it");
  if (cluster.barrier.arrived) fail("a barrier of the cluster is left half full");
  for (const Block* block : cluster.blocks) {
    for (const auto& [id, barrier] : block->barriers) {
      if (barrier.arrived) fail("named barrier " + std::to_string(id) + " is left half full");
    }
    for (const auto& [address, t] : block->transactions) {
      if (t.pending != t.expected || t.bytes != 0) fail("an mbarrier is left in mid phase");
    }
    for (const Warp& warp : block->warps) {
      if (warp.barrier.arrived) fail("lanes of a warp were waited for");
    }
  }
}

void check_thread(const Thread& t) {
  if (!t.open_copies.empty()) fail("cp.async without commit");
  for (const auto& group : t.copies) {
    if (!group.empty()) fail("cp.async that nothing waited for");
  }
  if (!t.accumulators.empty()) fail("a product that nothing waited for");
  if (!t.open_stores.empty() || !t.stores.empty()) fail("a bulk store that nothing waited for");
}

void start(Fiber& f, Block* block, int index, int blocks) {
  // As ptxas gives them: what is left of the registers, in steps of eight.
  const int registers = kRegisters / block->threads / 8 * 8;
  f.thread = {block, index, blocks, registers > 255 ? 255 : registers};
  f.number = nullptr;
  f.begun = f.done = false;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack.get();
  f.start.uc_stack.ss_size = kStack;
  makecontext(&f.start, enter, 0);
}

void run_cluster(Cluster& cluster, int threads, int blocks) {
  const int all = cluster.threads;
  while (static_cast<int>(fibers.size()) < all) fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < all; ++i) start(*fibers[i], cluster.blocks[i / threads], i % threads, blocks);
  std::vector<int> sequence(all), sleeps(all / 32);
  std::iota(sequence.begin(), sequence.end(), 0);
  // Who may run: 0 all but the slow and those that sleep in this pass, 1 the latter too, 2 all.
  int level = 0;
  for (int left = all; left > 0;) {
    bool moved = false, held = false;
    if (order.shuffled) std::shuffle(sequence.begin(), sequence.end(), order.random);
    for (int& sleep : sleeps) sleep = order.runs < 100 && !order.chance(order.runs);
    for (int i : sequence) {
      Fiber& f = *fibers[i];
      if (f.done || (f.number && *f.number == f.old)) continue;
      if ((level < 2 && i / 128 == order.slow) || (level < 1 && sleeps[i / 32])) {
        held = true;
        continue;
      }
      moved = true;
      resume(f);
      left -= f.done;
      f.thread.block->running -= f.done;
      if (!cluster.copies.empty() && order.lands && order.chance(order.lands)) land(cluster.copies);
    }
    if (moved) {
      level = 0;
    } else if (held && (level == 0 || cluster.copies.empty() || order.chance(50))) {
      ++level;
    } else if (!cluster.copies.empty()) {
      land(cluster.copies);
      level = 0;
    } else {
      fail("every thread waits");
    }
  }
  for (int i = 0; i < all; ++i) check_thread(fibers[i]->thread);
  check_balance(cluster);
}

}  // namespace

void wait_while(const int& number, int old) {
  while (number == old) {
    running->number = &number;
    running->old = old;
    if (_setjmp(running->state) == 0) _longjmp(scheduler, 1);
  }
}

void meet(Barrier& barrier, int wanted, bool waits) {
  if (barrier.arrived && barrier.wanted != wanted) fail("a barrier of two numbers of threads");
  barrier.wanted = wanted;
  const int phase = barrier.phase;
  if (++barrier.arrived == wanted) {
    barrier.arrived = 0;
    ++barrier.phase;
  } else if (waits) {
    wait_while(barrier.phase, phase);
  }
}

void start_copy(std::function<void()> copy) {
  if (order.lands == 100) return copy();
  current->block->cluster->copies.push_back(std::move(copy));
}

void run(unsigned blocks, unsigned threads, unsigned shared, unsigned cluster,
         const std::function<void()>& body) {
  const char* seed = std::getenv("FASTSIM_EMULATED_ORDER");
  order = Order(seed ? std::strtoul(seed, nullptr, 10) : 0);
  work = &body;
  for (unsigned first = 0; first < blocks; first += cluster) {
    Cluster group;
    group.threads = static_cast<int>(cluster * threads);
    std::vector<Block> members(cluster);
    for (unsigned rank = 0; rank < cluster; ++rank) {
      Block& b = members[rank];
      b.storage.assign(shared + 2048, '\xff');  // NaN in every type
      b.memory = b.storage.data() + (1024 - reinterpret_cast<uintptr_t>(b.storage.data()) % 1024);
      b.size = shared;
      b.warps.resize(threads / 32);
      b.unfenced.resize(shared / 4 + 1);
      b.registers = kRegisters - static_cast<int>(threads) * (kRegisters / threads / 8 * 8);
      b.cluster = &group;
      b.index = static_cast<int>(first + rank);
      b.rank = static_cast<int>(rank);
      b.threads = b.running = static_cast<int>(threads);
      group.blocks.push_back(&b);
    }
    run_cluster(group, static_cast<int>(threads), static_cast<int>(blocks));
  }
}

}  // namespace emulated
}  // namespace fastsim
