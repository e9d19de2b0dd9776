// Threads as fibers: they run until they wait in a barrier or a simdgroup operation.
#include <string.h>

#include "switch.h"

Dispatch* job;
Fiber* current;
Fiber fibers[MOST_THREADS];
Simdgroup simdgroups[MOST_THREADS / LANES];
u32 group_size, group_number;
u32 threadgroup_epoch, device_epoch;

static u32 alive, waiting;             // threads of the threadgroup: not done, and in a barrier
static u32 priority[MOST_THREADS / LANES];
static u32 ready[MOST_THREADS * 2];    // first in at `head`
static u32 head, tail;
static void* scheduler_stack;
static u64 random_state;
static const u64 CANARY = 0x6d6574616c737461ull;

const u32 MEM_DEVICE = 1, MEM_THREADGROUP = 2;

u64 random64() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

static void make_ready(u32 index) {
  if (tail == MOST_THREADS * 2) {
    memmove(ready, ready + head, (tail - head) * sizeof(u32));
    tail -= head;
    head = 0;
  }
  ready[tail++] = index;
}

static u32 choose() {
  u32 last = tail - 1;
  u32 best = last;
  if (job->schedule == FIFO) return ready[head++];
  if (job->schedule == RANDOM) best = head + random64() % (tail - head);
  if (job->schedule == PRIORITY) {
    best = head;
    for (u32 k = head; k < tail; k++)
      if (priority[ready[k] / LANES] > priority[ready[best] / LANES]) best = k;
  }
  u32 chosen = ready[best];
  ready[best] = ready[last];
  tail--;
  return chosen;
}

// Runs another thread, or the scheduler when none can run.
static void give_way() {
  Fiber* mine = current;
  Fiber* next = head == tail ? nullptr : &fibers[choose()];
  if (next == mine) return;
  job->switches++;
  current = next;
  metal_switch(&mine->stack, next ? next->stack : scheduler_stack);
}

[[noreturn]] void stop() {
  Fiber* mine = current;
  job->failed = 1;
  current = nullptr;
  metal_switch(&mine->stack, scheduler_stack);
  __builtin_unreachable();
}

static void wake(Fiber& fiber) {
  fiber.state = READY;
  if (&fiber != current) make_ready(fiber.thread.index);
}

static void order_memory(Simdgroup& group, u32 flags) {
  if (flags & MEM_THREADGROUP) group.threadgroup_epoch++;
  if (flags & MEM_DEVICE) group.device_epoch++;
}

static void combine(Simdgroup& group, u32 active) {
  Fiber* lane = fibers + group.first;
  char in[LANES][16], out[LANES][16];
  u32 argument[LANES];
  for (u32 l = 0; l < group.size; l++) {
    if (!(active >> l & 1)) continue;
    memcpy(in[l], lane[l].value, 16);
    argument[l] = lane[l].argument;
  }
  Fiber& leader = lane[__builtin_ctz(active)];
  MetalLanes lanes = {active, job->order, in, out, argument, 0};
  job->simd_operations++;
  leader.operation(&lanes);
  if (lanes.reader) {
    Fiber& reader = lane[lanes.reader - 1];
    report(INACTIVE_LANE, NO_BUFFER, 0, 0, reader.site, 0, reader.thread.index, 0, READ, READ);
  }
  for (u32 l = 0; l < group.size; l++)
    if (active >> l & 1) memcpy(lane[l].value, out[l], 16);
}

// Every thread of the simdgroup that still runs waits in it: those at the same place go on together.
static void run_simdgroup(Simdgroup& group) {
  Fiber* lane = fibers + group.first;
  u32 todo = 0;
  group.waiting = 0;
  for (u32 l = 0; l < group.size; l++)
    if (lane[l].state == IN_SIMD || lane[l].state == IN_SIMD_BARRIER) todo |= 1u << l;
  while (todo) {
    Fiber& leader = lane[__builtin_ctz(todo)];
    u32 active = 0;
    u32 flags = MEM_DEVICE | MEM_THREADGROUP;
    for (u32 l = 0; l < group.size; l++) {
      if (!(todo >> l & 1) || lane[l].site != leader.site || lane[l].operation != leader.operation) continue;
      active |= 1u << l;
      flags &= lane[l].flags;
    }
    if (u32 rest = todo & ~active) {
      Fiber& other = lane[__builtin_ctz(rest)];
      report(DIVERGENT_SIMD, NO_BUFFER, 0, 0, leader.site, other.site, leader.thread.index, other.thread.index, READ, READ);
    }
    if (leader.state == IN_SIMD_BARRIER) {
      order_memory(group, flags);
    } else {
      combine(group, active);
    }
    for (u32 l = 0; l < group.size; l++)
      if (active >> l & 1) wake(lane[l]);
    todo &= ~active;
  }
}

