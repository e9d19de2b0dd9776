// The whole runtime as one translation unit: it is compiled once and kept.
#include "checker.cpp"
#include "fibers.cpp"
#include "half.cpp"
#include "trap.cpp"
