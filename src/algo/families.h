// The list of families, one file each. registry.cc joins them; ties between prices are broken in this order.
#pragma once

#include <span>

#include "src/algo/algorithm.h"

namespace moeccl::algo {

std::span<const Algorithm> oneshot_algorithms();
std::span<const Algorithm> direct_algorithms();
std::span<const Algorithm> staged_algorithms();
std::span<const Algorithm> rd_algorithms();
std::span<const Algorithm> tree_algorithms();
std::span<const Algorithm> flat_algorithms();
std::span<const Algorithm> ring_algorithms();
std::span<const Algorithm> two_d_algorithms();
std::span<const Algorithm> hier_algorithms();
std::span<const Algorithm> tensor_algorithms();

}  // namespace moeccl::algo
