// SPDX-License-Identifier: Apache-2.0
// A routing's row lists in the form in which the persistent kernel reads them (kernels/cuda/walk_rows_args.h).
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/walk_rows_args.h"
#include "src/plan/binding.h"

namespace moeccl::exec {

// Lists on the host, as a Binding has them; with the weights that there are.
struct RowListsOnHost {
  uint32_t n_chunks = 1;
  std::span<const plan::RowBlock> rows;   // of dispatch
  std::span<const plan::SumBlock> zeros;  // [n_chunks] of dispatch: padding
  std::span<const plan::SumBlock> sums;   // of combine
};
// All lists as one image, with the addresses that they have where it begins at `base`.
struct RowImage {
  static size_t bytes(const RowListsOnHost& lists);
  static cuda::WalkTables write(const RowListsOnHost& lists, std::byte* image, const std::byte* base);
};

}  // namespace moeccl::exec
