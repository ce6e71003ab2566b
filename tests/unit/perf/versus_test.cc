// SPDX-License-Identifier: Apache-2.0
#include "perf/versus/versus.h"

#include <gtest/gtest.h>

namespace perf {
namespace {

bool is_close(double rival_us, double moeccl_us) {
  VersusPoint p;
  p.rival_us = rival_us, p.moeccl_us = moeccl_us;
  return p.is_close();
}

// Or else the mean over two equal libraries would not be 1.
TEST(VersusPoint, IsCloseWhicheverLibraryIsTheFasterOne) {
  for (const double factor : {1.0, 1.01, 1.1, 1.2, 1.24, 1.26, 1.5, 4.0}) {
    EXPECT_EQ(is_close(100 * factor, 100), factor < 1.25) << factor;
    EXPECT_EQ(is_close(100, 100 * factor), factor < 1.25) << factor;
  }
}

}  // namespace
}  // namespace perf
