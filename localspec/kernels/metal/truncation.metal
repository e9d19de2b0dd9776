    // One threadgroup for each row. A token must pass all filters, and each of them keeps what is above some
    // log-probability: the highest of these decides. That of top-k is found among all tokens: where another filter
    // leaves fewer than k, its threshold is the higher one, and where it leaves more, they have the same k largest.
    // Call: words = vocabulary size, top-k; shares = top-p, log of min-p. Off are a top-k of 0, a top-p of 0, and a
    // min-p of 0.
    threadgroup float shared[32];
    threadgroup float bins[512];
    threadgroup uint masks[32];
    Crew crew;
    crew.index = thread_position_in_threadgroup.x;
    crew.count = threads_per_threadgroup.x;
    crew.lane = thread_index_in_simdgroup;
    crew.group = simdgroup_index_in_threadgroup;
    crew.groups = simdgroups_per_threadgroup;
    uint row = threadgroup_position_in_grid.x;
    uint size = words[0];
    uint top_k = words[1];
    auto x = logits + size_t(row) * size;

    Normalizer found = normalizer_of(x, size, crew, shared);
    float threshold = (found.largest - found.log_sum) + shares[1];
    int last = int(size) - 1;
    if (shares[0] > 0.0f) {
        float mass = 0.0f;
        for (uint id = crew.index; id < size; id += crew.count) {
            mass += metal::exp(static_cast<float>(x[id]) - found.log_sum);
        }
        float target = shares[0] * crew_sum(mass, crew, shared);
        Edge edge = edge_of(x, size, found.log_sum, BY_MASS, 0.0f, target, crew, bins, masks);
        threshold = metal::max(threshold, unordered(edge.key));
    }
    if (top_k > 0) {
        float k = static_cast<float>(top_k);
        Edge edge = edge_of(x, size, found.log_sum, BY_COUNT, 0.0f, k, crew, bins, masks);
        float value = unordered(edge.key);
        if (value >= threshold) {
            threshold = value;
            float room = k - edge.above;
            if (edge.inside > room && value > -INFINITY) {
                Edge tied = edge_of(x, size, found.log_sum, BY_ID, value, room, crew, bins, masks);
                last = int(size - 1 - tied.key);
            }
        }
    }

    if (crew.index == 0) {
        thresholds[row] = threshold;
        last_tied[row] = last;
        normalizers[row] = found.log_sum;
    }
