// <metal_integer>
#pragma once
namespace metal {

#define METAL_INTEGER(T)                        \
  METAL_INLINE T min(T a, T b) {                \
    return b < a ? b : a;                       \
  }                                             \
  METAL_INLINE T max(T a, T b) {                \
    return a < b ? b : a;                       \
  }                                             \
  METAL_INLINE T clamp(T x, T low, T high) {    \
    return min(max(x, low), high);              \
  }
METAL_INTEGER(char)
METAL_INTEGER(int8_t)
METAL_INTEGER(uchar)
METAL_INTEGER(short)
METAL_INTEGER(ushort)
METAL_INTEGER(int)
METAL_INTEGER(uint)
METAL_INTEGER(long)
METAL_INTEGER(ulong)
#undef METAL_INTEGER

METAL_INLINE short abs(short x) {
  return x < 0 ? -x : x;
}
METAL_INLINE int abs(int x) {
  return x < 0 ? -x : x;
}
METAL_INLINE long abs(long x) {
  return x < 0 ? -x : x;
}

#define METAL_BITS(T, suffix, bits)                                     \
  METAL_INLINE T popcount(T x) {                                        \
    return (T)__builtin_popcount##suffix(x);                            \
  }                                                                     \
  METAL_INLINE T clz(T x) {                                             \
    return x ? (T)__builtin_clz##suffix(x) : (T)bits;                   \
  }                                                                     \
  METAL_INLINE T ctz(T x) {                                             \
    return x ? (T)__builtin_ctz##suffix(x) : (T)bits;                   \
  }
METAL_BITS(int, , 32)
METAL_BITS(uint, , 32)
METAL_BITS(long, l, 64)
METAL_BITS(ulong, l, 64)
#undef METAL_BITS

METAL_INLINE uint mulhi(uint a, uint b) {
  return (uint)((ulong)a * b >> 32);
}
METAL_INLINE int mulhi(int a, int b) {
  return (int)((long)a * b >> 32);
}
METAL_INLINE ulong mulhi(ulong a, ulong b) {
  return (ulong)((unsigned __int128)a * b >> 64);
}
METAL_INLINE uint reverse_bits(uint x) {
  return __builtin_bitreverse32(x);
}
METAL_INLINE uint rotate(uint x, uint n) {
  return __builtin_rotateleft32(x, n);
}
METAL_INLINE ulong rotate(ulong x, ulong n) {
  return __builtin_rotateleft64(x, n);
}
METAL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits ? x << (32 - bits - offset) >> (32 - bits) : 0;
}

}  // namespace metal
