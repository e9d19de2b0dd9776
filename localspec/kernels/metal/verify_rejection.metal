    // One threadgroup for each row: log-sum-exp, the sum of the scores' exponentials, the draft's coin, then one pass
    // that draws from the residual and, in case nothing is left of it, from p as well.
    // Call: words = seed low, seed high, position of row 0, vocabulary size, number of drafts, whether greedy, columns
    // of q. Q: 0 where drafts were certain, 1 where q has a column for each id, 2 where it has them for `q_ids`.
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
    uint size = words[3];
    bool judges = row < words[4];
    bool greedy = words[5] != 0;
    uint width = words[6];
    uint draft = judges ? drafts[row] : NOBODY;
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
    for (uint id = crew.index; id < size; id += crew.count) {
        float logit = static_cast<float>(x[id]);
        if (greedy) {
            best = with_key(best, logit - scale.normalizer, id);
        } else {
            total += metal::exp(score_of(logit, id, scale));
        }
    }
    total = crew_sum(total, crew, shared);

    if (!greedy) {
        Best whole = nobody();  // of p; `best` is of the residual
        for (uint first = 0; first < size; first += 2 * crew.count) {
            uint id = first + 2 * crew.index;
            float even = id < size ? score_of(static_cast<float>(x[id]), id, scale) : -INFINITY;
            float odd = id + 1 < size ? score_of(static_cast<float>(x[id + 1]), id + 1, scale) : -INFINITY;
            float most = metal::max(even, odd);
            float bound = simd_max(best.key);
            if (most > -INFINITY && most + LARGEST_GUMBEL >= bound) {
                uint2 noise = random_words(seed, RESIDUAL_STREAM, words[2] + row, id / 2);
                for (uint side = 0; side < 2; side++) {
                    float score = side == 0 ? even : odd;
                    uint own = id + side;
                    float p = metal::exp(score) / total;
                    if (p > 0.0f) {
                        float key = score + gumbel_of(side == 0 ? noise.x : noise.y);
                        whole = with_key(whole, key, own);
                        // The residual's key is that of p and log((p - q) / p), which is never positive: q matters
                        // only where p's own key would win, and is seldom read.
                        if (key >= best.key && own != (Q == 0 ? draft : NOBODY)) {
                            float left = p - (Q != 0 && judges ? q_of(q, q_ids, Q == 2, row, width, own) : 0.0f);
                            if (left > 0.0f) {
                                best = with_key(best, key + metal::log(left / p), own);
                            }
                        }
                    }
                }
            }
        }
        best = crew_best(best, crew, keys, ids, seconds);
        whole = crew_best(whole, crew, keys, ids, seconds);
        if (best.id == NOBODY) {
            best = whole;
        }
    } else {
        best = crew_best(best, crew, keys, ids, seconds);
    }

    if (crew.index == 0) {
        float draft_score = -INFINITY;
        float draft_logit = -INFINITY;
        float q_draft = 1.0f;
        if (draft < size) {
            draft_logit = static_cast<float>(x[draft]);
            draft_score = score_of(draft_logit, draft, scale);
            if (Q != 0) {
                q_draft = q_of(q, q_ids, Q == 2, row, width, draft);
            }
        }
        uint token = best.id < size ? best.id : 0;
        float p_draft = greedy ? (draft == token ? 1.0f : 0.0f) : metal::exp(draft_score) / total;
        float coin = uniform_of(random_words(seed, COIN_STREAM, words[2] * ROUND_LENGTH + row, 0).x);
        bool passed = judges && coin * q_draft < p_draft;
        float logit = static_cast<float>(x[token]);
        float log_total = metal::log(total);
        tokens[row] = token;
        log_p[row] = greedy ? 0.0f : score_of(logit, token, scale) - log_total;
        logprob[row] = logit - scale.normalizer;
        draft_log_p[row] = greedy ? (draft == token ? 0.0f : -INFINITY) : draft_score - log_total;
        draft_logprob[row] = draft_logit - scale.normalizer;
        normalizer[row] = scale.normalizer;
        stops[row] = passed ? 0x7FFFFFFF : int(row);
    }
