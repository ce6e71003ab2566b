// SPDX-License-Identifier: Apache-2.0
// A routing's row lists in the form that the persistent kernel reads (kernels/cuda/walk_rows_args.h).
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/walk_rows_args.h"
#include "src/plan/binding.h"

namespace moeccl::exec {

// Lists on the host, as in a Binding, with the weights if there are any.
struct RowListsOnHost {
  uint32_t n_chunks = 1;
  std::span<const plan::RowBlock> rows;   // of dispatch
  std::span<const plan::SumBlock> zeros;  // [n_chunks] of dispatch: padding
  std::span<const plan::SumBlock> sums;   // of combine
};
// All lists as one image, with the addresses that they have if it begins at `base`.
struct RowImage {
  static size_t bytes(const RowListsOnHost& lists);
  static moeccl::cuda::WalkTables write(const RowListsOnHost& lists, std::byte* image, const std::byte* base);
};

}  // namespace moeccl::exec
