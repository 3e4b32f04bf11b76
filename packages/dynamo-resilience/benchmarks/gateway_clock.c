// SPDX-License-Identifier: Apache-2.0
// A wrong wall clock for one process: LD_PRELOAD this, with CLOCK_OFFSET_FILE naming a file of eight bytes, the
// nanoseconds to add, which may change while it runs. The monotonic clocks stay right, as on a host whose date is set.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile long long *offset;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_OFFSET_FILE");
  int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) offset = page;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  // The system call, not the C library's function: that is this one.
  int failed = (int)syscall(SYS_clock_gettime, clock, now);
  if (failed || offset == NULL || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
  long long shown = now->tv_sec * SECOND + now->tv_nsec + *offset;
  now->tv_sec = shown / SECOND;
  now->tv_nsec = shown % SECOND;
  return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now != NULL) *now = precise.tv_sec;
  return precise.tv_sec;
}
