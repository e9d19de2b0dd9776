// Address spaces. METAL_STRICT: real ones of clang, to check types only. Otherwise they vanish, and the code runs.
#pragma once
#define __METAL__ 1
#define __METAL_VERSION__ METAL_VERSION

#ifdef METAL_STRICT
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
// As `extern` it may have no initialiser and needs no constructor, as in Metal.
#define METAL_THREADGROUP_VARIABLE extern __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#ifdef __APPLE__
#define METAL_SECTION "__DATA,tgmem"
#else
#define METAL_SECTION "tgmem"
#endif
#define METAL_THREADGROUP_VARIABLE static __attribute__((section(METAL_SECTION), used))
#endif

#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant

// Functions of the shim are no part of the kernel: their own accesses are not checked.
#define METAL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
#define METAL_INLINE METAL_UNCHECKED inline __attribute__((always_inline))
