    // One threadgroup for each row: log-sum-exp, then argmax(score + noise) and the sum of the scores' exponentials.
    // Call: words = seed low, seed high, position of row 0, vocabulary size, number of drafts, whether greedy.
    threadgroup float shared[32];
    threadgroup float keys[32];
    threadgroup uint ids[32];
    threadgroup float seconds[32];
    Crew crew;
    crew.index = thread_position_in_threadgroup.x;
    crew.count = threads_per_threadgroup.x;
    crew.lane = thread_index_in_simdgroup;
    crew.group = simdgroup_index_in_threadgroup;
    crew.groups = simdgroups_per_threadgroup;
    uint row = threadgroup_position_in_grid.x;
    uint2 seed = uint2(words[0], words[1]);
    uint position = words[2] + row;
    uint size = words[3];
    bool greedy = words[5] != 0;
    auto x = logits + size_t(row) * size;

    Normalizer found = normalizer_of(x, size, crew, shared);
    Scale scale;
    scale.normalizer = CUTOFF ? normalizers[row] : found.log_sum;
    scale.threshold = CUTOFF ? thresholds[row] : -INFINITY;
    scale.last_tied = CUTOFF ? last_tied[row] : int(size);
    scale.top = found.largest - scale.normalizer;
    scale.inverse = inverse;

    Best best = nobody();
    float total = 0.0f;
    if (greedy) {
        for (uint id = crew.index; id < size; id += crew.count) {
            best = with_key(best, static_cast<float>(x[id]) - scale.normalizer, id);
        }
    } else {
        // Two neighbours at a time: they share a call of the generator. All lanes stay in the loop together.
        for (uint first = 0; first < size; first += 2 * crew.count) {
            uint id = first + 2 * crew.index;
            float even = id < size ? score_of(static_cast<float>(x[id]), id, scale) : -INFINITY;
            float odd = id + 1 < size ? score_of(static_cast<float>(x[id + 1]), id + 1, scale) : -INFINITY;
            total += metal::exp(even) + metal::exp(odd);
            // What stays behind two keys even with the luckiest noise changes nothing.
            float most = metal::max(even, odd);
            float bound = simd_max(best.second);
            if (most > -INFINITY && most + LARGEST_GUMBEL >= bound) {
                uint2 noise = random_words(seed, GUMBEL_STREAM, position, id / 2);
                if (even > -INFINITY) {
                    best = with_key(best, even + gumbel_of(noise.x), id);
                }
                if (odd > -INFINITY) {
                    best = with_key(best, odd + gumbel_of(noise.y), id + 1);
                }
            }
        }
        total = crew_sum(total, crew, shared);
    }
    best = crew_best(best, crew, keys, ids, seconds);

    if (crew.index == 0) {
        uint token = best.id < size ? best.id : 0;
        float logit = static_cast<float>(x[token]);
        tokens[row] = token;
        log_p[row] = greedy ? 0.0f : score_of(logit, token, scale) - metal::log(total);
        logprob[row] = logit - scale.normalizer;
        normalizer[row] = scale.normalizer;
        gap[row] = best.key - best.second;
        bool passed = row < words[4] && drafts[row] == token;
        stops[row] = passed ? 0x7FFFFFFF : int(row);
    }
