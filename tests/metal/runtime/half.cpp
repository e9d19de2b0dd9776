// Conversions that the compiler leaves to its support library, which need not be there: round to nearest, ties to even.
#include <string.h>

#include "runtime.h"

// Results are returned as a _Float16 is: in the first vector register.
extern "C" _Float16 __truncsfbf2(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t rounded = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  _Float16 result;
  memcpy(&result, &rounded, 2);
  return result;
}

extern "C" _Float16 __truncdfbf2(double value) {
  return __truncsfbf2((float)value);
}
