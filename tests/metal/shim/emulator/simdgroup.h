// <metal_simdgroup>: each operation waits for the lanes of its simdgroup, then computes the results of all of them.
#pragma once
namespace metal {

enum class lane_operation {
  sum, product, minimum, maximum, bit_and, bit_or, bit_xor,                           // reductions
  exclusive_sum, inclusive_sum, exclusive_product, inclusive_product,                 // prefixes
  shuffle, shuffle_xor, shuffle_up, shuffle_down, rotate_up, rotate_down, broadcast_first,
};

// `width` lanes work together: 32, or 4 for the quad operations.
template <lane_operation OP, class T, int WIDTH>
struct lanes {
  T value[32];
  T result[32];
  MetalLanes* call;

  METAL_UNCHECKED bool active(int lane) const {
    return call->active >> lane & 1;
  }

  METAL_UNCHECKED static T combine(T a, T b) {
    if constexpr (OP == lane_operation::product || OP == lane_operation::exclusive_product ||
                  OP == lane_operation::inclusive_product) return a * b;
    else if constexpr (OP == lane_operation::minimum) return b < a ? b : a;
    else if constexpr (OP == lane_operation::maximum) return a < b ? b : a;
    else if constexpr (OP == lane_operation::bit_and) return a & b;
    else if constexpr (OP == lane_operation::bit_or) return a | b;
    else if constexpr (OP == lane_operation::bit_xor) return a ^ b;
    else return a + b;
  }

  // Neighbours first, then pairs of them, and so on.
  METAL_UNCHECKED T reduce_as_tree(int first) {
    T part[WIDTH];
    bool some[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
      part[i] = value[first + i];
      some[i] = active(first + i);
    }
    for (int step = 1; step < WIDTH; step *= 2) {
      for (int i = 0; i < WIDTH; i += 2 * step) {
        if (!some[i + step]) continue;
        part[i] = some[i] ? combine(part[i], part[i + step]) : part[i + step];
        some[i] = true;
      }
    }
    return part[0];
  }

  METAL_UNCHECKED T reduce_in_line(int first, bool backward) {
    T total;
    bool some = false;
    for (int k = 0; k < WIDTH; k++) {
      int lane = first + (backward ? WIDTH - 1 - k : k);
      if (!active(lane)) continue;
      total = some ? combine(total, value[lane]) : value[lane];
      some = true;
    }
    return total;
  }

  METAL_UNCHECKED void reduce(int first) {
    T total = call->order == METAL_TREE ? reduce_as_tree(first) : reduce_in_line(first, call->order == METAL_BACKWARD);
    for (int i = first; i < first + WIDTH; i++) result[i] = total;
  }

  METAL_UNCHECKED void scan(int first) {
    constexpr bool exclusive = OP == lane_operation::exclusive_sum || OP == lane_operation::exclusive_product;
    constexpr bool sums = OP == lane_operation::exclusive_sum || OP == lane_operation::inclusive_sum;
    T total = sums ? T(0) : T(1);
    for (int i = first; i < first + WIDTH; i++) {
      if (!active(i)) continue;
      T next = combine(total, value[i]);
      result[i] = exclusive ? total : next;
      total = next;
    }
  }

  METAL_UNCHECKED int source(int first, int lane) {
    int within = lane - first;
    int argument = (int)call->argument[lane];
    if constexpr (OP == lane_operation::shuffle) return argument < WIDTH ? first + argument : -1;
    else if constexpr (OP == lane_operation::shuffle_xor) return (within ^ argument) < WIDTH ? first + (within ^ argument) : -1;
    else if constexpr (OP == lane_operation::shuffle_up) return within < argument ? lane : lane - argument;
    else if constexpr (OP == lane_operation::shuffle_down) return within + argument >= WIDTH ? lane : lane + argument;
    else if constexpr (OP == lane_operation::rotate_up) return first + ((within - argument) & (WIDTH - 1));
    else return first + ((within + argument) & (WIDTH - 1));
  }

  METAL_UNCHECKED void move(int first) {
    for (int i = first; i < first + WIDTH; i++) {
      if (!active(i)) continue;
      int from = source(first, i);
      if (from >= 0 && active(from)) {
        result[i] = value[from];
      } else {
        call->reader = 1 + i;
        __builtin_memset((void*)&result[i], 0xff, sizeof(T));
      }
    }
  }

  METAL_UNCHECKED void broadcast_first(int first) {
    int from = first;
    while (!active(from)) from++;
    for (int i = first; i < first + WIDTH; i++) result[i] = value[from];
  }

