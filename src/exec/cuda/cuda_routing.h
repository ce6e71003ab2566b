// SPDX-License-Identifier: Apache-2.0
// Routes a rank's own choices that are in device memory. Kernels (kernels/cuda/route_args.h) put them into canonical
// order, apply the capacity, count the rows on every level's links for all candidates, and write the records for the
// peers. The host gets the counts, then the records and this rank's kept choices, because host exchanges and tables
// need both.
//
// There is one per layer, because updates of a layer's routings run one after another. It works on its own stream, so
// that it does not get in the way of the proxy that drives operations.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/route_args.h"
#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/routing/routing.h"

namespace moeccl::exec {

// Puts choices into canonical order and drops those beyond drop.capacity; 0: no capacity, and no lists.
Status launch_route_order(const StreamEngine& engine, driver::cuda::Stream stream,
                          const moeccl::cuda::RouteOrderKernelArgs& order, const moeccl::cuda::RouteKernelArgs& lists,
                          const moeccl::cuda::RouteDropKernelArgs& drop);

class CudaRouting {
 public:
  struct Model {
    const algo::MoeShape* shape = nullptr;
    const algo::Placement* placement = nullptr;
    const algo::CanonicalOrder* order = nullptr;
    const plan::LevelTree* tree = nullptr;
    std::vector<const algo::Paths*> candidates;
    uint32_t rank = 0;
  };
  // The objects that `setting` points to must outlive the result; the engine need not. Allocates for max_tokens tokens.
  static Result<std::unique_ptr<CudaRouting>> create(StreamEngine& engine, const Model& setting);

  // index: device memory, ready when the default stream is; weight: either kind of memory. Waits for the device once.
  // The errors are those of OwnChoices::assign.
  Status assign(StreamEngine& engine, const algo::TopK& topk);
  // Return the counts of the last assign(): of the rows that a candidate's dispatch sends or, with `back`, that its
  // combine returns where those are fewer; and of the rows that experts get.
  void counts(size_t candidate, bool back, std::vector<algo::LevelCount>& levels) const;
  uint64_t delivered() const;
  // Writes the records of a candidate and the choices that remain, like OwnChoices::assign and RecordWriter::write.
  // Waits for the device once.
  Status write(StreamEngine& engine, size_t candidate, algo::OwnChoices& own, algo::RecordWriter& writer);
  // Returns the memory_bytes() of an object with this setting.
  static size_t bytes_of(const Model& setting);
  // Counts device memory and page-locked host memory.
  size_t memory_bytes() const { return device_.bytes() + pinned_.bytes(); }

 private:
  // Byte offsets in device_.
  struct Count {  // of rows on algo::RowWays
    size_t way_first = 0, way_to = 0, way_slot = 0;
    size_t rows = 0;  // in the summary
    uint32_t n_slots = 0;
    bool dedup = false;
  };
  struct Candidate {
    Count sent, returned;  // returned: with slots only where combine returns fewer rows
    size_t tile = 0;
    size_t total = 0;  // in the summary
  };
  explicit CudaRouting(const Model& setting) : s_(setting) {}
  void lay_out();
  size_t pinned_bytes() const { return std::max(end_ - summary_, tables_.size() * sizeof(uint32_t)); }
  Status upload_tables();
  void launch_order(StreamEngine& engine);
  void launch_count(StreamEngine& engine, const Count& count);
  void launch_counts(StreamEngine& engine);
  moeccl::cuda::RouteWays ways_of(const Count& count) const;
  void launch(StreamEngine& engine, const char* kernel, const void* args, size_t n_threads);
  moeccl::cuda::RouteRecordsKernelArgs records_args(const Candidate& c) const;
  Status check_choices(uint32_t token) const;
  Status finish() { return calls_.finish("routing on the device"); }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(device_.data() + offset);
  }
  template <class T>
  const T* seen(size_t offset) const {  // the host's copy
    return reinterpret_cast<const T*>(pinned_.data() + (offset - summary_));
  }

  Model s_;
  driver::cuda::Context context_ = nullptr;
  driver::cuda::Memory device_, pinned_;
  StreamCalls calls_;  // the work in flight
  algo::TopK topk_;
  std::vector<uint32_t> tables_;  // constant, laid out as in device_
  std::vector<Candidate> candidates_;
  Count delivered_;
  size_t position_ = 0, owner_ = 0, expert_ = 0;                                  // constant
  size_t key_ = 0, weight_ = 0, drop_tile_ = 0, drop_first_ = 0, drop_list_ = 0;  // scratch
  // The host gets [summary_, results_) after the counts, then the results.
  size_t summary_ = 0, bad_ = 0, drop_counts_ = 0, results_ = 0;
  size_t own_n_experts_ = 0, own_expert_ = 0, own_choice_ = 0, own_weight_ = 0, words_ = 0, end_ = 0;
};

}  // namespace moeccl::exec
