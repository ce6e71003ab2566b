// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

#include "src/driver/thread.h"

namespace moeccl::driver {
namespace {

cpu_set_t allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof(cores), &cores);
  return cores;
}

// Runs on a separate thread, so that the other threads of this program stay where they are.
template <class Body>
void on_a_thread(Body&& body) {
  std::thread(std::forward<Body>(body)).join();
}

TEST(MoveToCore, GoesToEveryAllowedCoreAndStaysAllowedOnAll) {
  on_a_thread([] {
    const cpu_set_t before = allowed_cores();
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before)) continue;
      bool there = false;
      // The kernel may move the thread back between the two calls, so try again.
      for (int tries = 0; tries < 1000 && !there; ++tries) {
        move_to_core([core](int c) { return c == core; });
        there = current_core() == core;
      }
      EXPECT_TRUE(there) << core;
      const cpu_set_t after = allowed_cores();
      EXPECT_TRUE(CPU_EQUAL(&before, &after));
    }
  });
}

TEST(MoveToCore, StaysWhereNothingIsFree) {
  on_a_thread([] {
    const cpu_set_t before = allowed_cores();
    int asked = 0;
    move_to_core([&](int) { return ++asked < 0; });
    EXPECT_EQ(asked, CPU_COUNT(&before));
    const cpu_set_t after = allowed_cores();
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
  });
}

TEST(MoveToCore, PrefersNearCores) {
  on_a_thread([] {
    const cpu_set_t before = allowed_cores();
    int first = -1, last = -1;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before)) continue;
      if (first < 0) first = core;
      last = core;
    }
    const auto any = [](int) { return true; };
    for (const int near : {last, first}) {
      bool there = false;
      for (int tries = 0; tries < 1000 && !there; ++tries) {
        move_to_core(any, [near](int core) { return core == near; });
        there = current_core() == near;
      }
      EXPECT_TRUE(there) << near;
    }
    bool there = false;
    for (int tries = 0; tries < 1000 && !there; ++tries) {
      move_to_core(any, [](int) { return false; });
      there = current_core() == first;
    }
    EXPECT_TRUE(there) << "none is near";
  });
}

TEST(MoveToCore, LeavesCoresAloneThatAreNotAllowed) {
  on_a_thread([] {
    const cpu_set_t before = allowed_cores();
    const int here = current_core();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(here, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    move_to_core([here](int core) { return core != here; });
    EXPECT_EQ(current_core(), here);
    const cpu_set_t after = allowed_cores();
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
    sched_setaffinity(0, sizeof(before), &before);
  });
}

}  // namespace
}  // namespace moeccl::driver
