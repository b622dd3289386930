// Elementwise losses: losses[row] += sum_j loss, and with weights the slope in place.
//
// Included by kernels.cpp, inside the namespace of one instruction set.

// One chunk; everything by value, so that no store into `s` can be thought to change it.
template <bool with_slope, class T, class Epilogue>
void elementwise_chunk(T* s, const T* targets, int64_t count, Epilogue epilogue, T weight,
                       double& losses, double& slopes) {
  T losses_part = 0, slopes_part = 0;
#pragma omp simd reduction(+ : losses_part, slopes_part)
  for (int64_t j = 0; j < count; ++j) {
    T loss, slope;
    epilogue(s[j], targets[j], loss, slope);
    losses_part += loss;
    slopes_part += slope;
    if constexpr (with_slope) s[j] = weight * slope;
  }
  losses += losses_part;
  slopes += slopes_part;
}

template <bool with_slope, class T, class Epilogue>
void elementwise_rows(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                      double* losses, double* slope_sums, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T weight = with_slope ? weights[row] * factor : T(0);
    double loss = 0, slope = 0;
    for_chunks(0, b.columns, [&](int64_t at, int64_t n) {
      T targets[kChunk];
      load_targets(b, row, at, n, targets);
      elementwise_chunk<with_slope>(b.scores + row * b.stride + at, targets, n, epilogue, weight,
                                    loss, slope);
    });
    losses[row] += loss;
    if (slope_sums) slope_sums[row] += slope;
  }
}

template <class T, class Epilogue>
void elementwise(const Block<T>& b, const Epilogue& epilogue, T factor, const T* weights,
                 double* losses, double* slope_sums, int64_t begin, int64_t end) {
  const auto run = weights ? elementwise_rows<true, T, Epilogue> : elementwise_rows<false, T, Epilogue>;
  run(b, epilogue, factor, weights, losses, slope_sums, begin, end);
}

template <class T>
void sigmoid(const Block<T>& b, T scale, T bias, const T* weights, double* losses,
             double* slope_sums, int64_t begin, int64_t end) {
  elementwise(b, Sigmoid<T>{scale, bias}, scale, weights, losses, slope_sums, begin, end);
}

template <class T>
void squared_error(const Block<T>& b, const T* weights, double* losses, int64_t begin,
                   int64_t end) {
  elementwise(b, SquaredError<T>{}, T(1), weights, losses, static_cast<double*>(nullptr), begin,
              end);
}
