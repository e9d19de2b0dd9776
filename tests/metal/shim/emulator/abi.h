// What a compiled kernel and the runtime have in common. Only builtin types: both sides include it.
#pragma once

// Where a thread is: the values of the attributes [[thread_position_in_grid]] and so on.
struct MetalThread {
  unsigned position_in_grid[3];
  unsigned position_in_threadgroup[3];
  unsigned threadgroup_position[3];
  unsigned threads_per_threadgroup[3];           // of this group: smaller at the edge of the grid
  unsigned dispatch_threads_per_threadgroup[3];  // as dispatched
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned grid_origin[3];                       // zero
  unsigned index;  // in the threadgroup
  unsigned lane;
  unsigned simdgroup;
  unsigned simdgroups;
  unsigned dispatch_simdgroups;
};

// One simdgroup operation: the values of the lanes that take part, and room for their results.
struct MetalLanes {
  unsigned active;     // one bit per lane
  unsigned order;      // of reductions: MetalOrder
  char (*in)[16];
  char (*out)[16];
  unsigned* argument;  // the second operand of shuffles
  unsigned reader;     // set by the operation: 1 + a lane that read a lane which takes no part
};

enum MetalOrder { METAL_TREE, METAL_FORWARD, METAL_BACKWARD };

typedef void (*MetalOperation)(MetalLanes*);

// A variable of threadgroup memory; the compiled kernel exports the table of its own.
struct MetalVariable {
  char* base;
  unsigned long long size;
};

// The compiler neither moves such a call into a branch, nor makes one of two of them: their places differ.
#define METAL_CALL __attribute__((convergent, nomerge))
#define METAL_HERE __builtin_LINE() * 1024 + __builtin_COLUMN()

// `site` tells the places of calls apart; the emulator puts its own numbers there after compilation (instrument.py).
extern "C" {
void metal_simd(void* value, unsigned size, unsigned argument, MetalOperation operation, int site) METAL_CALL;
void metal_threadgroup_barrier(unsigned flags, int site) METAL_CALL;
void metal_simdgroup_barrier(unsigned flags, int site) METAL_CALL;
void metal_atomic(const volatile void* address, unsigned size, unsigned reads, unsigned writes, int site);
unsigned metal_lane();
float metal_noise(float value);
}
