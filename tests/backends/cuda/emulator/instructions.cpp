#include "emulated.h"

#include <algorithm>
#include <array>
#include <memory>

namespace fastsim {

using emulated::current;
using emulated::fail;
using emulated::order;

namespace {

// What TMA and wgmma make of an address in rows of 128 bytes.
uint32_t swizzle(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

constexpr float kUndefined = NAN;

}  // namespace

// ---- memory ----

void store_two(__half* to, float a, float b) {
  to[0] = __float2half_rn(a);
  to[1] = __float2half_rn(b);
  const uint32_t word = shared_address(to) / 4;
  current->block->unfenced[word] = static_cast<int16_t>(current->index + 1);
  current->unfenced.push_back(word);
}
void store_two(float* to, float a, float b) {
  to[0] = a;
  to[1] = b;
}
float round_to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isfinite(x)) bits = (bits + 0x1000u) & 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// ---- sm_80 ----

namespace {

void carry_out(const emulated::AsyncCopy& copy) {
  copy.from ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
}

}  // namespace

void copy_async(uint32_t to, const void* from, bool inside) {
  if (to % 16 || to + 16 > current->block->size) fail("cp.async to a wrong address");
  const emulated::AsyncCopy copy{shared_memory() + to,
                                 inside ? static_cast<const char*>(from) : nullptr};
  std::memset(copy.to, 0xff, 16);
  if (order.chance(order.lands)) carry_out(copy);
  current->open_copies.push_back(copy);
}
void copy_async_commit() {
  current->copies.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}
void wait_for_copies(size_t under_way) {
  auto& groups = current->copies;
  for (; groups.size() > under_way; groups.pop_front()) {
    std::for_each(groups.front().begin(), groups.front().end(), carry_out);
  }
}

void load_matrices(uint32_t (&r)[4], uint32_t address) {
  const uint64_t word = address;
  const int lane = emulated::lane();
  emulated::together(&word, 1, [&](const auto& slots) {
    for (int m = 0; m < 4; ++m) {
      // Thread 4 i + j has the j-th 32 bits of row i.
      const char* row = shared_memory() + slots[8 * m + lane / 4][0];
      std::memcpy(&r[m], row + lane % 4 * 4, 4);
    }
    return 0;
  });
}

namespace {

// d += a b for m16n8 and 32 bytes of depth: `parts` numbers to a 32-bit register.
template <int parts, class Value>
void multiply_fragments(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        const Value& value) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const int lane = emulated::lane(), group = lane / 4, within = lane % 4;
  emulated::together(words, 6, [&](const auto& slots) {
    // Registers hold depth 0 to 4 parts - 1, then the rest; four threads share a row.
    float x[2][8 * parts], y[2][8 * parts];
    for (int k = 0; k < 8 * parts; ++k) {
      const int high = k / (4 * parts), thread = k % (4 * parts) / parts, part = k % parts;
      for (int i = 0; i < 2; ++i) {
        x[i][k] = value(slots[group * 4 + thread][i + 2 * high], part);
        y[i][k] = value(slots[(within * 2 + i) * 4 + thread][4 + high], part);
      }
    }
    for (int e = 0; e < 4; ++e) {
      for (int k = 0; k < 8 * parts; ++k) d[e] += x[e / 2][k] * y[e % 2][k];
    }
    return 0;
  });
}
float half_of(uint64_t word, int part) {
  const uint16_t bits = static_cast<uint16_t>(word >> 16 * part);
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
float tf32_of(uint64_t word, int) {
  const uint32_t bits = static_cast<uint32_t>(word) & 0xffffe000u;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

void multiply_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<2>(d, a, b0, b1, half_of);
}
void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<1>(d, a, b0, b1, tf32_of);
}

// ---- sm_90a: registers and barriers ----

void set_registers(int count, bool more) {
  emulated::Thread& t = *current;
  if (more != (count > t.registers)) fail("setmaxnreg in the wrong direction");
  int& left = t.block->registers;
  while (left + t.registers < count) emulated::wait_while(left, left);
  left += t.registers - count;
  t.registers = count;
}

namespace {

emulated::Transactions& at(emulated::Block& block, uint32_t barrier) {
  const auto found = block.transactions.find(barrier);
  if (found == block.transactions.end()) fail("an mbarrier before its initialisation");
  return found->second;
}
emulated::Transactions& remote(emulated::Block& block, uint32_t barrier) {
  emulated::Transactions& t = at(block, barrier);
  if (!t.fenced) fail("an mbarrier before fence.mbarrier_init");
  if (!block.running) fail("an mbarrier of a block that has ended");
  return t;
}

}  // namespace

void barrier_init(uint32_t barrier, int arrivals) {
  if (barrier % 8 || barrier + 8 > current->block->size) fail("an mbarrier at a wrong address");
  current->block->transactions[barrier] = {arrivals, arrivals};
}
void barrier_init_fence() {
  for (auto& [address, t] : current->block->transactions) t.fenced = true;
}
void barrier_arrive(uint32_t barrier, int rank) {
  emulated::Transactions& t = remote(*current->block->cluster->blocks.at(rank), barrier);
  --t.pending;
  t.settle();
}
void barrier_expect(uint32_t barrier, int bytes) {
  emulated::Transactions& t = at(*current->block, barrier);
  t.bytes += bytes;
  --t.pending;
  t.settle();
}
void barrier_wait(uint32_t barrier, int parity) {
  const emulated::Transactions& t = at(*current->block, barrier);
  while (t.phase % 2 == parity) emulated::wait_while(t.phase, t.phase);
}

// ---- sm_90a: bulk copies ----

namespace {

// f(address of 16 bytes in the box, pointer in the matrix, halves of them inside it) for rows
// `first` to `end` of a box.
template <class F>
void for_box(const TensorMap& map, int column, int row, uint32_t at, int first, int end, const F& f) {
  for (int r = first; r < end; ++r) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int64_t c = column + 8 * chunk, line = row + r;
      const bool inside = c >= 0 && line >= 0 && line < map.rows;
      const int64_t left = inside ? std::clamp<int64_t>(map.width - c, 0, 8) : 0;
      f(swizzle(at + r * 128 + chunk * 16), map.data + line * map.row_bytes + c * 2,
        static_cast<int>(left));
    }
  }
}
void check_box(const TensorMap& map, uint32_t at) {
  if (at % 128 || at + map.box_rows * 128 > current->block->size) fail("a box at a wrong address");
}

