// Finds a row's key at an edge without sorting: digit by digit, from the highest, each time into one of 16 bins.

constant uint BY_MASS = 0;   // keys: log-probabilities; weights: probabilities
constant uint BY_COUNT = 1;  // keys: log-probabilities; weights: 1
constant uint BY_ID = 2;     // of the tokens at one log-probability only; keys: ids, the lowest is the largest key

// A float's bits as a number that is larger where the float is, and back.
inline uint ordered(float value) {
    uint bits = as_type<uint>(value);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

inline float unordered(uint key) {
    return as_type<float>((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}

struct Edge {
    uint key;
    float above;   // weight of all larger keys
    float inside;  // weight of this one
};

// The smallest of the row's keys that has less than `target` above it: the largest one where none has. Sums are counts,
// or put together in one order, so that all threads find the same, and the same every time.
template <typename Logits>
inline Edge edge_of(
    Logits logits, uint size, float normalizer, uint by, float tie, float target, Crew crew, threadgroup float* bins,
    threadgroup uint* masks
) {
    Edge edge;
    edge.key = 0;
    edge.above = 0.0f;
    edge.inside = 0.0f;
    for (int shift = 28; shift >= 0; shift -= 4) {
        float weights[16];
        for (uint digit = 0; digit < 16; digit++) {
            weights[digit] = 0.0f;
        }
        uint mask = 0;
        for (uint id = crew.index; id < size; id += crew.count) {
            float logprob = static_cast<float>(logits[id]) - normalizer;
            uint key = by == BY_ID ? size - 1 - id : ordered(logprob);
            bool inside = shift == 28 || (key >> (shift + 4)) == edge.key;
            if (inside && (by != BY_ID || logprob == tie)) {
                uint own = (key >> shift) & 15;
                float weight = by == BY_MASS ? metal::exp(logprob) : 1.0f;
                mask |= 1u << own;
                // No index that is known only at run time: the bins stay in registers.
                for (uint digit = 0; digit < 16; digit++) {
                    weights[digit] += digit == own ? weight : 0.0f;
                }
            }
        }
        // Lanes halve what they hold: in the end lanes 2d and 2d + 1 have the simdgroup's sum of digit d.
        for (uint span = 8; span > 0; span /= 2) {
            bool upper = (crew.lane & (2 * span)) != 0;
            for (uint i = 0; i < span; i++) {
                float given = upper ? weights[i] : weights[i + span];
                float own = upper ? weights[i + span] : weights[i];
                weights[i] = own + simd_shuffle_xor(given, ushort(2 * span));
            }
        }
        float held = weights[0] + simd_shuffle_xor(weights[0], ushort(1));
        mask = simd_or(mask);
        if (crew.lane % 2 == 0) {
            bins[crew.group * 16 + crew.lane / 2] = held;
        }
        if (crew.lane == 0) {
            masks[crew.group] = mask;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        mask = simd_or(crew.lane < crew.groups ? masks[crew.lane] : 0u);
        // Each simdgroup adds the simdgroups' sums up, lane d those of digit d, all in the same order.
        held = 0.0f;
        for (uint group = 0; group < crew.groups; group++) {
            held += bins[group * 16 + crew.lane % 16];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float above = edge.above;
        uint chosen = 0;
        bool any = false;
        for (uint digit = 16; digit-- > 0;) {
            float sum = simd_shuffle(held, ushort(digit));
            bool there = (mask & (1u << digit)) != 0;
            if (there && (!any || above < target)) {
                any = true;
                chosen = digit;
                edge.above = above;
                edge.inside = sum;
            }
            above += sum;
        }
        edge.key = (edge.key << 4) | chosen;
    }
    return edge;
}
