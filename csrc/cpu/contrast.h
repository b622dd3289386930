// Losses that set a row's positives against its negatives, each in sums of their own:
// multi-similarity, and one term for each positive among the negatives.
//
// Included by kernels.cpp, inside the namespace of one instruction set.

// Marks what takes no part and splits the rest: the row's negatives and the negated positives, each
// with kLeftOut in the other's places.
template <class T>
void split_row(const Block<T>& b, int64_t row, int64_t at, int64_t count, T* rising, T* falling) {
  const T* s = b.scores + row * b.stride + at;
  const int64_t group = b.row_groups[row], *groups = b.column_groups + at;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const bool own = groups[j] == group;
    rising[j] = own ? kLeftOut<T> : s[j];
    falling[j] = own && !(s[j] <= kLeftOut<T>) ? -s[j] : kLeftOut<T>;
  }
}

// Folds the maximum of a chunk and its sum of exponentials into the running state.
template <class T>
void fold_chunk(T* values, int64_t count, Softmax<T> softmax, const MaxSum& state, int64_t row) {
  const T top = maximum(values, count);
  const double sum = sum_exponentials<false>(values, count, top, softmax);
  // A NaN loses every comparison of maxima but shows in the sum.
  if (top > kLeftOut<T> || sum != sum) merge(state, row, top, sum, softmax.scale);
}

template <class T>
void multi_similarity_fold(const Block<T>& b, T scale, T positive_scale, const MaxSum& negatives,
                           const MaxSum& positives, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T rising[kChunk], falling[kChunk];
      split_row(b, row, at, n, rising, falling);
      fold_chunk(rising, n, Softmax<T>{scale}, negatives, row);
      fold_chunk(falling, n, Softmax<T>{positive_scale}, positives, row);
    });
  }
}

template <class T>
void multi_similarity_slope(const Block<T>& b, T scale, T positive_scale,
                            const ContrastSlope<T>& slope, int64_t begin, int64_t end) {
  const Softmax<T> rise{scale}, fall{positive_scale};
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T high = slope.negative_top[row], up = slope.negative_weight[row];
    const T low = slope.positive_top[row], down = slope.positive_weight[row];
    T* s = b.scores + row * b.stride;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T rising[kChunk], falling[kChunk];
      split_row(b, row, at, n, rising, falling);
      T* chunk = s + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        chunk[j] = up * rise.share(rising[j], high) - down * fall.share(falling[j], low);
      }
    });
  }
}

// State of whole rows: the negatives' sum of exponentials, then the positives' terms against it.
template <class T>
void multi_positive_fold(const Block<T>& b, T scale, const MaxSum& negatives,
                         const PositiveSums& sums, int64_t begin, int64_t end) {
  const MultiPositive<T> term{scale};
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    T rising[kChunk], falling[kChunk];
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split_row(b, row, at, n, rising, falling);
      fold_chunk(rising, n, Softmax<T>{scale}, negatives, row);
    });
    const T top = T(negatives.max[row]), log_sum = T(__builtin_log(negatives.sum[row]));
    double losses = 0, slopes = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      split_row(b, row, at, n, rising, falling);
      T losses_part = 0, slopes_part = 0;
#pragma omp simd reduction(+ : losses_part, slopes_part)
      for (int64_t j = 0; j < n; ++j) {
        T loss, slope;
        term(-falling[j], top, log_sum, loss, slope);
        const bool part = !(falling[j] <= kLeftOut<T>);
        losses_part += part ? loss : T(0);
        slopes_part += part ? slope : T(0);
      }
      losses += losses_part;
      slopes += slopes_part;
    });
    const bool none = negatives.sum[row] == 0;
    sums.losses[row] = none ? 0 : losses;
    sums.slopes[row] = none ? 0 : slopes;
  }
}

// positive_top holds the logarithms of the negatives' sums.
template <class T>
void multi_positive_slope(const Block<T>& b, T scale, const ContrastSlope<T>& slope, int64_t begin,
                          int64_t end) {
  const Softmax<T> softmax{scale};
  const MultiPositive<T> term{scale};
  for (int64_t row = begin; row < end; ++row) {
    mark_left_out(b, row);
    const T top = slope.negative_top[row], up = slope.negative_weight[row];
    const T log_sum = slope.positive_top[row], down = slope.positive_weight[row];
    T* s = b.scores + row * b.stride;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T rising[kChunk], falling[kChunk];
      split_row(b, row, at, n, rising, falling);
      T* chunk = s + at;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        T loss, share;
        term(-falling[j], top, log_sum, loss, share);
        const T pull = falling[j] <= kLeftOut<T> ? T(0) : down * share;
        chunk[j] = up * softmax.share(rising[j], top) - pull;
      }
    });
  }
}
