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
  cuda::TableOwnKernelArgs own(std::byte* base) const;  // without the caller's buffers
  cuda::RouteOrderKernelArgs order(std::byte* base, uint32_t n_tokens) const;
  cuda::RouteKernelArgs lists(std::byte* base, uint32_t n_tokens) const;  // for capacity
  cuda::RouteDropKernelArgs drop(std::byte* base) const;
  // head and what describes the routing as a whole lie elsewhere.
  cuda::TablesKernelArgs tables(std::byte* base) const;
  uint32_t n_tiles() const { return is_.n_places * is_.n_chunks * is_.tiles_per_chunk; }
  uint32_t n_counters() const {
    return 2 * is_.n_out + static_cast<uint32_t>(cuda::TableCounter::kKinds) + 1 + is_.n_local;
  }

 private:
  template <class T>
  size_t constant(const std::vector<T>& values);
  void lay_out_constants();
  void lay_out_own();
  void lay_out_tables();
  std::vector<uint64_t> passes() const;
  size_t take(size_t bytes);

  Layer s_;
  cuda::TableConstants is_{};  // numbers
  std::vector<std::byte> constants_;
  size_t end_ = 0, block_bytes_ = 0, expert_at_ = 0, weight_at_ = 0;
  // Byte offsets.
  size_t passes_ = 0, way_ = 0, owner_ = 0, local_index_ = 0, level_ = 0, place_origin_ = 0, place_source_ = 0,
         place_order_ = 0, source_first_ = 0, first_out_ = 0, gather_first_ = 0, zeros_of_ = 0, position_ = 0,
         expert_ = 0, identity_ = 0;
  size_t choices_ = 0, key_ = 0, bad_ = 0, drop_tile_ = 0, drop_first_ = 0, drop_list_ = 0, drop_counts_ = 0,
         own_block_ = 0, blocks_ = 0;
  size_t counter_ = 0, total_ = 0, chunk_first_ = 0, list_first_ = 0, gather_src_ = 0, scatter_src_ = 0,
         scatter_dst_ = 0, padding_ = 0, scatter_weight_ = 0, term_weight_ = 0, offset_ = 0, term_ = 0, rows_ = 0,
         zeros_ = 0, sums_ = 0;
};

}  // namespace moeccl::exec
