// <metal_atomic>: relaxed order only, as for device and threadgroup memory in Metal.
#pragma once
namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

// Out of line, so that the checker sees the call of metal_atomic and no plain access.
#define METAL_RAW_ACCESS(SPACE)                                                                       \
  template <class T>                                                                                  \
  METAL_UNCHECKED __attribute__((noinline)) T raw_load(const volatile SPACE atomic<T>* object) {      \
    return object->value;                                                                             \
  }                                                                                                   \
  template <class T>                                                                                  \
  METAL_UNCHECKED __attribute__((noinline)) void raw_store(volatile SPACE atomic<T>* object, T value) { \
    object->value = value;                                                                            \
  }

// `after` is the new value, from `old` and `operand`.
#define METAL_FETCH(SPACE, name, after)                                                               \
  template <class T, class U>                                                                         \
  METAL_INLINE T atomic_##name##_explicit(volatile SPACE atomic<T>* object, U given, memory_order) {  \
    metal_atomic((const volatile void*)object, sizeof(T), 1, 1, 0);                                   \
    T operand = (T)given;                                                                             \
    T old = raw_load(object);                                                                         \
    raw_store(object, (T)(after));                                                                    \
    return old;                                                                                       \
  }

#define METAL_ATOMICS(SPACE)                                                                          \
  template <class T>                                                                                  \
  METAL_INLINE T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order) {         \
    metal_atomic((const volatile void*)object, sizeof(T), 1, 0, 0);                                   \
    return raw_load(object);                                                                          \
  }                                                                                                   \
  template <class T, class U>                                                                         \
  METAL_INLINE void atomic_store_explicit(volatile SPACE atomic<T>* object, U value, memory_order) {  \
    metal_atomic((const volatile void*)object, sizeof(T), 0, 1, 0);                                   \
    raw_store(object, (T)value);                                                                      \
  }                                                                                                   \
  template <class T, class U>                                                                         \
  METAL_INLINE bool atomic_compare_exchange_weak_explicit(                                            \
      volatile SPACE atomic<T>* object, T* expected, U desired, memory_order, memory_order) {         \
    metal_atomic((const volatile void*)object, sizeof(T), 1, 1, 0);                                   \
    T old = raw_load(object);                                                                         \
    bool same = __builtin_memcmp(&old, expected, sizeof(T)) == 0;                                     \
    if (same) raw_store(object, (T)desired);                                                          \
    else *expected = old;                                                                             \
    return same;                                                                                      \
  }                                                                                                   \
  METAL_FETCH(SPACE, exchange, operand)                                                               \
  METAL_FETCH(SPACE, fetch_add, old + operand)                                                        \
  METAL_FETCH(SPACE, fetch_sub, old - operand)                                                        \
  METAL_FETCH(SPACE, fetch_min, operand < old ? operand : old)                                        \
  METAL_FETCH(SPACE, fetch_max, old < operand ? operand : old)                                        \
  METAL_FETCH(SPACE, fetch_and, old & operand)                                                        \
  METAL_FETCH(SPACE, fetch_or, old | operand)                                                         \
  METAL_FETCH(SPACE, fetch_xor, old ^ operand)

METAL_RAW_ACCESS(device)
METAL_ATOMICS(device)
#ifdef METAL_STRICT
METAL_RAW_ACCESS(threadgroup)
METAL_ATOMICS(threadgroup)
#endif
#undef METAL_ATOMICS
#undef METAL_FETCH
#undef METAL_RAW_ACCESS

}  // namespace metal
