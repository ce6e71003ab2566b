// SPDX-License-Identifier: Apache-2.0
#include "src/base/uncancelled.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

namespace moeccl {
namespace {

struct Caller {
  int type;
  std::atomic<bool> inside{false}, cancelled{false}, ended{false}, went_on{false};
};

void* call(void* given) {
  auto& c = *static_cast<Caller*>(given);
  pthread_setcanceltype(c.type, nullptr);
  {
    const Uncancelled uncancelled;
    c.inside = true;
    while (!c.cancelled) ::usleep(1000);  // a cancellation point
    c.ended = true;
  }
  pthread_testcancel();
  c.went_on = true;
  return nullptr;
}

// In a process of its own, which a failure would end.
TEST(Uncancelled, ACancellationOfEitherTypeWaitsAndThenActs) {
  for (const int type : {PTHREAD_CANCEL_DEFERRED, PTHREAD_CANCEL_ASYNCHRONOUS}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);
      Caller c{type};
      pthread_t thread;
      if (pthread_create(&thread, nullptr, call, &c) != 0) ::_exit(2);
      while (!c.inside) ::usleep(1000);
      pthread_cancel(thread);
      c.cancelled = true;
      pthread_join(thread, nullptr);  // glibc 2.36 forgets the result of an asynchronous one
      ::_exit(c.ended && !c.went_on ? 0 : 1);
    }
    int state = 0;
    ASSERT_EQ(::waitpid(child, &state, 0), child);
    EXPECT_TRUE(WIFEXITED(state)) << "type " << type << ": " << state;
    EXPECT_EQ(WEXITSTATUS(state), 0) << "type " << type;
  }
}

}  // namespace
}  // namespace moeccl