  METAL_UNCHECKED bool any_active(int first) const {
    return call->active >> first & (WIDTH == 32 ? ~0u : (1u << WIDTH) - 1);
  }

  METAL_UNCHECKED static void run(MetalLanes* call) {
    lanes all;
    all.call = call;
    for (int i = 0; i < 32; i++) __builtin_memcpy((void*)&all.value[i], call->in[i], sizeof(T));
    for (int first = 0; first < 32; first += WIDTH) {
      if (!all.any_active(first)) continue;
      if constexpr (OP <= lane_operation::bit_xor) all.reduce(first);
      else if constexpr (OP <= lane_operation::inclusive_product) all.scan(first);
      else if constexpr (OP == lane_operation::broadcast_first) all.broadcast_first(first);
      else all.move(first);
    }
    for (int i = 0; i < 32; i++) __builtin_memcpy(call->out[i], (void*)&all.result[i], sizeof(T));
  }
};

template <lane_operation OP, int WIDTH, class T>
METAL_INLINE T across_lanes(T value, uint argument, int site) {
  static_assert(sizeof(T) <= 16, "no simdgroup operation on so large a type");
  metal_simd(&value, sizeof(T), argument, &lanes<OP, T, WIDTH>::run, site);
  return value;
}

#define METAL_LANES(name, operation)                                  \
  template <class T>                                                  \
  METAL_INLINE T simd_##name(T value, int site = METAL_HERE) {                             \
    return across_lanes<lane_operation::operation, 32>(value, 0, site);    \
  }                                                                   \
  template <class T>                                                  \
  METAL_INLINE T quad_##name(T value, int site = METAL_HERE) {                             \
    return across_lanes<lane_operation::operation, 4>(value, 0, site);     \
  }
METAL_LANES(sum, sum)
METAL_LANES(product, product)
METAL_LANES(min, minimum)
METAL_LANES(max, maximum)
METAL_LANES(and, bit_and)
METAL_LANES(or, bit_or)
METAL_LANES(xor, bit_xor)
METAL_LANES(prefix_exclusive_sum, exclusive_sum)
METAL_LANES(prefix_inclusive_sum, inclusive_sum)
METAL_LANES(prefix_exclusive_product, exclusive_product)
METAL_LANES(prefix_inclusive_product, inclusive_product)
METAL_LANES(broadcast_first, broadcast_first)
#undef METAL_LANES

#define METAL_SHUFFLE(name, operation)                                    \
  template <class T>                                                      \
  METAL_INLINE T simd_##name(T value, ushort argument, int site = METAL_HERE) {              \
    return across_lanes<lane_operation::operation, 32>(value, argument, site); \
  }                                                                       \
  template <class T>                                                      \
  METAL_INLINE T quad_##name(T value, ushort argument, int site = METAL_HERE) {              \
    return across_lanes<lane_operation::operation, 4>(value, argument, site);  \
  }
METAL_SHUFFLE(shuffle, shuffle)
METAL_SHUFFLE(broadcast, shuffle)
METAL_SHUFFLE(shuffle_xor, shuffle_xor)
METAL_SHUFFLE(shuffle_up, shuffle_up)
METAL_SHUFFLE(shuffle_down, shuffle_down)
METAL_SHUFFLE(shuffle_rotate_up, rotate_up)
METAL_SHUFFLE(shuffle_rotate_down, rotate_down)
#undef METAL_SHUFFLE

struct simd_vote {
  ulong mask;
  explicit operator ulong() const {
    return mask;
  }
  bool all() const {
    return mask == 0xffffffffu;
  }
  bool any() const {
    return mask != 0;
  }
};

METAL_INLINE simd_vote simd_ballot(bool vote, int site = METAL_HERE) {
  simd_vote result;
  result.mask = across_lanes<lane_operation::bit_or, 32>((uint)vote << metal_lane(), 0, site);
  return result;
}
METAL_INLINE simd_vote simd_active_threads_mask(int site = METAL_HERE) {
  return simd_ballot(true, site);
}
METAL_INLINE bool simd_all(bool vote, int site = METAL_HERE) {
  return across_lanes<lane_operation::bit_and, 32>((uint)vote, 0, site);
}
METAL_INLINE bool simd_any(bool vote, int site = METAL_HERE) {
  return across_lanes<lane_operation::bit_or, 32>((uint)vote, 0, site);
}
METAL_INLINE bool simd_is_first(int site = METAL_HERE) {
  return across_lanes<lane_operation::exclusive_sum, 32>(1u, 0, site) == 0;
}

}  // namespace metal
