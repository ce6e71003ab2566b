// SPDX-License-Identifier: Apache-2.0
// The network side of a persistent kernel some of whose ranks are on other hosts (kernels/cuda/walk_net_args.h). A
// thread takes what the kernel's lanes give, puts it over its own links, and tells the kernel what has arrived. An
// operation needs no call on the host: a launch that a graph replays goes on counting where the launch before it
// stopped.
#pragma once

#include <array>
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
#include "transport/common/arrived_ranges.h"
#include "transport/transport.h"

namespace moeccl::exec {

class KernelProxy final : public transport::Arrivals {
 public:
  struct Rank {
    driver::cuda::Context context = nullptr;
    uint32_t rank = 0, n_ranks = 1;
    uint64_t half_bytes = 0;                // of the staging
    const transport::Board* own = nullptr;  // this rank's: shows how many operations were launched and have ended
  };
  static Result<std::unique_ptr<KernelProxy>> create(const Rank& rank);
  // Sends what still waits, within a second. The kernels must have ended.
  ~KernelProxy();

  // Returns the memory that the network writes. Its layout is the same on all ranks.
  transport::LocalMemory memory();
  // links: [n_ranks], null for ranks of this host. The thread starts then.
  Status start(std::vector<std::unique_ptr<transport::Link>> links, std::unique_ptr<transport::Engine> engine);

  // Returns the arguments of the kernel's launches, except for the state, which is the device's.
  moeccl::cuda::WalkNet net() const;
  bool elsewhere(uint32_t rank) const { return rank < links_.size() && links_[rank] != nullptr; }
  moeccl::cuda::WalkPeer peer(uint32_t rank) const;

  // wake(): an operation was launched (any thread). captured(): from now on a graph's replays may launch it, without
  // notice.
  void wake();
  void captured();
  // Return whether a rank elsewhere has launched, or ended, this many operations outside of graphs. Any thread.
  bool has_launched(uint32_t rank, uint64_t number) const;
  bool has_ended(uint32_t rank, uint64_t number) const;
  size_t memory_bytes() const { return pinned_.bytes(); }

  bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override;

 private:
  // What a rank says when it enters. The memory of each rank elsewhere holds kWalkEntries of these for each rank,
  // behind the staging.
  struct Record {
    moeccl::cuda::WalkEntry entry;
    moeccl::cuda::WalkSplit split;  // for the rank that reads it
  };
  // A command that goes to all ranks elsewhere.
  struct Open {
    uint32_t next = 0;  // rank
    Record record{};
  };

  static constexpr uint64_t kMostArrival = 1 << 30;  // of a WalkArrival

  explicit KernelProxy(const Rank& rank) : s_(rank), ranges_(rank.n_ranks, kMostArrival) {}
  uint64_t staging_bytes() const { return 2 * s_.half_bytes; }
  uint64_t record_at(uint32_t rank, uint64_t seq) const {
    return staging_bytes() +
           (rank * size_t{moeccl::cuda::kWalkEntries} + seq % moeccl::cuda::kWalkEntries) * sizeof(Record);
  }
  moeccl::cuda::WalkQueue& queue(uint32_t i) const;
  std::byte* cell(uint32_t queue, uint32_t i) const;
  const std::atomic<uint64_t>& word(uint32_t rank, uint32_t sig) const;

  void run();
  bool turn();  // returns whether anything moved
  // Sends the commands of queue i up to `head`. Returns false when one must wait.
  bool send(uint32_t i, uint64_t head, bool& moved);
  bool send_one(uint32_t i, const moeccl::cuda::WalkCommand& c);
  bool put(uint32_t rank, uint64_t offset, const std::byte* src, size_t bytes);
  bool collect();  // takes what has arrived
  bool deliver();
  bool given_all() const;  // returns whether everything that the kernel gave has been sent
  bool tell();  // tells peers how far this rank is, once everything that the kernel gave before has been sent
  void rest(int64_t idle_ns);

  Rank s_;
  uint64_t cell_bytes_ = 0;
  driver::cuda::Memory pinned_;
  // Where its parts begin. The staging and the records behind it come last.
  size_t signals_at_ = 0, blocks_at_ = 0, queues_at_ = 0, arrivals_at_ = 0, mirrors_at_ = 0, mirror_bytes_ = 0,
         cells_at_ = 0, staging_at_ = 0;
  std::vector<std::unique_ptr<transport::Link>> links_;
  std::unique_ptr<transport::Engine> engine_;
  transport::ArrivedRanges ranges_;  // not yet collected

  // Used only by the thread.
  Open open_;
  std::array<bool, moeccl::cuda::kNetQueues> begun_{};  // the queue's first command was tried, and is not through
  std::vector<uint64_t> seen_, done_;               // words [n_ranks * kSigsPerPeer]; operations that ranks have ended
  std::vector<moeccl::cuda::WalkArrival> waiting_;  // these wait for room in the kernel's ring, from waiting_from_ on
  size_t waiting_from_ = 0;
  std::vector<moeccl::cuda::WalkArrival> flags_;  // scratch
  uint64_t told_launched_ = 0, told_ended_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> stop_{false}, captured_{false}, asleep_{false};
  driver::ForkGuard process_;
  std::thread thread_;
};

}  // namespace moeccl::exec
