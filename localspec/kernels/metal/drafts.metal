// q, the distribution that drafts were drawn from.

// Where an id stands among ascending ones; `count` where it does not.
template <typename Ids>
inline uint place_of(Ids ids, uint count, uint id) {
    uint low = 0;
    uint high = count;
    while (low < high) {
        uint middle = (low + high) / 2;
        if (uint(ids[middle]) < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < count && uint(ids[low]) == id ? low : count;
}

// q of an id below the vocabulary's size in a row of `width` columns: one for each id, or for those in `ids`.
template <typename Columns, typename Ids>
inline float q_of(Columns q, Ids ids, bool reduced, uint row, uint width, uint id) {
    uint column = reduced ? place_of(ids, width, id) : id;
    return column < width ? static_cast<float>(q[size_t(row) * width + column]) : 0.0f;
}
