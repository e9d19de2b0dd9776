// From a row's logits to what a token is drawn by: filters, temperature, the largest key.

// How a row's logits become scores.
struct Scale {
    float normalizer;  // log-sum-exp of the logits
    float threshold;   // tokens below this log-probability go
    int last_tied;     // and those exactly at it with larger ids
    float top;         // the row's largest log-probability
    float inverse;     // of the temperature
};

// Log-probability over temperature, up to a constant of the row: 0 for the largest, -inf for what is filtered out.
inline float score_of(float logit, uint id, Scale scale) {
    float logprob = logit - scale.normalizer;
    bool kept = logprob > scale.threshold || (logprob == scale.threshold && int(id) <= scale.last_tied);
    float shifted = logprob - scale.top;
    return kept && shifted != -INFINITY ? metal::max(shifted * scale.inverse, -3e38f) : -INFINITY;
}

constant uint NOBODY = 0xFFFFFFFFu;

// The largest key, of equal ones that with the lowest id, and the largest of the others.
struct Best {
    float key;
    uint id;
    float second;
};

inline Best nobody() {
    Best best;
    best.key = -INFINITY;
    best.id = NOBODY;
    best.second = -INFINITY;
    return best;
}

inline Best better(Best a, Best b) {
    bool first = a.key > b.key || (a.key == b.key && a.id < b.id);
    Best front = first ? a : b;
    front.second = metal::max(front.second, first ? b.key : a.key);
    return front;
}

inline Best with_key(Best best, float key, uint id) {
    Best one;
    one.key = key;
    one.id = id;
    one.second = -INFINITY;
    return better(best, one);
}

inline Best lanes_best(Best best) {
    for (ushort step = 16; step > 0; step /= 2) {
        Best other;
        other.key = simd_shuffle_xor(best.key, step);
        other.id = simd_shuffle_xor(best.id, step);
        other.second = simd_shuffle_xor(best.second, step);
        best = better(best, other);
    }
    return best;
}

// The best of the threadgroup, in each thread. The arrays are free again afterwards.
inline Best crew_best(
    Best best, Crew crew, threadgroup float* keys, threadgroup uint* ids, threadgroup float* seconds
) {
    best = lanes_best(best);
    if (crew.lane == 0) {
        keys[crew.group] = best.key;
        ids[crew.group] = best.id;
        seconds[crew.group] = best.second;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = nobody();
    if (crew.lane < crew.groups) {
        best.key = keys[crew.lane];
        best.id = ids[crew.lane];
        best.second = seconds[crew.lane];
    }
    best = lanes_best(best);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return best;
}
