// SPDX-License-Identifier: Apache-2.0
// The persistent kernel of one rank: its device memory (flags and staging), which peers' kernels access, and launches
// that each run a whole program (kernels/cuda/walk.cuh). A launch goes on any stream and returns at once. KernelTask
// (kernel_task.h) watches for its end on the host.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "kernels/cuda/walk_rows_args.h"
#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/device_watch.h"
#include "src/exec/cuda/kernel_program.h"
#include "src/exec/cuda/kernel_proxy.h"
#include "src/exec/cuda/messages/kernel_messages.h"
#include "src/exec/cuda/peer_memory.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/exec/cuda/stream_name.h"
#include "src/exec/fabric.h"
#include "src/exec/operation.h"
#include "src/exec/promise.h"

namespace moeccl::exec {

class PersistentKernel {
 public:
  struct Setting {
    uint32_t n_ranks = 1;
    uint64_t half_bytes = 0;     // staging of one operation
    uint32_t most_blocks = 0;    // of a launch, more than kWalkMostLanes
    size_t message_area = 0;     // KernelMessages::area_bytes()
    bool for_processes = false;  // other processes of the host open memory()
    bool graph_mixing = true;    // replays and other launches run in the order of their calls
  };
  static Result<std::unique_ptr<PersistentKernel>> create(StreamEngine& engine, const Setting& setting);
  const PeerMemory& memory() const { return memory_; }
  // memories: [n_ranks], every rank's memory() as this rank's device accesses it, with its own in its place. Ranks on
  // other hosts have none: `proxy` reaches them, and is null if there are no such ranks.
  // messages: null if they do not go through the kernel.
  Status connect(Fabric& fabric, std::span<std::byte* const> memories, std::unique_ptr<KernelProxy> proxy,
                 std::unique_ptr<KernelMessages> messages);

  // Puts the operation on the stream, after those launched before. `number` receives its number, which the board shows
  // when it is done. Null: the stream is being captured, and the operation follows those launched before in the same
  // capture, whatever stream they are on. A replay and a launch, or two replays, run in the order of their calls,
  // unless Setting::graph_mixing is false.
  Status launch(const Operation& op, driver::cuda::Stream stream, uint64_t* number);
  // The same for messages, whose launches have numbers of their own. Each peer must be one that moves_messages().
  Status launch(std::span<const Message> messages, driver::cuda::Stream stream, uint64_t* number);
  // Returns whether messages to and from this rank go through launches here, on both ranks.
  bool moves_messages(uint32_t peer) const { return messages_ != nullptr && messages_->reaches(peer); }
  // Returns the number of the newest operation that has begun.
  uint64_t begun() const;
  // Return the number of the newest launch of messages that has begun, and that has ended.
  uint64_t messages_begun() const;
  uint64_t messages_ended() const;
  // The same for the messages to or from a peer.
  uint64_t messages_ended(uint32_t peer, bool sends) const;
  Promise promise() {
    promised_.fetch_add(1, std::memory_order_relaxed);
    return Promise(&promised_);
  }
  // Returns whether a graph may replay one of its operations.
  bool has_captured() const { return has_captured_.load(std::memory_order_acquire); }
  bool has_promised() const { return promised_.load(std::memory_order_acquire) > 0; }

  // Returns why the device gave up, or ok() if it did not. Any thread.
  Status failure() const;
  // Returns why the device runs nothing any more, or success. Does not wait for the driver.
  Status device_state();
  // Returns whether a launch to this stream would wait there for the launch before it, on another stream. The library's
  // streams must not wait: they would hold up other communicators' engines, whose streams share hardware channels with
  // them.
  bool would_wait(driver::cuda::Stream stream);
  // Makes the waiting kernels give up; nothing can be launched any more. Any thread.
  void stop();
  // Tells the kernel of one launch, an operation or messages, that its deadline has passed.
  void expire(uint64_t number, bool messages);
  // Returns whether everything launched outside of graphs has run.
  bool idle() const;
  // Return whether `peer` has launched, or ended, this many operations outside of graphs, as far as this rank knows.
  bool has_launched(uint32_t peer, uint64_t number) const;
  bool has_ended(uint32_t peer, uint64_t number) const;
  // Returns whether an operation on the device, or a replay, may wait for the peer.
  bool waits_for(uint32_t peer) const;
  // Returns whether the peer is on another host. It then does not use this rank's memory, and its memory is not used
  // here.
  bool elsewhere(uint32_t peer) const { return proxy_ != nullptr && proxy_->elsewhere(peer); }
  uint64_t launched() const { return launched_.load(std::memory_order_acquire); }
  uint32_t most_blocks() const { return most_blocks_; }
  uint64_t half_bytes() const { return half_bytes_; }  // staging of one operation
  // Returns the most bytes that a row with its scales may have: a row goes to another host in one piece.
  uint64_t most_row_bytes() const { return proxy_ != nullptr ? proxy_->net().cell_bytes : ~uint64_t{0}; }
  size_t memory_bytes() const {
    return memory_.bytes() + pinned_.bytes() + programs_.bytes() + (proxy_ != nullptr ? proxy_->memory_bytes() : 0) +
           (messages_ != nullptr ? messages_->memory_bytes() : 0);
  }
  StreamEngine& engine() const { return engine_; }
  // Returns the stream for messages that a thread launches.
  driver::cuda::Stream message_stream() const { return message_stream_.get(); }

