// <metal_limits>
#pragma once
namespace metal {

template <class T>
struct numeric_limits;

#define METAL_INTEGER_LIMITS(T, least, greatest) \
  template <>                                    \
  struct numeric_limits<T> {                     \
    static constexpr T min() {                   \
      return least;                              \
    }                                            \
    static constexpr T lowest() {                \
      return least;                              \
    }                                            \
    static constexpr T max() {                   \
      return greatest;                           \
    }                                            \
  };
METAL_INTEGER_LIMITS(bool, false, true)
METAL_INTEGER_LIMITS(char, -128, 127)
METAL_INTEGER_LIMITS(int8_t, -128, 127)
METAL_INTEGER_LIMITS(uchar, 0, 255)
METAL_INTEGER_LIMITS(short, -32768, 32767)
METAL_INTEGER_LIMITS(ushort, 0, 65535)
METAL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
METAL_INTEGER_LIMITS(uint, 0, 4294967295u)
METAL_INTEGER_LIMITS(long, -0x7fffffffffffffffL - 1, 0x7fffffffffffffffL)
METAL_INTEGER_LIMITS(ulong, 0, ~0ul)
#undef METAL_INTEGER_LIMITS

#define METAL_FLOAT_LIMITS(T, greatest, least, step) \
  template <>                                        \
  struct numeric_limits<T> {                         \
    static constexpr T max() {                       \
      return (T)greatest;                            \
    }                                                \
    static constexpr T lowest() {                    \
      return (T)-greatest;                           \
    }                                                \
    static constexpr T min() {                       \
      return (T)least;                               \
    }                                                \
    static constexpr T epsilon() {                   \
      return (T)step;                                \
    }                                                \
    static constexpr T infinity() {                  \
      return (T)__builtin_inff();                    \
    }                                                \
    static constexpr T quiet_NaN() {                 \
      return (T)__builtin_nanf("");                  \
    }                                                \
  };
METAL_FLOAT_LIMITS(float, 3.402823466e+38f, 1.175494351e-38f, 1.192092896e-07f)
METAL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f)
METAL_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.175494351e-38f, 7.8125e-3f)
#undef METAL_FLOAT_LIMITS

}  // namespace metal
