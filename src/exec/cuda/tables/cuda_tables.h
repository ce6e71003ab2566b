// SPDX-License-Identifier: Apache-2.0
// Builds a routing's tables on the device, in the order of the caller's stream and without the host. Kernels
// (kernels/cuda/tables_args.h) pack this rank's choices into a block, an AllGather brings all blocks to every rank, and
// more kernels build the tables. A CUDA graph can replay all of it, because nothing in a launch depends on the choices.
//
// Each object serves one routing and one plan, with memory for any choices of max_tokens tokens.
#pragma once

#include <memory>

#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/exec/cuda/tables/row_tables.h"
#include "src/exec/cuda/tables/table_plan.h"

namespace moeccl::exec {

// Choices in device memory.
struct StreamChoices {
  const int32_t* index = nullptr;     // [n_tokens][top_k]
  const float* weight = nullptr;      // same shape, or null; null on all ranks or on none
  uint64_t n_tokens = 0;              // rows of both
  const uint64_t* counted = nullptr;  // in device memory: how many of the rows are tokens; null: all of them
};

class CudaTables {
 public:
  // The objects that `setting` points to must outlive the result. Waits for the device.
  static Result<std::unique_ptr<CudaTables>> create(driver::cuda::Context context, const TablePlan::Layer& setting,
                                                    size_t candidate);

  ~CudaTables();

  // pack() launches the kernels before the AllGather of block_bytes() bytes from send() into recv(), and make() those
  // after it. Both return without waiting for the kernels; nothing else may use these tables until they have run.
  Status pack(const StreamEngine& engine, driver::cuda::Stream stream, const StreamChoices& choices);
  // Device memory that describes a routing as a whole, in the order of moecclRoutingDeviceInfo_t.
  struct Target {
    moeccl::cuda::WalkTables* head = nullptr;
    moeccl::cuda::TableCounts* counts = nullptr;
    int64_t* expert_offsets = nullptr;
    int32_t* expert_counts = nullptr;
  };
  // `captured` says that the kernels go into a graph, whose replays wait() does not see.
  Status make(const StreamEngine& engine, driver::cuda::Stream stream, bool captured, bool weighted,
              const Target& target);
  // Blocks the host until the last make() has run.
  void wait() const;

  std::byte* send() const { return plan_.own_block(memory_.data()); }
  std::byte* recv() const { return plan_.blocks(memory_.data()); }
  size_t block_bytes() const { return plan_.block_bytes(); }
  uint32_t n_chunks() const { return plan_.n_chunks(); }
  size_t candidate() const { return candidate_; }
  size_t memory_bytes() const { return memory_.bytes(); }

 private:
  CudaTables(const TablePlan::Layer& setting, size_t candidate) : plan_(setting), candidate_(candidate) {}

  TablePlan plan_;
  size_t candidate_;
  driver::cuda::Context context_ = nullptr;
  driver::cuda::Memory memory_;
  driver::cuda::EventOwner made_;
};

}  // namespace moeccl::exec
