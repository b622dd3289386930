// Packs score gradients as operands of both of their products. Each entry is split into bfloat16
// parts; in squares of small entries the second part is dropped.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Where the tiles of a square go: the first tile, and how far apart strips and parts lie.
struct SquareTiles {
  uint16_t* first;
  int64_t strip_size, part_size;
};

inline float sum_of_lanes(const Floats& values) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
  return sum;
}

inline void add_to(float* sums, const Floats& values) {
  const Floats sum = load(sums) + values;
  std::memcpy(sums, &sum, sizeof sum);
}

// Adds the residuals of two rows of a square, `row` and the next one, which upper and lower hold.
inline void add_residuals(const Residuals& to, int row, const Floats (&upper)[2],
                          const Floats (&lower)[2], Floats (&column_sums)[2]) {
  const Floats left = load(to.column_norms), right = load(to.column_norms + kLanes);
  add_to(to.rows + row * kLanes, upper[0] * left + upper[1] * right);
  add_to(to.rows + (row + 1) * kLanes, lower[0] * left + lower[1] * right);
  for (int half = 0; half < 2; ++half) {
    column_sums[half] += upper[half] * to.row_norms[row] + lower[half] * to.row_norms[row + 1];
  }
}

// Writes the tiles of a square in the layouts `rows` and `row_pairs`, and adds up its residuals if
// they are not null. Returns the bits of the largest absolute value.
template <int parts, bool plain>
uint32_t split_square(const Entries<float>& from, const SquareTiles& rows,
                      const SquareTiles& row_pairs, const Residuals* residuals = nullptr) {
  Floats column_sums[2] = {};
  Words largest{};
#pragma GCC unroll 1
  for (int r = 0; r < kTileDepth; r += 2) {
    Floats upper[2] = {from.load_scaled(r, 0), from.load_scaled(r, kLanes)};
    Floats lower[2] = {from.load_scaled(r + 1, 0), from.load_scaled(r + 1, kLanes)};
    for (const Floats& values : {upper[0], upper[1], lower[0], lower[1]}) {
      const Words size = same_bits<Words>(values) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    uint16_t* row = rows.first + r / kTileSide * rows.strip_size + r % kTileSide * kTileDepth;
    uint16_t* row_pair = row_pairs.first + r / 2 * kTileDepth;
#pragma GCC unroll 3
    for (int part = 0; part < parts; ++part) {
      const Words upper_part = split_off_row<false, plain>(upper[0], upper[1]);
      const Words lower_part = split_off_row<false, plain>(lower[0], lower[1]);
      const Words left = interleave<0>(upper_part, lower_part, kHalfIndices);
      const Words right = interleave<kLanes>(upper_part, lower_part, kHalfIndices);
      std::memcpy(row, &upper_part, sizeof upper_part);
      std::memcpy(row + kTileDepth, &lower_part, sizeof lower_part);
      std::memcpy(row_pair, &left, sizeof left);
      std::memcpy(row_pair + row_pairs.strip_size, &right, sizeof right);
      row += rows.part_size;
      row_pair += row_pairs.part_size;
    }
    if (residuals) add_residuals(*residuals, r, upper, lower, column_sums);
  }
  if (residuals) {
    add_to(residuals->columns, column_sums[0]);
    add_to(residuals->columns + kLanes, column_sums[1]);
  }
  return largest_lane(largest);
}

template <int parts>
void split_square(const Entries<float>& from, const SquareTiles& rows,
                  const SquareTiles& row_pairs) {
  if (split_square<parts, true>(from, rows, row_pairs) < kPastLargest) return;
  split_square<parts, false>(from, rows, row_pairs);
}

// The bits of the largest absolute value in a square.
uint32_t largest_entry(const Entries<float>& from) {
  Words largest{};
  for (int r = 0; r < kTileDepth; ++r) {
    for (const int column : {0, kLanes}) {
      const Words size = same_bits<Words>(from.load_scaled(r, column)) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
  }
  return largest_lane(largest);
}

void largest_of_squares(const Matrix& from, int64_t rows, int64_t columns, float* squares) {
  for (int64_t row = 0; row < rows; row += kTileDepth) {
    for (int64_t column = 0; column < columns; column += kTileDepth) {
      *squares++ = with_entries<kTileDepth, kTileDepth, float>(
          {from}, row, column, rows - row, columns - column,
          [](const Entries<float>& entries) { return same_bits<float>(largest_entry(entries)); });
    }
  }
}

void pack_both(const ScaledMatrix& from, int64_t rows, int64_t columns, int64_t parts, float small,
               const Residuals& residuals, uint16_t* as_rows, uint16_t* as_row_pairs,
               bool* uses_second) {
  const auto run = parts == 1 ? split_square<1> : parts == 2 ? split_square<2> : split_square<3>;
  const int64_t part_size = ceil_div(columns, kTileDepth) * kTileElements;
  const int64_t pairs_part_size = ceil_div(rows, kTileDepth) * kTileElements;
  for (int64_t row = 0; row < rows; row += kTileDepth) {
    for (int64_t column = 0; column < columns; column += kTileDepth) {
      const int64_t strip = row / kTileSide * parts * part_size, step = column / kTileDepth;
      const int64_t pairs_strip = column / kTileSide * parts * pairs_part_size;
      const SquareTiles row_tiles{as_rows + strip + step * kTileElements, parts * part_size,
                                  part_size};
      const SquareTiles pair_tiles{as_row_pairs + pairs_strip + row / kTileDepth * kTileElements,
                                   parts * pairs_part_size, pairs_part_size};
      with_entries<kTileDepth, kTileDepth, float>(
          from, row, column, rows - row, columns - column, [&](const Entries<float>& entries) {
            *uses_second = small == 0 || largest_entry(entries) > same_bits<uint32_t>(small);
            if (*uses_second++) return run(entries, row_tiles, pair_tiles);
            const Residuals square_residuals{
                residuals.row_norms + row, residuals.column_norms + column,
                residuals.rows + row * kLanes, residuals.columns + column};
            split_square<1, true>(entries, row_tiles, pair_tiles, &square_residuals);
          });
    }
  }
}

void add_dropped(const Operand& left, int64_t rows, const float* norms, float* sums) {
  for (int64_t row = 0; row < rows; row += kTileGroup) {
    const bool* uses_second = left.uses_second + row / kTileGroup * left.group_stride;
    Floats row_sums[kTileGroup] = {};
    for (int64_t step = 0; step < left.steps; ++step, uses_second += left.step_stride) {
      if (*uses_second) continue;
      // The norms at even depths, then those at odd depths, as a word holds a pair of both.
      float norms_by_half[2][kLanes];
      for (int k = 0; k < kTileDepth; ++k) {
        norms_by_half[k % 2][k / 2] = norms[step * kTileDepth + k];
      }
      const Floats even_norms = load(norms_by_half[0]), odd_norms = load(norms_by_half[1]);
      for (int r = 0; r < kTileGroup; ++r) {
        Words pairs;
        const uint16_t* const second_part =
            left.tiles + (row + r) / kTileSide * left.strip_size() + left.part_size();
        std::memcpy(&pairs, second_part + step * kTileElements + r % kTileSide * kTileDepth,
                    sizeof pairs);
        row_sums[r] += same_bits<Floats>(pairs << 16) * even_norms +
                       same_bits<Floats>(pairs & 0xffff0000) * odd_norms;
      }
    }
    for (int64_t r = 0; r < min_of(kTileGroup, rows - row); ++r) {
      sums[row + r] += sum_of_lanes(row_sums[r]);
    }
  }
}