void load_rows(emulated::Block* block, uint32_t to, const TensorMap& map, int column, int row,
               uint32_t barrier, int first, int end) {
  emulated::start_copy([=] {
    for_box(map, column, row, to, first, end, [&](uint32_t address, const char* from, int count) {
      std::memset(block->memory + address, 0, 16);
      std::memcpy(block->memory + address, from, 2 * count);
    });
    emulated::Transactions& t = remote(*block, barrier);
    t.bytes -= 128 * (end - first);
    t.settle();
  });
}

}  // namespace

void bulk_load_shared(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier,
                      uint16_t blocks) {
  check_box(map, to);
  for (emulated::Block* block : current->block->cluster->blocks) {
    if (!(blocks >> block->rank & 1)) continue;
    std::memset(block->memory + to, 0xff, map.box_rows * 128);
    const int half = map.box_rows / 2;
    load_rows(block, to, map, column, row, barrier, 0, half);
    load_rows(block, to, map, column, row, barrier, half, map.box_rows);
  }
}
void bulk_load(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier) {
  bulk_load_shared(to, map, column, row, barrier, static_cast<uint16_t>(1 << cluster_rank()));
}

namespace {

using Box = std::vector<std::array<char, 16>>;

void read(emulated::BulkStore& store) {
  if (store.read) std::exchange(store.read, nullptr)();
}
void carry_out(emulated::BulkStore& store) {
  read(store);
  if (store.write) std::exchange(store.write, nullptr)();
}

}  // namespace

