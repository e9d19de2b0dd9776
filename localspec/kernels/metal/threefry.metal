// Random numbers as a function of (seed, stream, position, id): the same words, bit for bit, as localspec/noise.py.

constant uint GUMBEL_STREAM = 0;
constant uint COIN_STREAM = 1;
constant uint RESIDUAL_STREAM = 2;
constant uint ROUND_LENGTH = 64;

// No Gumbel value is larger: that of the smallest uniform, 2^-33, is 22.874.
constant float LARGEST_GUMBEL = 23.0f;

inline uint rotated(uint x, uint bits) {
    return (x << bits) | (x >> (32 - bits));
}

inline uint2 four_rounds(uint2 x, uint4 bits) {
    x.x += x.y;
    x.y = rotated(x.y, bits.x) ^ x.x;
    x.x += x.y;
    x.y = rotated(x.y, bits.y) ^ x.x;
    x.x += x.y;
    x.y = rotated(x.y, bits.z) ^ x.x;
    x.x += x.y;
    x.y = rotated(x.y, bits.w) ^ x.x;
    return x;
}

// Threefry-2x32 with 20 rounds.
inline uint2 threefry(uint2 key, uint2 counter) {
    uint third = key.x ^ key.y ^ 0x1BD11BDAu;
    uint4 odd = uint4(13u, 15u, 26u, 6u);
    uint4 even = uint4(17u, 29u, 16u, 24u);
    uint2 x = four_rounds(counter + key, odd);
    x = four_rounds(x + uint2(key.y, third + 1u), even);
    x = four_rounds(x + uint2(third, key.x + 2u), odd);
    x = four_rounds(x + uint2(key.x, key.y + 3u), even);
    x = four_rounds(x + uint2(key.y, third + 4u), odd);
    return x + uint2(third, key.x + 5u);
}

// The words of the ids 2 * pair and 2 * pair + 1.
inline uint2 random_words(uint2 seed, uint stream, uint position, uint pair) {
    return threefry(seed, uint2(pair | (stream << 24), position));
}

// In (0, 1): never 0, and at most 1 - 2^-24.
inline float uniform_of(uint word) {
    return metal::min((static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f, 0.999999940395355224609375f);
}

// -log(-log1p(-v)) of a word's uniform v. Metal has no log1p, and its log is not to be trusted next to 1, where the
// winners are. E = -log1p(-v) is 2 artanh(s) with s = v / (2 - v): for v up to 1/2, s is up to 1/3, and its series is
// cut after s^15 / 15 (the rest is below 2^-29 of E). Above 1/2, 1 - v is exact and far from 1. Either way E is right
// to 4 * 2^-24 of its size, and the Gumbel value to as much and the rounding of the last logarithm.
inline float gumbel_of(uint word) {
    float v = uniform_of(word);
    float s = v / (2.0f - v);
    float z = s * s;
    float series = 1.0f / 15.0f;
    series = series * z + 1.0f / 13.0f;
    series = series * z + 1.0f / 11.0f;
    series = series * z + 1.0f / 9.0f;
    series = series * z + 1.0f / 7.0f;
    series = series * z + 1.0f / 5.0f;
    series = series * z + 1.0f / 3.0f;
    float near = 2.0f * (s + s * (z * series));
    float far = -metal::log(1.0f - v);
    return -metal::log(v <= 0.5f ? near : far);
}
