    // y = x times the transpose of quantized weights, for ROWS rows at once. matmul.py has shapes and types.
    //
    // A simdgroup computes COLUMNS columns for all rows. It goes over the weights once: a lane takes VALUES of a
    // column's weights at a time, and multiplies them by that stretch of every row.
    //
    // What is added to what is the same for every ROWS, and nothing is left to the compiler's choice: every
    // product that is added to something is an explicit fma, which no compiler may take apart, and what is left
    // are plain sums, in which there is nothing to contract.
    constexpr int COLUMNS = 4;
    constexpr int VALUES = 8;
    constexpr int WORDS = VALUES * BITS / 32;
    constexpr int PER_WORD = 32 / BITS;
    constexpr uint MASK = (1u << BITS) - 1u;

    const int n_columns = w_shape[0];
    const int depth = x_shape[1];
    const int n_groups = scales_shape[1];
    const int group_bits = ctz(depth / n_groups);
    const int lane = int(thread_index_in_simdgroup);
    const int first = int(thread_position_in_grid.y) * COLUMNS;

    float sums[COLUMNS][ROWS];
    for (int c = 0; c < COLUMNS; ++c) {
      for (int r = 0; r < ROWS; ++r) {
        sums[c][r] = 0.0f;
      }
    }

    for (int k = lane * VALUES; k < depth; k += 32 * VALUES) {
      float weights[COLUMNS][VALUES];
      float scale[COLUMNS];
      float bias[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) {
        // Beyond the last column the last one is computed again, and not written.
        const size_t column = size_t(min(first + c, n_columns - 1));
        auto packed = w + (column * size_t(depth) + size_t(k)) / PER_WORD;
        for (int i = 0; i < WORDS; ++i) {
          const uint word = packed[i];
          for (int j = 0; j < PER_WORD; ++j) {
            weights[c][i * PER_WORD + j] = static_cast<float>((word >> (j * BITS)) & MASK);
          }
        }
        const size_t group = column * size_t(n_groups) + size_t(k >> group_bits);
        scale[c] = static_cast<float>(scales[group]);
        bias[c] = static_cast<float>(biases[group]);
      }
      for (int r = 0; r < ROWS; ++r) {
        auto row = x + size_t(r) * size_t(depth) + size_t(k);
        float values[VALUES];
        float total = 0.0f;
        for (int i = 0; i < VALUES; ++i) {
          values[i] = static_cast<float>(row[i]);
          total += values[i];
        }
        for (int c = 0; c < COLUMNS; ++c) {
          float dot = 0.0f;
          for (int i = 0; i < VALUES; ++i) {
            dot = fma(weights[c][i], values[i], dot);
          }
          sums[c][r] = fma(bias[c], total, fma(scale[c], dot, sums[c][r]));
        }
      }
    }

    for (int c = 0; c < COLUMNS; ++c) {
      for (int r = 0; r < ROWS; ++r) {
        float sum = sums[c][r];
        for (ushort distance = 1; distance < 32; distance *= 2) {
          sum += simd_shuffle_xor(sum, distance);
        }
        if (lane == 0 && first + c < n_columns) {
          y[size_t(r) * size_t(n_columns) + size_t(first + c)] = static_cast<OutT>(sum);
        }
      }
    }
