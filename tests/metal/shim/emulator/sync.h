// Barriers. Which memory one orders is up to its flags: the checker takes them at their word.
#pragma once
namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((uint)a | (uint)b);
}

METAL_INLINE void threadgroup_barrier(mem_flags flags, int site = METAL_HERE) {
  metal_threadgroup_barrier((uint)flags, site);
}
METAL_INLINE void simdgroup_barrier(mem_flags flags, int site = METAL_HERE) {
  metal_simdgroup_barrier((uint)flags, site);
}

}  // namespace metal
