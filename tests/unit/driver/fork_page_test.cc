// SPDX-License-Identifier: Apache-2.0
// Objects made before a fork are recognised in the child, and the child's own objects are not mistaken for its
// parent's.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "src/driver/fork_page.h"

namespace moeccl::driver {
namespace {

// Runs body in a child. Returns whether body returned true.
template <class Body>
bool in_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ForkPage, ABirthIsOfItsProcessAlone) {
  const Birth parents;
  EXPECT_TRUE(parents.here());
  EXPECT_TRUE(in_child([&] {
    if (parents.here()) return false;
    const Birth own;
    if (!own.here() || parents.here()) return false;
    return in_child([&] {
      if (own.here() || parents.here()) return false;
      const Birth grandchilds;
      return grandchilds.here() && !own.here() && !parents.here();
    });
  }));
  EXPECT_TRUE(parents.here());
}

TEST(ForkPage, EachProcessHasItsOwnAndSeesThoseBefore) {
  struct Named {
    int name = 0;
  };
  static constinit PerProcess<Named> named;
  named.get().name = 7;
  const auto is_seven = [](const Named& n) { return n.name == 7; };
  EXPECT_FALSE(named.any_inherited(is_seven)) << "it is this process's own";
  EXPECT_TRUE(in_child([&] {
    if (!named.any_inherited(is_seven)) return false;
    if (named.get().name != 0) return false;
    named.get().name = 8;
    return in_child([&] { return named.any_inherited(is_seven) && named.get().name == 0; });
  }));
  EXPECT_EQ(named.get().name, 7);
}

}  // namespace
}  // namespace moeccl::driver
