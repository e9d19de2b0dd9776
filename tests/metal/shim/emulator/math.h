// <metal_math>: one overload for each type and no templates, so that mixed types are ambiguous, as in Metal.
// Accuracy is the C library's in float; Metal's own is lower for most functions (its specification has a table).
#pragma once
namespace metal {

#define METAL_UNARY_OF(V, N, name)                      \
  METAL_INLINE V name(V v) {                            \
    V result;                                           \
    for (int i = 0; i < N; i++) result[i] = name(v[i]); \
    return result;                                      \
  }

#define METAL_UNARY(name, expression)  \
  METAL_INLINE float name(float x) {   \
    return expression;                 \
  }                                    \
  METAL_INLINE half name(half h) {     \
    float x = h;                       \
    return (half)(expression);         \
  }                                    \
  METAL_INLINE bfloat name(bfloat b) { \
    float x = b;                       \
    return (bfloat)(expression);       \
  }                                    \
  METAL_UNARY_OF(float2, 2, name)      \
  METAL_UNARY_OF(float3, 3, name)      \
  METAL_UNARY_OF(float4, 4, name)      \
  METAL_UNARY_OF(half2, 2, name)       \
  METAL_UNARY_OF(half4, 4, name)
METAL_UNARY(exp, __builtin_expf(x))
METAL_UNARY(exp2, __builtin_exp2f(x))
METAL_UNARY(exp10, __builtin_powf(10.0f, x))
METAL_UNARY(log, __builtin_logf(x))
METAL_UNARY(log2, __builtin_log2f(x))
METAL_UNARY(log10, __builtin_log10f(x))
METAL_UNARY(sin, __builtin_sinf(x))
METAL_UNARY(cos, __builtin_cosf(x))
METAL_UNARY(tan, __builtin_tanf(x))
METAL_UNARY(sinh, __builtin_sinhf(x))
METAL_UNARY(cosh, __builtin_coshf(x))
METAL_UNARY(tanh, __builtin_tanhf(x))
METAL_UNARY(asin, __builtin_asinf(x))
METAL_UNARY(acos, __builtin_acosf(x))
METAL_UNARY(atan, __builtin_atanf(x))
METAL_UNARY(sqrt, __builtin_sqrtf(x))
METAL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
METAL_UNARY(fabs, __builtin_fabsf(x))
METAL_UNARY(abs, __builtin_fabsf(x))
METAL_UNARY(floor, __builtin_floorf(x))
METAL_UNARY(ceil, __builtin_ceilf(x))
METAL_UNARY(round, __builtin_roundf(x))
METAL_UNARY(rint, __builtin_rintf(x))
METAL_UNARY(trunc, __builtin_truncf(x))
METAL_UNARY(fract, x - __builtin_floorf(x))
METAL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
METAL_UNARY(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
#undef METAL_UNARY

#define METAL_BINARY_OF(V, N, name)                           \
  METAL_INLINE V name(V a, V b) {                             \
    V result;                                                 \
    for (int i = 0; i < N; i++) result[i] = name(a[i], b[i]); \
    return result;                                            \
  }

#define METAL_BINARY(name, expression)               \
  METAL_INLINE float name(float x, float y) {        \
    return expression;                               \
  }                                                  \
  METAL_INLINE half name(half a, half b) {           \
    float x = a, y = b;                              \
    return (half)(expression);                       \
  }                                                  \
  METAL_INLINE bfloat name(bfloat a, bfloat b) {     \
    float x = a, y = b;                              \
    return (bfloat)(expression);                     \
  }                                                  \
  METAL_BINARY_OF(float2, 2, name)                   \
  METAL_BINARY_OF(float3, 3, name)                   \
  METAL_BINARY_OF(float4, 4, name)                   \
  METAL_BINARY_OF(half2, 2, name)                    \
  METAL_BINARY_OF(half4, 4, name)
METAL_BINARY(pow, __builtin_powf(x, y))
METAL_BINARY(powr, __builtin_powf(x, y))
METAL_BINARY(fmod, __builtin_fmodf(x, y))
METAL_BINARY(atan2, __builtin_atan2f(x, y))
METAL_BINARY(fmin, __builtin_fminf(x, y))
METAL_BINARY(fmax, __builtin_fmaxf(x, y))
METAL_BINARY(min, __builtin_fminf(x, y))
METAL_BINARY(max, __builtin_fmaxf(x, y))
METAL_BINARY(copysign, __builtin_copysignf(x, y))
METAL_BINARY(step, y < x ? 0.0f : 1.0f)
#undef METAL_BINARY

#define METAL_TERNARY(name, expression)                  \
  METAL_INLINE float name(float x, float y, float z) {   \
    return expression;                                   \
  }                                                      \
  METAL_INLINE half name(half a, half b, half c) {       \
    float x = a, y = b, z = c;                           \
    return (half)(expression);                           \
  }                                                      \
  METAL_INLINE bfloat name(bfloat a, bfloat b, bfloat c) { \
    float x = a, y = b, z = c;                           \
    return (bfloat)(expression);                         \
  }
METAL_TERNARY(clamp, __builtin_fminf(__builtin_fmaxf(x, y), z))
METAL_TERNARY(fma, __builtin_fmaf(x, y, z))
METAL_TERNARY(mix, x + (y - x) * z)
#undef METAL_TERNARY

#define METAL_TERNARY_OF(V, N, name)                                \
  METAL_INLINE V name(V a, V b, V c) {                              \
    V result;                                                       \
    for (int i = 0; i < N; i++) result[i] = name(a[i], b[i], c[i]); \
    return result;                                                  \
  }
#define METAL_TERNARIES_OF(name)    \
  METAL_TERNARY_OF(float2, 2, name) \
  METAL_TERNARY_OF(float3, 3, name) \
  METAL_TERNARY_OF(float4, 4, name)
METAL_TERNARIES_OF(clamp)
METAL_TERNARIES_OF(fma)
METAL_TERNARIES_OF(mix)
METAL_INLINE float ldexp(float x, int exponent) {
  return __builtin_ldexpf(x, exponent);
}

#define METAL_PREDICATE(name, expression) \
  METAL_INLINE bool name(float x) {       \
    return expression;                    \
  }                                       \
  METAL_INLINE bool name(half x) {        \
    return name((float)x);                \
  }                                       \
  METAL_INLINE bool name(bfloat x) {      \
    return name((float)x);                \
  }
METAL_PREDICATE(isnan, __builtin_isnan(x))
METAL_PREDICATE(isinf, __builtin_isinf(x))
METAL_PREDICATE(isfinite, __builtin_isfinite(x))
METAL_PREDICATE(signbit, __builtin_signbit(x) != 0)
#undef METAL_PREDICATE

template <class T>
METAL_INLINE T select(T otherwise, T chosen, bool condition) {
  return condition ? chosen : otherwise;
}

namespace precise {
using metal::abs;
using metal::atan2;
using metal::cos;
using metal::exp;
using metal::exp10;
using metal::exp2;
using metal::fma;
using metal::fmax;
using metal::fmin;
using metal::log;
using metal::log10;
using metal::log2;
using metal::max;
using metal::min;
using metal::pow;
using metal::powr;
using metal::rint;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tan;
using metal::tanh;
METAL_INLINE float divide(float x, float y) {
  return x / y;
}
}  // namespace precise

// Results of fast:: can be given a random error, to see whether a kernel stands it.
namespace fast {
using metal::abs;
using metal::clamp;
using metal::fma;
using metal::fmax;
using metal::fmin;
using metal::max;
using metal::min;
#define METAL_FAST(name)                         \
  METAL_INLINE float name(float x) {             \
    return metal_noise(metal::name(x));          \
  }                                              \
  METAL_INLINE half name(half x) {               \
    return (half)metal_noise(metal::name((float)x)); \
  }
METAL_FAST(exp)
METAL_FAST(exp2)
METAL_FAST(exp10)
METAL_FAST(log)
METAL_FAST(log2)
METAL_FAST(log10)
METAL_FAST(sin)
METAL_FAST(cos)
METAL_FAST(tan)
METAL_FAST(tanh)
METAL_FAST(sqrt)
METAL_FAST(rsqrt)
#undef METAL_FAST
METAL_INLINE float pow(float x, float y) {
  return metal_noise(metal::pow(x, y));
}
METAL_INLINE float divide(float x, float y) {
  return metal_noise(x / y);
}
}  // namespace fast

}  // namespace metal
