// A square of products on AMX tiles, by the processor's instructions, or by functions that do the
// same if FASTSIM_AMX_EMULATED is defined. Tiles 0 to 3 hold 16 x 16 sums in float32, tiles 4 to 7
// hold operands of 16 x 32 bfloat16 numbers.
//
// Included by amx.cpp, inside the namespace of one instruction set.

constexpr int64_t kMostParts = 3;

// The operand of `ldtilecfg`: the number of rows of each tile, and the bytes of a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if !defined(FASTSIM_AMX_EMULATED)

// The compiler's own intrinsics do not declare that they read and write memory.
#define tile_zero(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define tile_load(t, from, row_bytes)                                 \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(int64_t(row_bytes)) : "memory")
#define tile_store(t, to, row_bytes)                                  \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t(row_bytes)) : "memory")
#define tile_multiply(sum, a, b) \
  asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::: "memory")

// Sets the shapes of the tiles for the time of a kernel. The products of other libraries set other
// shapes.
struct InstructionSetup {
  InstructionSetup() {
    static constexpr TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~InstructionSetup() { asm volatile("tilerelease" :::); }
};

#else

alignas(64) thread_local uint8_t tiles_of_thread[8][16][64];
thread_local bool tiles_set_up = false;

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

// Subnormal numbers become zeros, both operands and sums.
inline float flush(float value) {
  return __builtin_fabsf(value) < std::numeric_limits<float>::min() ? 0.0f : value;
}

// The float32 value of an operand's bfloat16 number.
inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return flush(value);
}

// Products of even and of odd depth are added up separately, from zero. Then both sums are added to
// the tile.
inline void tile_multiply(int sum, int a, int b) {
  if (!tiles_set_up) __builtin_trap();
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

struct InstructionSetup {
  InstructionSetup() { tiles_set_up = true; }
  ~InstructionSetup() { tiles_set_up = false; }
};

#endif

// Multiplies strips a_first and a_first + 1 of one operand by strips b_first and b_first + 1 of the
// other. With many products of parts the sums begin at zero and are stored while the next square is
// multiplied: the numbers that they are added to may be large, and would round each term. Few
// products leave no time for that, so their sums begin with the numbers that they are added to.
template <int left_parts, int right_parts, bool exact = false>
void multiply_square(const Operand& a, int64_t a_first, const Operand& b, int64_t b_first,
                     const Target& target, PendingSums& pending) {
  constexpr Terms<left_parts, right_parts, exact> terms;
  constexpr bool many = terms.count > 3, two = terms.count == 2;
  const bool scaled = target.scales.rows;
  const bool in_place = !many && target.is_full() && !(target.add && scaled);
  const int64_t a_part = a.part_size(), b_part = b.part_size();
  const int64_t a_strip = a.strip_size(), b_strip = b.strip_size();
  const uint16_t *left = a.tiles + a_first * a_strip, *right = b.tiles + b_first * b_strip;
  float* const sums = in_place ? target.to : pending.next();
  const int64_t stride = in_place ? target.stride : kTileGroup, bytes = stride * sizeof(float);
  float* const lower_sums = sums + kTileSide * stride;
  const Operand& split = left_parts == 2 ? a : b;  // the operand of two parts, if `two`
  const int64_t group = (left_parts == 2 ? a_first : b_first) / 2;
  const bool* uses_second =
      two && split.uses_second ? split.uses_second + group * split.group_stride : nullptr;
  if (in_place && target.add) {
    tile_load(0, sums, bytes);
    tile_load(1, sums + kTileSide, bytes);
    tile_load(2, lower_sums, bytes);
    tile_load(3, lower_sums + kTileSide, bytes);
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
      if (two && term == 1 && uses_second && !*uses_second) break;
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
    if constexpr (many) pending.store_some();
    if (uses_second) uses_second += split.step_stride;
  }
  tile_store(0, sums, bytes);
  tile_store(1, sums + kTileSide, bytes);
  tile_store(2, lower_sums, bytes);
  tile_store(3, lower_sums + kTileSide, bytes);
  if (!in_place) {
    pending.complete(target);
  } else if (scaled) {
    store_rows(sums, stride, target, 0, kTileGroup);
  }
}
