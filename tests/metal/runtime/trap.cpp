// A kernel that crashes, or does not end, ends its dispatch and not the process: the thread is abandoned on its stack
// and the scheduler goes on.
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>

#include "runtime.h"

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGVTALRM};
static const int COUNT = sizeof(SIGNALS) / sizeof(SIGNALS[0]);
static struct sigaction before[COUNT];
static stack_t stack_before;
static itimerval timer_before;
static pthread_t owner;
static char signal_stack[64 << 10];

static void handle(int number, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), owner)) {
    if (number == SIGVTALRM) {
      pthread_kill(owner, number);
      return;
    }
    signal(number, SIG_DFL);  // a fault of another thread is none of ours
    return;
  }
  if (!job || !current) {
    if (number != SIGVTALRM) signal(number, SIG_DFL);
    return;
  }
  Kind kind = number == SIGVTALRM ? ENDLESS : CRASH;
  report(kind, NO_BUFFER, 0, (u32)number, current->site, 0, current->thread.index, 0, READ, READ);
  stop();
}

void arm(u32 seconds) {
  owner = pthread_self();
  stack_t stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof(signal_stack);
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int k = 0; k < COUNT; k++) sigaction(SIGNALS[k], &action, &before[k]);
  itimerval timer = {{1, 0}, {(time_t)seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, &timer_before);
}

void disarm() {
  setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
  for (int k = 0; k < COUNT; k++) sigaction(SIGNALS[k], &before[k], nullptr);
  sigaltstack(&stack_before, nullptr);
}
