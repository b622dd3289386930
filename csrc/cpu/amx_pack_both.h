// Score gradients as operands of both of their products: each entry split into bfloat16 parts, and in
// squares of small ones the second left out.
//
// Included by amx.cpp, inside the namespace of one instruction set.

// Where the tiles of a square of 32 x 32 go: the first, and how far apart its strips and parts lie.
struct Place {
  uint16_t* to;
  int64_t strip, part;
};

inline float sum_of(const Floats& values) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
  return sum;
}

inline void add_to(float* sums, const Floats& values) {
  const Floats sum = load(sums) + values;
  std::memcpy(sums, &sum, sizeof sum);
}

// Adds what is left of two rows of a square, from `row` on.
inline void add_residuals(const Residuals& to, int row, const Floats (&upper)[2],
                          const Floats (&lower)[2], Floats (&columns)[2]) {
  const Floats left = load(to.column_norms), right = load(to.column_norms + kLanes);
  add_to(to.rows + row * kLanes, upper[0] * left + upper[1] * right);
  add_to(to.rows + (row + 1) * kLanes, lower[0] * left + lower[1] * right);
  for (int half = 0; half < 2; ++half) {
    columns[half] += upper[half] * to.row_norms[row] + lower[half] * to.row_norms[row + 1];
  }
}

// Rows and pairs of a square; residuals: of the square, or null. The largest size of an entry, as
// bits.
template <int parts, bool plain>
uint32_t split_square(const Entries<float>& from, const Place& rows, const Place& pairs,
                      const Residuals* residuals = nullptr) {
  Floats of_columns[2] = {};
  Words largest{};
#pragma GCC unroll 1
  for (int r = 0; r < kTileDepth; r += 2) {
    Floats upper[2] = {from.take(r, 0), from.take(r, kLanes)};
    Floats lower[2] = {from.take(r + 1, 0), from.take(r + 1, kLanes)};
    for (const Floats& values : {upper[0], upper[1], lower[0], lower[1]}) {
      const Words size = same_bits<Words>(values) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    uint16_t* row = rows.to + r / kTileSide * rows.strip + r % kTileSide * kTileDepth;
    uint16_t* pair = pairs.to + r / 2 * kTileDepth;
#pragma GCC unroll 3
    for (int part = 0; part < parts; ++part) {
      const Words of_upper = take_row<false, plain>(upper[0], upper[1]);
      const Words of_lower = take_row<false, plain>(lower[0], lower[1]);
      const Words left = in_pairs<0>(of_upper, of_lower, kOfHalves);
      const Words right = in_pairs<kLanes>(of_upper, of_lower, kOfHalves);
      std::memcpy(row, &of_upper, sizeof of_upper);
      std::memcpy(row + kTileDepth, &of_lower, sizeof of_lower);
      std::memcpy(pair, &left, sizeof left);
      std::memcpy(pair + pairs.strip, &right, sizeof right);
      row += rows.part;
      pair += pairs.part;
    }
    if (residuals) add_residuals(*residuals, r, upper, lower, of_columns);
  }
  if (residuals) {
    add_to(residuals->columns, of_columns[0]);
    add_to(residuals->columns + kLanes, of_columns[1]);
  }
  return largest_of(largest);
}

template <int parts>
void split_square(const Entries<float>& from, const Place& rows, const Place& pairs) {
  if (split_square<parts, true>(from, rows, pairs) < kPastLargest) return;
  split_square<parts, false>(from, rows, pairs);
}

// The bits of the largest size of an entry of a square.
uint32_t largest_entry(const Entries<float>& from) {
  Words largest{};
  for (int r = 0; r < kTileDepth; ++r) {
    for (const int at : {0, kLanes}) {
      const Words size = same_bits<Words>(from.take(r, at)) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
  }
  return largest_of(largest);
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

void pack_both(const Packed& from, int64_t rows, int64_t columns, int64_t parts, float small,
               const Residuals& residuals, uint16_t* as_rows, uint16_t* as_pairs, bool* second) {
  const auto run = parts == 1 ? split_square<1> : parts == 2 ? split_square<2> : split_square<3>;
  const int64_t part = tiles(columns, kTileDepth) * kTileElements;
  const int64_t pairs_part = tiles(rows, kTileDepth) * kTileElements;
  for (int64_t row = 0; row < rows; row += kTileDepth) {
    for (int64_t column = 0; column < columns; column += kTileDepth) {
      const int64_t strip = row / kTileSide * parts * part, step = column / kTileDepth;
      const int64_t pairs_strip = column / kTileSide * parts * pairs_part;
      const Place in_rows{as_rows + strip + step * kTileElements, parts * part, part};
      const Place in_pairs{as_pairs + pairs_strip + row / kTileDepth * kTileElements,
                           parts * pairs_part, pairs_part};
      with_entries<kTileDepth, kTileDepth, float>(
          from, row, column, rows - row, columns - column, [&](const Entries<float>& entries) {
            *second = small == 0 || largest_entry(entries) > same_bits<uint32_t>(small);
            if (*second++) return run(entries, in_rows, in_pairs);
            const Residuals of_square{residuals.row_norms + row, residuals.column_norms + column,
                                      residuals.rows + row * kLanes, residuals.columns + column};
            split_square<1, true>(entries, in_rows, in_pairs, &of_square);
          });
    }
  }
}

void add_left_out(const Operand& left, int64_t rows, const float* norms, float* sums) {
  for (int64_t row = 0; row < rows; row += kTileGroup) {
    const bool* second = left.second + row / kTileGroup * left.next_group;
    Floats of_rows[kTileGroup] = {};
    for (int64_t step = 0; step < left.steps; ++step, second += left.next_step) {
      if (*second) continue;
      float of_pairs[2][kLanes];  // norms of what the first and the second of each pair multiply
      for (int k = 0; k < kTileDepth; ++k) of_pairs[k % 2][k / 2] = norms[step * kTileDepth + k];
      const Floats first = load(of_pairs[0]), other = load(of_pairs[1]);
      for (int r = 0; r < kTileGroup; ++r) {
        Words pairs;
        const uint16_t* const tile = left.tiles + (row + r) / kTileSide * left.strip() + left.part();
        std::memcpy(&pairs, tile + step * kTileElements + r % kTileSide * kTileDepth, sizeof pairs);
        of_rows[r] += same_bits<Floats>(pairs << 16) * first +
                      same_bits<Floats>(pairs & 0xffff0000) * other;
      }
    }
    for (int64_t r = 0; r < smaller(kTileGroup, rows - row); ++r) sums[row + r] += sum_of(of_rows[r]);
  }
}
