#define MSL_VERSION 320
#include <mlx_preamble.h>
#line 1 "kernel.metal"
template <typename OutT, int ROWS, int BITS>
[[kernel]] void custom_kernel_localspec_few_rows__float_1_4_float_uint32_t_float_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* w [[buffer(2)]],
  const constant int* w_shape [[buffer(3)]],
  const device float* scales [[buffer(4)]],
  const constant int* scales_shape [[buffer(5)]],
  const device float* biases [[buffer(6)]],
  device float* y [[buffer(7)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
                                                                                                             
      
                                                                                                                 
                                                                                    
      
                                                                                                            
                                                                                                                
                                                             
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

}

#line 1 "entry"
struct MslThread { uint tpig[3], tpit[3], tgpig[3], tiitg, lane, sg, tptg[3], dtptg[3], tgpg[3], tpg[3], sgptg, dsgptg; };
extern "C" MSL_NOTSAN __attribute__((noinline)) void msl_entry(void** b, const MslThread* t) { custom_kernel_localspec_few_rows__float_1_4_float_uint32_t_float_float_float<float, 1, 4>((const device float*)b[0], (const constant int*)b[1], (const device uint32_t*)b[2], (const constant int*)b[3], (const device float*)b[4], (const constant int*)b[5], (const device float*)b[6], (device float*)b[7], t->lane, (metal::uint3){t->tpig[0], t->tpig[1], t->tpig[2]}); }
