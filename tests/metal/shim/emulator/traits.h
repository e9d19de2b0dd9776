// <metal_type_traits>
#pragma once
namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  constexpr operator T() const {
    return V;
  }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;

template <class A, class B>
struct is_same : integral_constant<bool, __is_same(A, B)> {};
template <class A, class B>
inline constexpr bool is_same_v = __is_same(A, B);

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
using remove_cv_t = __remove_cv(T);

template <class T>
inline constexpr bool is_floating_point_v = __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <class T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <class T>
inline constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : integral_constant<bool, __is_integral(T)> {};
template <class T>
inline constexpr bool is_unsigned_v = __is_unsigned(T);
template <class A, class B>
inline constexpr bool is_convertible_v = __is_convertible_to(A, B);

}  // namespace metal
