/* SPDX-License-Identifier: Apache-2.0 */
/* For a machine without a debugger: preloaded, it writes the stack of every thread to stderr when the process gets
 * SIGUSR2, and that of the thread that crashes. Lines have the form object(+0xoffset); addr2line -Cfe on the same
 * object, not stripped, names them. To build it: cc -shared -fPIC -O1 -o stacks.so tools/gpu/stacks.c */
#define _GNU_SOURCE
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { kFrames = 48 };
static int one_thread; /* the signal by which a thread is asked for its own stack */

static void write_stack(const char* why, int number) {
  void* frames[kFrames];
  char head[96], name[16] = "?";
  (void)pthread_getname_np(pthread_self(), name, sizeof name);
  const int n = backtrace(frames, kFrames);
  const int bytes = snprintf(head, sizeof head, "-- %s %d, process %d, thread %d (%s)\n", why, number, (int)getpid(),
                             (int)syscall(SYS_gettid), name);
  if (write(STDERR_FILENO, head, (size_t)bytes) < 0) return;
  backtrace_symbols_fd(frames, n, STDERR_FILENO);
}

static void on_own(int number) { write_stack("stack on signal", number); }

/* Asks one thread after the other, so that their lines do not mix. Reads the folder by system calls: the interrupted
 * thread may hold the allocator's lock. */
static void on_all(int number) {
  struct entry {
    unsigned long inode, offset;
    unsigned short bytes;
    char type, name[];
  };
  char buffer[4096];
  (void)number;
  const int folder = open("/proc/self/task", O_RDONLY | O_DIRECTORY);
  if (folder < 0) return;
  for (long n; (n = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0;)
    for (long at = 0; at < n;) {
      const struct entry* e = (const struct entry*)(buffer + at);
      at += e->bytes;
      const int thread = atoi(e->name);
      const struct timespec pause = {0, 20000000};
      if (thread > 0 && syscall(SYS_tgkill, getpid(), thread, one_thread) == 0) nanosleep(&pause, NULL);
    }
  close(folder);
}

static void on_crash(int number) {
  write_stack("crash by signal", number); /* then the default action, which SA_RESETHAND has restored */
  raise(number);
}

static void handle(int number, void (*handler)(int), int flags) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(number, &action, NULL);
}

__attribute__((constructor)) static void begin(void) {
  void* frames[2];
  (void)backtrace(frames, 2); /* loads the unwinder now, not inside a handler */
  one_thread = SIGRTMIN + 7;
  handle(one_thread, on_own, SA_RESTART);
  handle(SIGUSR2, on_all, SA_RESTART);
  const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) handle(crashes[i], on_crash, (int)SA_RESETHAND);
}