void bulk_store(const TensorMap& map, int column, int row, uint32_t from) {
  check_box(map, from);
  emulated::Block* block = current->block;
  const auto held = std::make_shared<Box>();
  emulated::BulkStore store{
      [=] {
        for_box(map, column, row, from, 0, map.box_rows, [&](uint32_t address, char*, int) {
          std::memcpy(held->emplace_back().data(), block->memory + address, 16);
          for (int word = 0; word < 4; ++word) {
            if (block->unfenced[address / 4 + word]) {
              std::memset(held->back().data() + 4 * word, 0xff, 4);
            }
          }
        });
      },
      [=] {
        size_t i = 0;
        for_box(map, column, row, from, 0, map.box_rows, [&](uint32_t, char* to, int count) {
          std::memcpy(to, (*held)[i++].data(), 2 * count);
        });
      }};
  if (order.chance(order.executes)) read(store);
  current->open_stores.push_back(std::move(store));
}
void bulk_store_commit() {
  for (emulated::BulkStore& store : current->open_stores) current->stores.push_back(std::move(store));
  current->open_stores.clear();
}
void bulk_store_read() { std::for_each(current->stores.begin(), current->stores.end(), read); }
void bulk_store_wait() {
  for (emulated::BulkStore& store : current->stores) carry_out(store);
  current->stores.clear();
}
void bulk_fence() {
  for (uint32_t word : current->unfenced) {
    int16_t& writer = current->block->unfenced[word];
    if (writer == current->index + 1) writer = 0;
  }
  current->unfenced.clear();
}

// ---- sm_90a: products of a group ----

namespace {

// 16 halves of a row of an operand in rows of 128 bytes, by its descriptor.
void operand(uint64_t descriptor, int row, float (&out)[16]) {
  const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint32_t at = swizzle(start + row / 8 * stride + row % 8 * 128 + chunk * 16);
    _Float16 halves[8];
    std::memcpy(halves, shared_memory() + at, 16);
    for (int k = 0; k < 8; ++k) out[8 * chunk + k] = halves[k];
  }
}

void execute(emulated::GroupProduct& product) {
  if (product.done) return;
  product.done = true;
  emulated::Accumulator& d = current->accumulators.at(product.registers);
  const int lane = emulated::lane(), warp = thread_index() / 32 % 4;
  float a[2][16], row[16], b[16][32];
  for (int i = 0; i < 2; ++i) operand(product.a, 16 * warp + lane / 4 + 8 * i, a[i]);
  for (int j = 0; j < 32; ++j) {
    operand(product.b, j / 2 * 8 + lane % 4 * 2 + j % 2, row);
    for (int k = 0; k < 16; ++k) b[k][j] = row[k];
  }
  // Register 4 i + e: column 8 i + 2 (lane % 4) + e % 2 of row lane / 4 + 8 (e / 2).
  float sums[2][32];
  for (int j = 0; j < 32; ++j) {
    for (int i = 0; i < 2; ++i) sums[i][j] = d.values[j / 2 * 4 + 2 * i + j % 2];
  }
  for (int k = 0; k < 16; ++k) {
    for (int j = 0; j < 32; ++j) {
      for (int i = 0; i < 2; ++i) sums[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int j = 0; j < 32; ++j) {
    for (int i = 0; i < 2; ++i) d.values[j / 2 * 4 + 2 * i + j % 2] = sums[i][j];
  }
}

}  // namespace

void group_product_begin() { current->fenced = true; }
void group_multiply(float (&d)[16][4], uint64_t a, uint64_t b) {
  float* registers = &d[0][0];
  auto [found, first] = current->accumulators.try_emplace(registers);
  emulated::Accumulator& held = found->second;
  if (first) {
    if (!current->fenced) fail("registers of a product without wgmma.fence");
    std::copy_n(registers, 64, held.values);
    std::fill_n(registers, 64, kUndefined);
  }
  ++held.pending;
  current->open_products.push_back({registers, a, b});
  // In their order: a product needs those before it on the same registers.
  if (order.executes == 100) execute(current->open_products.back());
}
void group_product_commit() {
  current->products.push_back(std::move(current->open_products));
  current->open_products.clear();
}
void wait_for_products(size_t under_way) {
  auto& groups = current->products;
  for (; groups.size() > under_way; groups.pop_front()) {
    for (emulated::GroupProduct& product : groups.front()) {
      execute(product);
      emulated::Accumulator& d = current->accumulators.at(product.registers);
      if (--d.pending > 0) continue;
      std::copy_n(d.values, 64, product.registers);
      current->accumulators.erase(product.registers);
      current->fenced = false;
    }
  }
  if (!groups.empty() && order.chance(order.executes)) {
    for (emulated::GroupProduct& product : groups.front()) execute(product);
  }
  // .sync.aligned: the lanes of a warp are done together.
  emulated::meet(current->block->warps[current->index / 32].barrier, 32);
}

}  // namespace fastsim