 private:
  explicit PersistentKernel(StreamEngine& engine) : engine_(engine) {}
  struct Placed {
    moeccl::cuda::WalkArgs program;  // its first fields, in page-locked memory
    uint64_t upload = 0;             // once uploaded() has reached this, the program is at the same place of programs_
    bool captured = false;
  };
  Result<Placed*> place(const Operation& op);
  Status upload(std::byte* at, size_t bytes);
  moeccl::cuda::WalkArgs program_of(const Placed& placed, bool captured) const;
  const std::atomic<uint64_t>& uploaded() const;
  void fill(const Operation& op, moeccl::cuda::WalkArgs& a) const;
  Result<uint64_t> follow_captured(driver::cuda::Stream stream);
  Status note_captured(driver::cuda::Stream stream, uint64_t capture);
  // Put a launch with this number in order with others; 0: in a capture.
  Result<uint64_t> before_launch(driver::cuda::Stream stream, uint64_t number);
  Status after_launch(driver::cuda::Stream stream, uint64_t number, uint64_t capture);
  Status start(const Operation& op, const moeccl::cuda::WalkArgs& a, driver::cuda::Stream stream) const;
  size_t peers_at() const { return moeccl::cuda::walk_header_bytes(n_ranks_) + 2 * half_bytes_; }
  size_t splits_at() const { return peers_at() + n_ranks_ * sizeof(moeccl::cuda::WalkPeer); }
  size_t net_at() const {
    return splits_at() + size_t{moeccl::cuda::kWalkEntries} * n_ranks_ * sizeof(moeccl::cuda::WalkSplit);
  }
  size_t area_at() const { return (net_at() + sizeof(moeccl::cuda::WalkNetState) + 255) / 256 * 256; }
  // A table of pairs, and words where blocks and ways are counted.
  size_t pairs_at() const { return area_at() + message_area_; }
  size_t left_at() const { return pairs_at() + n_ranks_ * sizeof(moeccl::cuda::MessagePair); }
  // Returns the lanes of a launch: the program's, and one for what the network brings.
  uint32_t lanes_of(const moeccl::cuda::WalkArgs& a) const { return a.n_lanes + (proxy_ != nullptr ? 1 : 0); }
  moeccl::cuda::WalkReport& report() const { return *reinterpret_cast<moeccl::cuda::WalkReport*>(pinned_.data()); }

  StreamEngine& engine_;
  Fabric* fabric_ = nullptr;
  uint32_t n_ranks_ = 1, most_blocks_ = 1;
  uint64_t half_bytes_ = 0;
  size_t message_area_ = 0;
  bool graph_mixing_ = true;
  // Header, staging, table of peers, splits, counts of the network's queues, area of messages, its pairs, its count.
  PeerMemory memory_;
  driver::cuda::Memory pinned_;  // report, number of uploads, number of the messages that have ended, programs
  driver::cuda::Memory programs_;
  driver::cuda::StreamOwner upload_stream_, message_stream_;
  uint64_t uploads_ = 0;
  size_t programs_from_ = 0, used_ = 0;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Placed> placed_;  // keyed by the program's bytes
  std::unordered_map<uint64_t, Placed*> known_;  // keyed by Choice::program_hash
  std::shared_ptr<DeviceWatch> watch_;
  driver::cuda::EventOwner event_;  // the end of the last launch
  StreamName last_stream_;          // to which it went
  bool any_launch_ = false;
  driver::cuda::EventOwner replayed_;  // recorded by graphs: the end of the last operation that one has replayed
  // A capture with launches of this kernel.
  struct Capture {
    uint64_t id = 0;                // the driver's; 0: none
    driver::cuda::EventOwner last;  // after its last launch
  };
  // Several captures may be open at the same time. The one that was used last comes first; the driver does not say when
  // one ends, so the last one makes room.
  std::array<Capture, 8> captures_;
  // From the first capture on: a replay may wait for one of another rank of this process.
  std::optional<driver::cuda::Replays> replays_;
  std::atomic<bool> has_captured_{false};
  std::atomic<uint64_t> launched_{0};
  std::atomic<uint32_t> promised_{0};
  std::unique_ptr<KernelProxy> proxy_;
  std::unique_ptr<KernelMessages> messages_;
  std::atomic<uint64_t> messages_launched_{0};

 public:
  ~PersistentKernel();
};

}  // namespace moeccl::exec
