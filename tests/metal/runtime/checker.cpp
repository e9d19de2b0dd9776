// The checker: every access of a kernel comes through here (the compiler's thread sanitizer put the calls in).
#include <string.h>

#include "runtime.h"

static u32 threads_per_group() {
  return job->threadgroup[0] * job->threadgroup[1] * job->threadgroup[2];
}

void report(Kind kind, u32 space, int64_t offset, u32 detail, int site, int other_site, u32 thread, u32 other_thread,
            u32 access, u32 other_access) {
  for (u32 k = 0; k < job->reports; k++) {
    Report& known = job->report[k];
    if (known.kind != (u32)kind || known.space != space || known.site != site || known.other_site != other_site) continue;
    known.count++;
    return;
  }
  if (job->reports == job->most_reports) return;
  job->report[job->reports++] = {(u32)kind, space, offset, detail, group_number, thread, other_thread,
                                 site, other_site, access, other_access, 1};
}

static u32 index_in_group(const Record& record) {
  return (record.thread - 1) % threads_per_group();
}

static u32 group_of(const Record& record) {
  return (record.thread - 1) / threads_per_group();
}

static int place(const Record& record) {
  return record.site < 0 ? -record.site : record.site;
}

// No barrier that orders this memory lies between the two accesses, which are by two threads.
static bool unordered(const Record& earlier, const Record& now) {
  if (!earlier.thread || earlier.thread == now.thread) return false;
  if (group_of(earlier) != group_of(now)) return true;
  if (earlier.epoch != now.epoch) return false;
  u32 simdgroup = index_in_group(earlier) / LANES;
  return simdgroup != index_in_group(now) / LANES || earlier.simd_epoch == now.simd_epoch;
}

struct Where {
  Kind race;
  u32 space;
  u64 offset;
};

static bool conflict(const Record& earlier, Access earlier_access, const Record& now, Access access, const Where& where) {
  if (!unordered(earlier, now) || (earlier.site < 0 && now.site < 0)) return false;
  report(where.race, where.space, (int64_t)where.offset, group_of(earlier) != group_of(now), place(earlier), place(now),
         index_in_group(earlier), index_in_group(now), earlier_access, access);
  return true;
}

static void touch_read(Cell& cell, const Record& now) {
  bool atomic = now.site < 0;
  if (!unordered(cell.read, now)) cell.read = now;
  else if (!atomic || cell.other_read.site < 0 || !unordered(cell.other_read, now)) cell.other_read = now;
}

static void touch_write(Cell& cell, const Record& now, const Where& where) {
  conflict(cell.read, READ, now, WRITE, where) || conflict(cell.other_read, READ, now, WRITE, where);
  if (unordered(cell.write, now)) cell.other_write = cell.write;
  cell.write = now;
  cell.read.thread = cell.other_read.thread = 0;
}

static void touch(Cell& cell, const Record& now, Access access, const Where& where) {
  conflict(cell.write, WRITE, now, access, where) || conflict(cell.other_write, WRITE, now, access, where);
  if (access == READ) touch_read(cell, now);
  else touch_write(cell, now, where);
}

// Threadgroup memory starts afresh in each threadgroup; so does its shadow, when it is first touched.
static void forget_other_groups(Cell& cell) {
  Record* const records[] = {&cell.write, &cell.other_write, &cell.read, &cell.other_read};
  for (Record* record : records)
    if (record->thread && group_of(*record) != group_number) record->thread = 0;
}

static void access_variable(u32 v, u64 shadow, char* address, u32 size, Access access, bool reads, Record now) {
  MetalVariable& variable = job->variable[v];
  u64 offset = (u64)(address - variable.base);
  u32 thread = current->thread.index;
  if (offset + size > variable.size) {
    report(OUT_OF_BOUNDS, v, (int64_t)offset, 1, place(now), 0, thread, 0, access, READ);
    return;
  }
  now.epoch = threadgroup_epoch;
  now.simd_epoch = simdgroups[current->thread.simdgroup].threadgroup_epoch;
  bool unwritten = false;
  for (u32 k = 0; k < size; k++) {
    Cell& cell = job->threadgroup_shadow[shadow + offset + k];
    forget_other_groups(cell);
    unwritten |= reads && !cell.write.thread;
    touch(cell, now, access, {RACE_THREADGROUP, v, offset + k});
  }
  if (unwritten) report(UNINITIALISED_THREADGROUP, v, (int64_t)offset, 0, place(now), 0, thread, 0, READ, READ);
}

