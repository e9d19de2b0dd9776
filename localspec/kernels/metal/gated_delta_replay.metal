    // State of the gated delta rule after the first `kept` of T recorded rows. recurrence.py has shapes and types.
    //
    // A simdgroup computes one row of the state, Dk numbers, of which each lane has PER_LANE in a row. The
    // arithmetic is that of mlx-lm's own kernel, expression for expression: whatever the compiler makes of a product
    // that is added to something, it makes it of both. Sums over lanes are an explicit butterfly, which is what
    // mlx-lm's kernels have, or what simd_sum does on today's devices.
    constexpr int PER_LANE = Dk / 32;

    const int head = int(thread_position_in_grid.z);
    const int batch = head / Hv;
    const int value_head = head % Hv;
    const int key_head = value_head / (Hv / Hk);
    const int value = int(thread_position_in_grid.y);
    const int first = int(thread_index_in_simdgroup) * PER_LANE;
    const int recorded = k_shape[1];
    const int rows = min(int(kept), recorded);

    auto keys = k + (size_t(batch) * recorded * Hk + key_head) * Dk + first;
    auto values = v + (size_t(batch) * recorded * Hv + value_head) * Dv + value;
    auto betas = beta + size_t(batch) * recorded * Hv + value_head;
    auto gates = g + (size_t(batch) * recorded * Hv + value_head) * GATES + (GATES > 1 ? first : 0);
    const size_t place = (size_t(head) * Dv + value) * Dk + first;

    float state[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) {
      state[i] = static_cast<float>(state_in[place + i]);
    }
    for (int t = 0; t < rows; ++t) {
      float known = 0.0f;
      for (int i = 0; i < PER_LANE; ++i) {
        state[i] = state[i] * static_cast<float>(gates[GATES > 1 ? i : 0]);
        known += state[i] * static_cast<float>(keys[i]);
      }
      known += simd_shuffle_xor(known, 1);
      known += simd_shuffle_xor(known, 2);
      known += simd_shuffle_xor(known, 4);
      known += simd_shuffle_xor(known, 8);
      known += simd_shuffle_xor(known, 16);

      const float delta = (static_cast<float>(values[0]) - known) * static_cast<float>(betas[0]);
      for (int i = 0; i < PER_LANE; ++i) {
        state[i] = state[i] + static_cast<float>(keys[i]) * delta;
      }
      keys += Hk * Dk;
      values += Hv * Dv;
      betas += Hv;
      gates += Hv * GATES;
    }
    for (int i = 0; i < PER_LANE; ++i) {
      state_out[place + i] = static_cast<StateT>(state[i]);
    }
