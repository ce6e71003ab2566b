// SPDX-License-Identifier: Apache-2.0
// The list of families, one file each, in the order in which ties between prices are broken. A line here registers the
// rows of NAME_algorithms(), which are in NAME.cc.
#pragma once

#include <span>

#include "src/algo/algorithm.h"

#define MOECCL_ALGORITHM_FAMILIES(FAMILY) \
  FAMILY(oneshot)                         \
  FAMILY(direct)                          \
  FAMILY(staged)                          \
  FAMILY(rd)                              \
  FAMILY(tree)                            \
  FAMILY(flat)                            \
  FAMILY(ring)                            \
  FAMILY(halving)                         \
  FAMILY(two_d)                           \
  FAMILY(hier)                            \
  FAMILY(tensor)

namespace moeccl::algo {

#define MOECCL_DECLARE_FAMILY(name) std::span<const Algorithm> name##_algorithms();
MOECCL_ALGORITHM_FAMILIES(MOECCL_DECLARE_FAMILY)
#undef MOECCL_DECLARE_FAMILY

}  // namespace moeccl::algo