static void access_buffer(u32 b, char* address, u32 size, Access access, bool reads, Record now) {
  Buffer& buffer = job->buffer[b];
  int64_t offset = address - buffer.base;
  u32 thread = current->thread.index;
  if (offset < 0 || (u64)offset + size > buffer.size) {
    report(OUT_OF_BOUNDS, b, offset, 0, place(now), 0, thread, 0, access, READ);
    return;
  }
  (access == READ ? buffer.bytes_read : buffer.bytes_written) += size;
  if (access == WRITE && buffer.role == INPUT) report(WRITE_TO_INPUT, b, offset, 0, place(now), 0, thread, 0, WRITE, READ);
  if (!buffer.shadow) return;
  if (size < buffer.granule || offset % buffer.granule) job->subword = 1;
  now.epoch = device_epoch;
  now.simd_epoch = simdgroups[current->thread.simdgroup].device_epoch;
  bool unwritten = false;
  for (u64 cell = offset / buffer.granule; cell * buffer.granule < offset + size; cell++) {
    unwritten |= reads && !buffer.shadow[cell].write.thread;
    touch(buffer.shadow[cell], now, access, {RACE_DEVICE, b, cell * buffer.granule});
  }
  if (unwritten && buffer.role == OUTPUT) report(UNINITIALISED_OUTPUT, b, offset, 0, place(now), 0, thread, 0, READ, READ);
}

static bool in_constant(const char* address, u32 size) {
  for (u32 c = 0; c < job->constants; c++) {
    MetalVariable& constant = job->constant[c];
    if (address >= constant.base && address + size <= constant.base + constant.size) return true;
  }
  return false;
}

// `site` is negative for an atomic access. `reads`: the value that is there matters.
static void check(const volatile void* where, u32 size, Access access, int site, bool reads) {
  if (!job || !job->check || !current) return;
  char* address = (char*)where;
  if (address >= current->low && address < current->high) return;
  Record now = {group_number * threads_per_group() + current->thread.index + 1, 0, 0, site};
  current->site = place(now);
  job->accesses++;
  u64 shadow = 0;
  for (u32 v = 0; v < job->variables; v++) {
    MetalVariable& variable = job->variable[v];
    if (address >= variable.base && address < variable.base + variable.size + REDZONE) {
      access_variable(v, shadow, address, size, access, reads, now);
      return;
    }
    shadow += variable.size;
  }
  for (u32 b = 0; b < job->buffers; b++) {
    Buffer& buffer = job->buffer[b];
    if (address + size > buffer.base - GUARD && address < buffer.base + buffer.size + GUARD) {
      access_buffer(b, address, size, access, reads, now);
      return;
    }
  }
  if (access == READ && in_constant(address, size)) return;
  // Far from everything: going on could do harm to the process.
  report(OUT_OF_BOUNDS, NO_BUFFER, 0, 0, place(now), 0, current->thread.index, 0, access, READ);
  stop();
}

// The access itself would be a fault of the processor, or not: the kernel ends here.
static void check_alignment(const void* address, u32 alignment, Access access, int site) {
  if ((u64)address % alignment == 0 || !job || !job->check || !current) return;
  report(MISALIGNED, NO_BUFFER, 0, alignment, site, 0, current->thread.index, 0, access, READ);
  stop();
}

void report_unwritten() {
  for (u32 b = 0; b < job->buffers; b++) {
    Buffer& buffer = job->buffer[b];
    if (buffer.role != OUTPUT || !buffer.shadow) continue;
    u64 cells = buffer.size / buffer.granule, missing = 0, first = 0;
    for (u64 k = 0; k < cells; k++) {
      if (buffer.shadow[k].write.thread) continue;
      if (!missing++) first = k;
    }
    if (missing) report(UNWRITTEN_OUTPUT, b, (int64_t)(first * buffer.granule), (u32)missing, 0, 0, 0, 0, WRITE, READ);
  }
}

extern "C" {
void metal_read(const void* address, u32 size, u32 alignment, int site) {
  check_alignment(address, alignment, READ, site);
  check(address, size, READ, site, true);
}

void metal_write(const void* address, u32 size, u32 alignment, int site) {
  check_alignment(address, alignment, WRITE, site);
  check(address, size, WRITE, site, false);
}

void metal_read_write(const void* address, u32 size, u32 alignment, int site) {
  metal_read(address, size, alignment, site);
  metal_write(address, size, alignment, site);
}

// A read-modify-write is one access: it has no moment between its read and its write.
void metal_atomic(const volatile void* address, u32 size, u32 reads, u32 writes, int site) {
  if (job) job->atomics++;
  check(address, size, writes ? WRITE : READ, -site, reads);
}

void* metal_memcpy(void* to, const void* from, u64 size, int site) {
  check(from, (u32)size, READ, site, true);
  check(to, (u32)size, WRITE, site, false);
  return memcpy(to, from, size);
}

void* metal_memmove(void* to, const void* from, u64 size, int site) {
  check(from, (u32)size, READ, site, true);
  check(to, (u32)size, WRITE, site, false);
  return memmove(to, from, size);
}

void* metal_memset(void* to, int value, u64 size, int site) {
  check(to, (u32)size, WRITE, site, false);
  return memset(to, value, size);
}

// The undefined-behaviour sanitizer calls these with the place in its data.
void metal_undefined(u32 what, int site) {
  if (!job || !job->check || !current) return;
  report(UNDEFINED, NO_BUFFER, 0, what, site, 0, current->thread.index, 0, READ, READ);
}

// What comes after it may be compiled away: the kernel ends here.
void metal_bad_index(int site) {
  if (!job || !job->check || !current) return;
  report(OUT_OF_BOUNDS, NO_BUFFER, 0, 2, site, 0, current->thread.index, 0, READ, READ);
  stop();
}
}