// Every thread of the threadgroup that still runs waits in a barrier.
static void release_threadgroup() {
  u32 flags = MEM_DEVICE | MEM_THREADGROUP;
  Fiber* first = nullptr;
  Fiber* done = nullptr;
  for (u32 i = 0; i < group_size; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state == DONE) done = &fiber;
    if (fiber.state != IN_BARRIER) continue;
    flags &= fiber.flags;
    if (!first) first = &fiber;
    if (fiber.site != first->site)
      report(DIVERGENT_BARRIER, NO_BUFFER, 0, 0, first->site, fiber.site, first->thread.index, i, READ, READ);
  }
  if (done)
    report(EXIT_BEFORE_BARRIER, NO_BUFFER, 0, 0, first->site, 0, done->thread.index, first->thread.index, READ, READ);
  if (flags & MEM_THREADGROUP) threadgroup_epoch++;
  if (flags & MEM_DEVICE) device_epoch++;
  job->barriers++;
  waiting = 0;
  for (u32 i = 0; i < group_size; i++)
    if (fibers[i].state == IN_BARRIER) wake(fibers[i]);
}

static void wait_in_simdgroup(Fiber* mine) {
  Simdgroup& group = simdgroups[mine->thread.simdgroup];
  if (++group.waiting == group.alive) run_simdgroup(group);
  else give_way();
}

extern "C" {
void metal_simd(void* value, u32 size, u32 argument, MetalOperation operation, int site) {
  Fiber* mine = current;
  memcpy(mine->value, value, size);
  mine->argument = argument;
  mine->operation = operation;
  mine->site = site;
  mine->state = IN_SIMD;
  wait_in_simdgroup(mine);
  memcpy(value, mine->value, size);
}

void metal_simdgroup_barrier(u32 flags, int site) {
  Fiber* mine = current;
  Simdgroup& group = simdgroups[mine->thread.simdgroup];
  if (group.alive < group.size)
    report(EXIT_BEFORE_BARRIER, NO_BUFFER, 0, 0, site, 0, mine->thread.index, mine->thread.index, READ, READ);
  mine->flags = flags;
  mine->operation = nullptr;
  mine->site = site;
  mine->state = IN_SIMD_BARRIER;
  wait_in_simdgroup(mine);
}

void metal_threadgroup_barrier(u32 flags, int site) {
  Fiber* mine = current;
  mine->flags = flags;
  mine->site = site;
  mine->state = IN_BARRIER;
  if (++waiting == alive) release_threadgroup();
  else give_way();
}

u32 metal_lane() {
  return current->thread.lane;
}

float metal_noise(float value) {
  if (job->noise == 0) return value;
  float unit = (float)((double)(random64() >> 40) / 8388608.0 - 1.0);
  return value + value * (unit * job->noise);
}
}

static void run_thread() {
  job->entry(job->arguments, &current->thread);
  Fiber* mine = current;
  if (*(u64*)mine->low != CANARY) {
    report(STACK_OVERFLOW, NO_BUFFER, 0, 0, 0, 0, mine->thread.index, 0, READ, READ);
    stop();
  }
  mine->state = DONE;
  Simdgroup& group = simdgroups[mine->thread.simdgroup];
  group.alive--;
  alive--;
  if (group.alive && group.waiting == group.alive) run_simdgroup(group);
  if (alive && waiting == alive) release_threadgroup();
  give_way();
  __builtin_unreachable();
}

