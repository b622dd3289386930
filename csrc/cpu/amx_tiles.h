// A block of products on tiles: the instructions, or functions that do the same where
// FASTSIM_AMX_EMULATED is defined. Tiles 0 to 3 are sums of 16 x 16 float32, 4 to 7 operands of
// 16 x 32 bfloat16.
//
// Included by amx.cpp, inside the namespace of one instruction set.

constexpr int64_t kMostParts = 3;

// What `ldtilecfg` takes: rows and bytes of a row of each tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if !defined(FASTSIM_AMX_EMULATED)

// The compiler's own forms of these do not say that they read and write memory.
#define tile_zero(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define tile_load(t, from, row_bytes)                                 \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(int64_t(row_bytes)) : "memory")
#define tile_store(t, to, row_bytes)                                  \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t(row_bytes)) : "memory")
#define tile_multiply(sum, a, b) \
  asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::: "memory")

// The library's own products set other shapes: ours hold for the time of a kernel.
struct UsesInstructions {
  UsesInstructions() {
    static constexpr TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~UsesInstructions() { asm volatile("tilerelease" :::); }
};

#else

alignas(64) thread_local uint8_t tiles_of_thread[8][16][64];
thread_local bool tiles_in_use = false;

inline void tile_zero(int t) { std::memset(tiles_of_thread[t], 0, 1024); }

inline void tile_load(int t, const void* from, int64_t row_bytes) {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(tiles_of_thread[t][r], static_cast<const uint8_t*>(from) + r * row_bytes, 64);
  }
}

inline void tile_store(int t, void* to, int64_t row_bytes) {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * row_bytes, tiles_of_thread[t][r], 64);
  }
}

// A subnormal operand counts as zero, a subnormal sum becomes zero.
inline float flush(float value) {
  return __builtin_fabsf(value) < std::numeric_limits<float>::min() ? 0.0f : value;
}

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return flush(value);
}

// The products of even and of odd depth are summed apart, from zero, then added to the tile.
inline void tile_multiply(int sum, int a, int b) {
  if (!tiles_in_use) __builtin_trap();
  float c[16][16];
  uint16_t left[16][32], right[16][32];
  std::memcpy(c, tiles_of_thread[sum], sizeof c);
  std::memcpy(left, tiles_of_thread[a], sizeof left);
  std::memcpy(right, tiles_of_thread[b], sizeof right);
  for (int r = 0; r < 16; ++r) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const float first = widen(left[r][2 * k]), second = widen(left[r][2 * k + 1]);
      for (int j = 0; j < 16; ++j) {
        even[j] = flush(even[j] + first * widen(right[k][2 * j]));
        odd[j] = flush(odd[j] + second * widen(right[k][2 * j + 1]));
      }
    }
    for (int j = 0; j < 16; ++j) c[r][j] = flush(c[r][j] + flush(even[j] + odd[j]));
  }
  std::memcpy(tiles_of_thread[sum], c, sizeof c);
}

struct UsesInstructions {
  UsesInstructions() { tiles_in_use = true; }
  ~UsesInstructions() { tiles_in_use = false; }
};

#endif

// The product of two strips of each operand. Of many products of parts the sums begin at zero (what
// they are added to may be large, and would round each of their terms) and are taken while the next
// block is multiplied. Few products leave no time for that: theirs begin with what they are added to.
template <int left_parts, int right_parts, bool exact = false>
void multiply_block(const Operand& a, int64_t a_at, const Operand& b, int64_t b_at,
                    const Target& target, PendingSums& pending) {
  constexpr Terms<left_parts, right_parts, exact> terms;
  constexpr bool many = terms.count > 3, two = terms.count == 2;
  const bool scaled = target.scales.rows;
  const bool in_place = !many && target.whole() && !(target.add && scaled);
  const int64_t a_part = a.part(), b_part = b.part(), a_strip = a.strip(), b_strip = b.strip();
  const uint16_t *left = a.tiles + a_at * a_strip, *right = b.tiles + b_at * b_strip;
  float* const sums = in_place ? target.to : pending.next();
  const int64_t stride = in_place ? target.stride : kTileGroup, bytes = stride * sizeof(float);
  float* const low = sums + kTileSide * stride;
  const Operand& split = left_parts == 2 ? a : b;
  const int64_t group = (left_parts == 2 ? a_at : b_at) / 2;
  const bool* second = two && split.second ? split.second + group * split.next_group : nullptr;
  if (in_place && target.add) {
    tile_load(0, sums, bytes);
    tile_load(1, sums + kTileSide, bytes);
    tile_load(2, low, bytes);
    tile_load(3, low + kTileSide, bytes);
  } else {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
  }
  for (const uint16_t* end = left + a_part; left < end;
       left += kTileElements, right += kTileElements) {
#pragma GCC unroll 9
    for (int term = 0; term < terms.count; ++term) {
      if (two && term == 1 && second && !*second) break;
      const bool new_left = term == 0 || terms.left[term] != terms.left[term - 1];
      const bool new_right = term == 0 || terms.right[term] != terms.right[term - 1];
      const uint16_t* const a_tile = left + terms.left[term] * a_part;
      const uint16_t* const b_tile = right + terms.right[term] * b_part;
      if (new_left) tile_load(4, a_tile, 64);
      if (new_right) tile_load(6, b_tile, 64);
      tile_multiply(0, 4, 6);
      if (new_right) tile_load(7, b_tile + b_strip, 64);
      tile_multiply(1, 4, 7);
      if (new_left) tile_load(5, a_tile + a_strip, 64);
      tile_multiply(2, 5, 6);
      tile_multiply(3, 5, 7);
    }
    if constexpr (many) pending.take_some();
    if (second) second += split.next_step;
  }
  tile_store(0, sums, bytes);
  tile_store(1, sums + kTileSide, bytes);
  tile_store(2, low, bytes);
  tile_store(3, low + kTileSide, bytes);
  if (!in_place) {
    pending.put(target);
  } else if (scaled) {
    take_rows(sums, stride, target, 0, kTileGroup);
  }
}
