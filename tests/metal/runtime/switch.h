// Switching stacks, and the floating-point mode of an Apple GPU.
#pragma once

#include "runtime.h"

// Saves what a callee must keep on the present stack, writes its address to *save, and continues on `load`.
extern "C" void metal_switch(void** save, void* load);

#if defined(__x86_64__)

__attribute__((naked)) void metal_switch(void**, void*) {
  asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
      "ret");
}

// A stack from which metal_switch enters `start`.
inline void* fresh_stack(char* high, void (*start)()) {
  void** top = (void**)high;
  *--top = nullptr;  // keeps the alignment of a call
  *--top = (void*)start;
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  return top;
}

// Float denormals are flushed to zero, in operands and results.
inline u64 flush_denormals() {
  u32 before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  return before;
}

inline void restore_float_mode(u64 before) {
  __builtin_ia32_ldmxcsr((u32)before);
}

#elif defined(__aarch64__)

__attribute__((naked)) void metal_switch(void**, void*) {
  asm("sub sp, sp, #160\n"
      "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n"
      "ret");
}

inline void* fresh_stack(char* high, void (*start)()) {
  void** top = (void**)(high - 160);
  for (int saved = 0; saved < 20; saved++) top[saved] = nullptr;
  top[11] = (void*)start;  // x30, the link register
  return top;
}

inline u64 flush_denormals() {
  u64 before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" : : "r"(before | 1ull << 24));
  return before;
}

inline void restore_float_mode(u64 before) {
  asm volatile("msr fpcr, %0" : : "r"(before));
}

#else
#error "the emulator's runtime knows x86-64 and arm64"
#endif
