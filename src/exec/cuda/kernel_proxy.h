// SPDX-License-Identifier: Apache-2.0
// The network of a persistent kernel some of whose ranks are on other hosts (kernels/cuda/walk_net_args.h). A thread
// takes what the kernel's lanes give, puts it over links of its own, and tells the kernel what has arrived. It needs no
// call on the host for an operation: a launch that a graph replays counts on where the one before it stopped.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/walk_args.h"
#include "src/driver/cuda.h"
#include "src/driver/process.h"
#include "transport/transport.h"

namespace moeccl::exec {

class KernelProxy final : public transport::Arrivals {
 public:
  struct Rank {
    driver::cuda::Context context = nullptr;
    uint32_t rank = 0, n_ranks = 1;
    uint64_t half_bytes = 0;                // of the staging
    const transport::Board* own = nullptr;  // of this rank: says how many operations were launched and have ended
  };
  static Result<std::unique_ptr<KernelProxy>> create(const Rank& rank);
  // Sends what still waits, within a second. The kernels have ended.
  ~KernelProxy();

  // What the network writes. The same on all ranks.
  transport::LocalMemory memory();
  // links: [n_ranks], null for ranks of this host. Then the thread starts.
  Status start(std::vector<std::unique_ptr<transport::Link>> links, std::unique_ptr<transport::Engine> engine);

  // For the kernel's launches, but for the state, which is the device's.
  moeccl::cuda::WalkNet net() const;
  bool elsewhere(uint32_t rank) const { return rank < links_.size() && links_[rank] != nullptr; }
  moeccl::cuda::WalkPeer peer(uint32_t rank) const;

  // An operation was launched (any thread); captured: by a graph's replays from now on, of which nobody tells.
  void wake();
  void captured();
  // Whether a rank elsewhere has launched, or ended, so many operations outside of graphs. Any thread.
  bool has_launched(uint32_t rank, uint64_t number) const;
  bool has_ended(uint32_t rank, uint64_t number) const;
  size_t memory_bytes() const { return pinned_.bytes(); }

  bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override;

 private:
  // What a rank says when it enters; in the memory of each rank elsewhere, kWalkEntries for each rank, behind the
  // staging.
  struct Record {
    moeccl::cuda::WalkEntry entry;
    moeccl::cuda::WalkSplit split;  // with the rank that reads it
  };
  struct Range {
    uint64_t offset = 0, bytes = 0;
  };
  // A command that goes to all ranks elsewhere.
  struct Open {
    uint32_t next = 0;  // rank
    Record record{};
  };

  explicit KernelProxy(const Rank& rank) : s_(rank) {}
  uint64_t staging_bytes() const { return 2 * s_.half_bytes; }
  uint64_t record_at(uint32_t rank, uint64_t seq) const {
    return staging_bytes() +
           (rank * size_t{moeccl::cuda::kWalkEntries} + seq % moeccl::cuda::kWalkEntries) * sizeof(Record);
  }
  moeccl::cuda::WalkQueue& queue(uint32_t i) const;
  std::byte* cell(uint32_t queue, uint32_t i) const;
  const std::atomic<uint64_t>& word(uint32_t rank, uint32_t sig) const;

  void run();
  bool turn();  // whether anything moved
  // Commands of queue i up to `head`; false when one must wait.
  bool send(uint32_t i, uint64_t head, bool& moved);
  bool send_one(uint32_t i, const moeccl::cuda::WalkCommand& c);
  bool put(uint32_t rank, uint64_t offset, const std::byte* src, size_t bytes);
  bool collect();  // what has arrived
  bool deliver();
  bool given_all() const;  // nothing that the kernel gave waits
  bool tell();             // peers how far this rank is; before it everything that the kernel gave has been sent
  void rest(int64_t idle_ns);

  Rank s_;
  uint64_t cell_bytes_ = 0;
  driver::cuda::Memory pinned_;
  // Where parts of it begin; the staging and the records behind it come last.
  size_t signals_at_ = 0, blocks_at_ = 0, queues_at_ = 0, arrivals_at_ = 0, mirrors_at_ = 0, mirror_bytes_ = 0,
         cells_at_ = 0, staging_at_ = 0;
  std::vector<std::unique_ptr<transport::Link>> links_;
  std::unique_ptr<transport::Engine> engine_;

  // The thread's own.
  Open open_;
  std::vector<uint64_t> seen_, done_;               // words [n_ranks * kSigsPerPeer]; operations that ranks have ended
  std::vector<moeccl::cuda::WalkArrival> waiting_;  // for room in the kernel's ring, from waiting_from_ on
  size_t waiting_from_ = 0;
  std::vector<moeccl::cuda::WalkArrival> flags_;  // scratch
  std::vector<Range> taken_;
  uint64_t told_launched_ = 0, told_ended_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<Range>> ranges_;  // by source, under the lock: arrived, not collected yet
  std::atomic<bool> stop_{false}, captured_{false}, asleep_{false};
  driver::ForkGuard process_;
  std::thread thread_;
};

}  // namespace moeccl::exec
