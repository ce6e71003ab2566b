// SPDX-License-Identifier: Apache-2.0
// What the kernels of kernels/cuda/tables_args.h need to know of a routing's plan on one rank, and where everything
// lies in one piece of device memory, for any routing of the layer: a pure function of the plan.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/cuda/args.h"
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
  // What it points to outlives this.
  explicit TablePlan(const Layer& setting);
  TablePlan(const TablePlan&) = delete;
  TablePlan& operator=(const TablePlan&) = delete;

  // Chunks that suffice for every routing, and let the hops of a full one overlap. The same on all ranks. slot_rows has
  // room for one token of each origin.
  static uint32_t n_chunks_of(const algo::MoeShape& shape, const algo::Paths& paths, uint64_t slot_rows);

  uint32_t n_chunks() const { return is_.n_chunks; }
  size_t bytes() const { return end_; }                // of device memory
  size_t block_bytes() const { return block_bytes_; }  // of a rank's choices
  // The image's first bytes, which the host brings there once.
  const std::vector<std::byte>& constants() const { return constants_; }

  // Addresses with the image at `base`.
  std::byte* own_block(std::byte* base) const { return base + own_block_; }
  std::byte* blocks(std::byte* base) const { return base + blocks_; }
  cuda::TableOwnKernelArgs own(std::byte* base) const { return at(base).own; }  // without the caller's buffers
  cuda::RouteOrderKernelArgs order(std::byte* base, uint32_t n_tokens) const;
  cuda::RouteKernelArgs lists(std::byte* base, uint32_t n_tokens) const;  // for capacity
  cuda::RouteDropKernelArgs drop(std::byte* base) const { return at(base).drop; }
  // head and what describes the routing as a whole lie elsewhere.
  cuda::TablesKernelArgs tables(std::byte* base) const { return at(base).tables; }
  uint32_t n_tiles() const { return is_.n_places * is_.n_chunks * is_.tiles_per_chunk; }
  uint32_t n_counters() const {
    return 2 * is_.n_out + static_cast<uint32_t>(cuda::TableCounter::kKinds) + 1 + is_.n_local;
  }

 private:
  // The kernels' arguments. Until at() has moved them, pointers hold places in the image, counted from its beginning.
  struct Args {
    cuda::TableOwnKernelArgs own{};
    cuda::RouteOrderKernelArgs order{};
    cuda::RouteKernelArgs lists{};
    cuda::RouteDropKernelArgs drop{};
    cuda::TablesKernelArgs tables{};
  };
  Args at(std::byte* base) const;
  // Room for n elements; `field`, and `others` as well, point there.
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
  cuda::TableConstants& is_ = args_.tables.is;
  std::vector<size_t> fields_;  // byte offsets in args_ of the pointers into the image
  std::vector<std::byte> constants_;
  size_t end_ = 0, block_bytes_ = 0, own_block_ = 0, blocks_ = 0;
};

}  // namespace moeccl::exec
