// The tile instructions, or functions that do the same where FASTSIM_AMX_EMULATED is defined.
// Tiles 0 to 3 are sums of 16 x 16 float32, 4 to 7 operands of 16 x 32 bfloat16.
//
// Included by amx.cpp, inside the namespace of one instruction set.

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
struct UsesTiles {
  UsesTiles() {
    static constexpr TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~UsesTiles() { asm volatile("tilerelease" :::); }
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

struct UsesTiles {
  UsesTiles() { tiles_in_use = true; }
  ~UsesTiles() { tiles_in_use = false; }
};

#endif