static void set_position(Fiber& fiber, u32 index, const u32* group, const u32* size) {
  MetalThread& thread = fiber.thread;
  u32 position[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  for (int axis = 0; axis < 3; axis++) {
    thread.position_in_threadgroup[axis] = position[axis];
    thread.threadgroup_position[axis] = group[axis];
    thread.position_in_grid[axis] = group[axis] * job->threadgroup[axis] + position[axis];
    thread.threads_per_threadgroup[axis] = size[axis];
    thread.dispatch_threads_per_threadgroup[axis] = job->threadgroup[axis];
    thread.threadgroups_per_grid[axis] = (job->grid[axis] + job->threadgroup[axis] - 1) / job->threadgroup[axis];
    thread.threads_per_grid[axis] = job->grid[axis];
  }
  u32 dispatched = job->threadgroup[0] * job->threadgroup[1] * job->threadgroup[2];
  thread.index = index;
  thread.lane = index % LANES;
  thread.simdgroup = index / LANES;
  thread.simdgroups = (group_size + LANES - 1) / LANES;
  thread.dispatch_simdgroups = (dispatched + LANES - 1) / LANES;
}

static void start_threadgroup(u32 number, const u32* groups) {
  u32 group[3] = {number % groups[0], number / groups[0] % groups[1], number / groups[0] / groups[1]};
  u32 size[3];
  for (int axis = 0; axis < 3; axis++) {
    u32 left = job->grid[axis] - group[axis] * job->threadgroup[axis];
    size[axis] = left < job->threadgroup[axis] ? left : job->threadgroup[axis];
  }
  group_number = number;
  group_size = alive = size[0] * size[1] * size[2];
  waiting = head = tail = 0;
  threadgroup_epoch = device_epoch = 1;
  for (u32 v = 0; v < job->variables; v++) memset(job->variable[v].base, 0xff, job->variable[v].size);
  for (u32 first = 0; first < group_size; first += LANES) {
    u32 lanes = group_size - first < LANES ? group_size - first : LANES;
    simdgroups[first / LANES] = {lanes, 0, first, lanes, 1, 1};
    priority[first / LANES] = (u32)random64();
  }
  for (u32 i = 0; i < group_size; i++) {
    Fiber& fiber = fibers[i];
    fiber.state = READY;
    fiber.site = 0;
    fiber.low = job->stacks + STACK * i;
    fiber.high = fiber.low + STACK;
    *(u64*)fiber.low = CANARY;
    set_position(fiber, i, group, size);
    fiber.stack = fresh_stack(fiber.high, run_thread);
    make_ready(i);
  }
}

// Nobody can run, and some wait in a simdgroup operation while others of their simdgroup wait in a barrier.
static void free_divergent() {
  Fiber* in_simd = nullptr;
  Fiber* in_barrier = nullptr;
  for (u32 i = 0; i < group_size && !in_simd; i++)
    if (fibers[i].state == IN_SIMD || fibers[i].state == IN_SIMD_BARRIER) in_simd = &fibers[i];
  Simdgroup& group = simdgroups[in_simd->thread.simdgroup];
  for (u32 l = 0; l < group.size && !in_barrier; l++)
    if (fibers[group.first + l].state == IN_BARRIER) in_barrier = &fibers[group.first + l];
  report(DIVERGENT_SIMD, NO_BUFFER, 0, 1, in_simd->site, in_barrier->site, in_simd->thread.index,
         in_barrier->thread.index, READ, READ);
  run_simdgroup(group);
}

static void run_threadgroup(u32 number, const u32* groups) {
  start_threadgroup(number, groups);
  while (!job->failed && alive) {
    if (head == tail) {
      free_divergent();
      continue;
    }
    current = &fibers[choose()];
    job->switches++;
    metal_switch(&scheduler_stack, current->stack);
    current = nullptr;
  }
}

// What the emulator's Python side has to agree on with this one.
extern "C" const u32 metal_layout[] = {sizeof(Dispatch), sizeof(Buffer), sizeof(Report), sizeof(Cell), STACK, GUARD, REDZONE};

// `order` has room for the number of threadgroups.
extern "C" void metal_dispatch(Dispatch* dispatch, u32* order) {
  job = dispatch;
  random_state = job->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  for (int warm = 0; warm < 4; warm++) random64();
  u32 groups[3];
  for (int axis = 0; axis < 3; axis++)
    groups[axis] = (job->grid[axis] + job->threadgroup[axis] - 1) / job->threadgroup[axis];
  u32 count = groups[0] * groups[1] * groups[2];
  for (u32 k = 0; k < count; k++) order[k] = job->schedule == LIFO ? count - 1 - k : k;
  if (job->schedule == PRIORITY || job->schedule == RANDOM) {
    for (u32 k = count; k > 1; k--) {
      u32 other = random64() % k;
      u32 swapped = order[k - 1];
      order[k - 1] = order[other];
      order[other] = swapped;
    }
  }
  u64 mode = flush_denormals();
  arm(job->seconds);
  for (u32 k = 0; k < count && !job->failed; k++) run_threadgroup(order[k], groups);
  disarm();
  restore_float_mode(mode);
  if (job->check && !job->failed) report_unwritten();
  job = nullptr;
}
