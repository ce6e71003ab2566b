// SPDX-License-Identifier: Apache-2.0
// The data that the kernels of kernels/cuda/tables_args.h need about a routing's plan on one rank, and its layout in
// one piece of device memory, for any routing of the layer. It is a pure function of the plan.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/cuda/route_args.h"
#include "kernels/cuda/tables_args.h"
#include "src/routing/domains.h"
#include "src/routing/routing_tables.h"

namespace moeccl::exec {

class TablePlan {
 public:
  struct Layer {
    const algo::Paths* paths = nullptr;
    const algo::RankPaths* rank = nullptr;   // of this rank, with the experts as it sees them
    const algo::Placement* home = nullptr;   // of all experts
    const algo::Domains* domains = nullptr;  // null: none
    const algo::CanonicalOrder* order = nullptr;
    const algo::MoeShape* shape = nullptr;
    uint64_t slot_rows = 0;
    uint32_t n_chunks = 0;  // 0: n_chunks_of()
  };
  // The objects that `setting` points to must outlive this one.
  explicit TablePlan(const Layer& setting);
  TablePlan(const TablePlan&) = delete;
  TablePlan& operator=(const TablePlan&) = delete;

  // Returns a number of chunks that suffices for every routing and lets the hops of a full one overlap. It is the same
  // on all ranks. slot_rows must have room for one token of each origin.
  static uint32_t n_chunks_of(const algo::MoeShape& shape, const algo::Paths& paths, uint64_t slot_rows);

  uint32_t n_chunks() const { return is_.n_chunks; }
  size_t bytes() const { return end_; }                // of device memory
  size_t block_bytes() const { return block_bytes_; }  // of the block with a rank's choices
  // The image's first bytes, which the host copies there once.
  const std::vector<std::byte>& constants() const { return constants_; }

  // Addresses with the image at `base`.
  std::byte* own_block(std::byte* base) const { return base + own_block_; }
  std::byte* blocks(std::byte* base) const { return base + blocks_; }
  moeccl::cuda::TableOwnKernelArgs own(std::byte* base) const { return at(base).own; }  // without the caller's buffers
  moeccl::cuda::RouteOrderKernelArgs order(std::byte* base, uint32_t n_tokens) const;
  moeccl::cuda::RouteKernelArgs lists(std::byte* base, uint32_t n_tokens) const;  // for capacity
  moeccl::cuda::RouteDropKernelArgs drop(std::byte* base) const { return at(base).drop; }
  // The head and the description of the routing as a whole are elsewhere.
  moeccl::cuda::TablesKernelArgs tables(std::byte* base) const { return at(base).tables; }
  uint32_t n_tiles() const { return is_.n_places * is_.n_chunks * is_.tiles_per_chunk; }
  uint32_t n_counters() const {
    return 2 * is_.n_out + static_cast<uint32_t>(moeccl::cuda::TableCounter::kKinds) + 1 + is_.n_local;
  }

 private:
  // The kernels' arguments. Until at() relocates them, their pointers hold offsets from the image's beginning.
  struct Args {
    moeccl::cuda::TableOwnKernelArgs own{};
    moeccl::cuda::RouteOrderKernelArgs order{};
    moeccl::cuda::RouteKernelArgs lists{};
    moeccl::cuda::RouteDropKernelArgs drop{};
    moeccl::cuda::TablesKernelArgs tables{};
  };
  Args at(std::byte* base) const;
  // Reserves room for n elements and makes `field` and `others` point there.
  template <class T, class... Others>
  void place(size_t n, T*& field, Others*&... others);
  template <class T, class... Others>
  void constant(const std::vector<T>& values, const T*& field, Others*&... others);
  void lay_out_constants();
  void lay_out_own();
  void lay_out_tables();
  std::vector<uint64_t> passes() const;
  size_t take(size_t bytes);

  Layer s_;
  Args args_;
  moeccl::cuda::TableConstants& is_ = args_.tables.is;
  std::vector<size_t> fields_;  // byte offsets in args_ of the pointers into the image
  std::vector<std::byte> constants_;
  size_t end_ = 0, block_bytes_ = 0, own_block_ = 0, blocks_ = 0;
};

}  // namespace moeccl::exec
