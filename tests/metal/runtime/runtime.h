// The parts of the runtime, as they see each other. Nothing here is seen by kernels.
#pragma once

#include <stdint.h>

#include "../shim/emulator/abi.h"

typedef uint32_t u32;
typedef uint64_t u64;

const u32 LANES = 32;
const u32 MOST_THREADS = 1024;
const u64 STACK = 128 << 10;  // bytes for each thread
const u64 GUARD = 64 << 10;   // unused bytes around each buffer: an access there is reported and does no harm
const u64 REDZONE = 256;      // the same after each threadgroup variable
const u32 NO_BUFFER = 0xffffffffu;

// The order is that of `findings.Kind` in Python.
enum Kind {
  RACE_THREADGROUP,
  RACE_DEVICE,
  OUT_OF_BOUNDS,
  UNINITIALISED_THREADGROUP,
  UNINITIALISED_OUTPUT,
  UNWRITTEN_OUTPUT,
  WRITE_TO_INPUT,
  DIVERGENT_BARRIER,
  DIVERGENT_SIMD,
  INACTIVE_LANE,
  EXIT_BEFORE_BARRIER,
  MISALIGNED,
  UNDEFINED,
  CRASH,
  ENDLESS,
  STACK_OVERFLOW,
};

enum Schedule { FIFO, LIFO, PRIORITY, RANDOM };
enum Access { READ, WRITE };
enum Role { INPUT, OUTPUT, INITIALISED_OUTPUT };

// One access, as the shadow of a cell remembers it.
struct Record {
  u32 thread;      // 1 + its number in the grid; 0: no access yet
  u32 epoch;       // barriers of the threadgroup that ordered this memory before it
  u32 simd_epoch;  // the same of its simdgroup
  int site;        // negative for an atomic access
};

// Two of each are enough: whoever comes later differs from one of them at least.
struct Cell {
  Record write, other_write, read, other_read;
};

struct Buffer {
  char* base;
  u64 size;
  u32 role;
  u32 granule;      // bytes for each cell of the shadow
  Cell* shadow;     // null for inputs
  u64 bytes_read;
  u64 bytes_written;
};

struct Report {
  u32 kind;
  u32 space;   // buffer or threadgroup variable, NO_BUFFER if neither
  int64_t offset;
  u32 detail;  // by kind: an address space, an UBSan check, a count
  u32 threadgroup;
  u32 thread, other_thread;
  int site, other_site;
  u32 access, other_access;
  u32 count;
};

struct Dispatch {
  u32 grid[3];
  u32 threadgroup[3];
  u32 schedule, order, check, buffers;
  u64 seed;
  float noise;
  u32 seconds;  // of CPU time until the kernel counts as endless
  u32 most_reports;
  Buffer* buffer;
  Report* report;
  void** arguments;
  char* stacks;
  MetalVariable* variable;
  MetalVariable* constant;  // the kernel's tables
  u32 variables, constants;
  u32 reports;
  Cell* threadgroup_shadow;  // one cell for each byte of the threadgroup variables
  void (*entry)(void**, const MetalThread*);
  u64 switches, simd_operations, barriers, accesses, atomics;
  u32 subword;  // an access was smaller than the granule of its buffer
  u32 failed;   // it stopped before its end
};

enum State { READY, IN_SIMD, IN_SIMD_BARRIER, IN_BARRIER, DONE };

struct Fiber {
  void* stack;
  State state;
  int site;
  u32 flags, argument, size;
  MetalOperation operation;
  char value[16];
  MetalThread thread;
  char *low, *high;  // its stack
};

struct Simdgroup {
  u32 alive, waiting, first, size;
  u32 threadgroup_epoch, device_epoch;
};

extern Dispatch* job;
extern Fiber* current;       // null while the scheduler runs
extern Fiber fibers[MOST_THREADS];
extern Simdgroup simdgroups[MOST_THREADS / LANES];
extern u32 group_size, group_number;
extern u32 threadgroup_epoch, device_epoch;

// checker.cpp
void report(Kind kind, u32 space, int64_t offset, u32 detail, int site, int other_site, u32 thread, u32 other_thread,
            u32 access, u32 other_access);
void report_unwritten();

// trap.cpp
void arm(u32 seconds);
void disarm();

// fibers.cpp
u64 random64();
[[noreturn]] void stop();  // ends the dispatch from inside a thread
