// Vectors: clang's own extended vectors, with swizzles, as Apple's compiler has them.
#pragma once
namespace metal {

template <class T, int N>
struct vector_of {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T, int N>
using vec = typename vector_of<T, N>::type;

#define METAL_VECTORS(T)  \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
METAL_VECTORS(float)
METAL_VECTORS(half)
METAL_VECTORS(bfloat)
METAL_VECTORS(char)
METAL_VECTORS(uchar)
METAL_VECTORS(short)
METAL_VECTORS(ushort)
METAL_VECTORS(int)
METAL_VECTORS(uint)
METAL_VECTORS(long)
METAL_VECTORS(ulong)
#undef METAL_VECTORS
// A comparison of float or int vectors gives one of ints; clang's vectors of bool have no swizzles.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

// packed_float4 and the like: the alignment of one element.
template <class T, int N>
struct packed {
  T element[N];
  METAL_INLINE packed() = default;
  METAL_INLINE packed(vec<T, N> v) {
    for (int i = 0; i < N; i++) element[i] = v[i];
  }
  METAL_INLINE operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v[i] = element[i];
    return v;
  }
  METAL_INLINE T& operator[](int i) {
    return element[i];
  }
  METAL_INLINE T operator[](int i) const {
    return element[i];
  }
};
typedef packed<float, 2> packed_float2;
typedef packed<float, 3> packed_float3;
typedef packed<float, 4> packed_float4;
typedef packed<half, 4> packed_half4;
typedef packed<uchar, 4> packed_uchar4;
typedef packed<uint, 4> packed_uint4;

// float4(a, b.xy, c): what the constructor macros below stand for.
template <class V, class T, int N>
struct make {
  template <class A, class... Rest>
  METAL_INLINE static V go(A a, Rest... rest) {
    return fill(choose<sizeof...(Rest) == 0 ? kind<A> : SEVERAL>(), a, rest...);
  }

 private:
  enum { VECTOR, SCALAR, PACKED, SEVERAL };
  template <int>
  struct choose {};

  template <class A>
  static constexpr int kind = __is_class(A) ? PACKED
                              : __is_arithmetic(A) || __is_same(A, half) || __is_same(A, bfloat) || __is_enum(A) ? SCALAR
                                                                                                                : VECTOR;

  template <class A>
  METAL_INLINE static V fill(choose<SCALAR>, A a) {
    V v;
    for (int k = 0; k < N; k++) v[k] = (T)a;
    return v;
  }
  template <class A>
  METAL_INLINE static V fill(choose<VECTOR>, A a) {
    return __builtin_convertvector(a, V);
  }
  template <class A>
  METAL_INLINE static V fill(choose<PACKED>, A a) {
    V v = a;
    return v;
  }
  template <class... A>
  METAL_INLINE static V fill(choose<SEVERAL>, A... a) {
    V v;
    int at = 0;
    int order[] = {(put(choose<kind<A>>(), v, at, a), 0)...};
    (void)order;
    return v;
  }

  template <class A>
  METAL_INLINE static void put(choose<SCALAR>, V& v, int& at, A a) {
    v[at++] = (T)a;
  }
  template <class A>
  METAL_INLINE static void put(choose<VECTOR>, V& v, int& at, A a) {
    for (unsigned k = 0; k < sizeof(A) / sizeof(a[0]) && at < N; k++) v[at++] = (T)a[k];
  }
};

template <class T, class U>
METAL_INLINE T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type between types of different sizes");
  return __builtin_bit_cast(T, u);
}
template <class V>
METAL_INLINE auto dot(V a, V b) -> decltype(a[0] * b[0]) {
  auto sum = a[0] * b[0];
  for (unsigned i = 1; i < sizeof(V) / sizeof(a[0]); i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace metal

using metal::as_type;

#define float2(...) metal::make<metal::float2, float, 2>::go(__VA_ARGS__)
#define float3(...) metal::make<metal::float3, float, 3>::go(__VA_ARGS__)
#define float4(...) metal::make<metal::float4, float, 4>::go(__VA_ARGS__)
#define half2(...) metal::make<metal::half2, half, 2>::go(__VA_ARGS__)
#define half3(...) metal::make<metal::half3, half, 3>::go(__VA_ARGS__)
#define half4(...) metal::make<metal::half4, half, 4>::go(__VA_ARGS__)
#define bfloat2(...) metal::make<metal::bfloat2, bfloat, 2>::go(__VA_ARGS__)
#define bfloat4(...) metal::make<metal::bfloat4, bfloat, 4>::go(__VA_ARGS__)
#define int2(...) metal::make<metal::int2, int, 2>::go(__VA_ARGS__)
#define int3(...) metal::make<metal::int3, int, 3>::go(__VA_ARGS__)
#define int4(...) metal::make<metal::int4, int, 4>::go(__VA_ARGS__)
#define uint2(...) metal::make<metal::uint2, uint, 2>::go(__VA_ARGS__)
#define uint3(...) metal::make<metal::uint3, uint, 3>::go(__VA_ARGS__)
#define uint4(...) metal::make<metal::uint4, uint, 4>::go(__VA_ARGS__)
#define uchar4(...) metal::make<metal::uchar4, uchar, 4>::go(__VA_ARGS__)
#define ushort2(...) metal::make<metal::ushort2, ushort, 2>::go(__VA_ARGS__)
#define ushort4(...) metal::make<metal::ushort4, ushort, 4>::go(__VA_ARGS__)
