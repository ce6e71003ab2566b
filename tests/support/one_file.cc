// SPDX-License-Identifier: Apache-2.0
// What -Djoined=true links to a library of the tests of several sources. The programs that run them (one_file_main.c)
// are called by the names of the sources, and each runs the tests of its own: build/tests/kill_test those of
// kill_test.cc. GTEST_PROGRAM_PREFIX is what a name has before that of the source. A program without tests fails, so
// that none is lost by a slip.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

#ifndef GTEST_PROGRAM_PREFIX
#define GTEST_PROGRAM_PREFIX ""
#endif

namespace {

std::string_view last_part(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Returns a filter for all tests that are not in `source`; empty if all are. n_inside: how many are.
std::string others(std::string_view source, int& n_inside) {
  std::string filter;
  const auto add = [&](std::string name) { filter += (filter.empty() ? "" : ":") + name; };
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    const auto is_inside = [&](int t) { return last_part(suite.GetTestInfo(t)->file()) == source; };
    int inside = 0;
    for (int t = 0; t < suite.total_test_count(); ++t) inside += is_inside(t);
    n_inside += inside;
    if (inside == 0) add(std::string(suite.name()) + ".*");
    for (int t = 0; inside > 0 && t < suite.total_test_count(); ++t)
      if (!is_inside(t)) add(std::string(suite.name()) + "." + suite.GetTestInfo(t)->name());
  }
  return filter;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run_tests_of_name(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::string_view name = last_part(argv[0]);
  if (name.starts_with(GTEST_PROGRAM_PREFIX)) name.remove_prefix(sizeof GTEST_PROGRAM_PREFIX - 1);
  int n_inside = 0;
  const std::string without = others(std::string(name) + ".cc", n_inside);
  if (n_inside == 0) {
    std::fprintf(stderr, "%s: no test is in %s.cc\n", argv[0], std::string(name).c_str());
    return 1;
  }
  std::string filter = GTEST_FLAG_GET(filter);
  if (!without.empty()) filter += (filter.find('-') == std::string::npos ? "-" : ":") + without;
  GTEST_FLAG_SET(filter, filter);
  return RUN_ALL_TESTS();
}
