// What the kernels of verification do with a row of logits. The threads of one threadgroup share a row, and each sum is
// put together in one order: each thread's own, then trees of shuffles. It does not depend on the number of rows, nor
// on the order that simd_sum would take. Maxima may be taken in any order.

// Where a thread stands in its threadgroup.
struct Crew {
    uint index;
    uint count;
    uint lane;
    uint group;
    uint groups;
};

inline float tree_sum(float value) {
    value += simd_shuffle_xor(value, ushort(16));
    value += simd_shuffle_xor(value, ushort(8));
    value += simd_shuffle_xor(value, ushort(4));
    value += simd_shuffle_xor(value, ushort(2));
    value += simd_shuffle_xor(value, ushort(1));
    return value;
}

// The sum over the threadgroup, the same bits in each thread: what is added last was read from memory, so that no
// compiler can fuse a product into it in one lane and not in another. `shared` is free again afterwards.
inline float crew_sum(float value, Crew crew, threadgroup float* shared) {
    value = tree_sum(value);
    if (crew.lane == 0) {
        shared[crew.group] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = tree_sum(crew.lane < crew.groups ? shared[crew.lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return value;
}

inline float crew_max(float value, Crew crew, threadgroup float* shared) {
    value = simd_max(value);
    if (crew.lane == 0) {
        shared[crew.group] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_max(crew.lane < crew.groups ? shared[crew.lane] : -INFINITY);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return value;
}

struct Normalizer {
    float largest;
    float log_sum;
};

// Log-sum-exp of a row; not finite where a logit is not a number or plus infinity, or all are minus infinity.
template <typename Logits>
inline Normalizer normalizer_of(Logits logits, uint size, Crew crew, threadgroup float* shared) {
    float largest = -INFINITY;
    float sum = 0.0f;
    for (uint id = crew.index; id < size; id += crew.count) {
        float logit = static_cast<float>(logits[id]);
        if (logit > largest) {
            sum = sum * metal::exp(largest - logit) + 1.0f;
            largest = logit;
        } else if (logit != -INFINITY) {  // what is not a number comes here, and stays in the sum
            sum += metal::exp(logit - largest);
        }
    }
    Normalizer found;
    found.largest = crew_max(largest, crew, shared);
    float share = largest == -INFINITY ? sum : sum * metal::exp(largest - found.largest);
    found.log_sum = found.largest + metal::log(crew_sum(share, crew, shared));
    return found;
}
