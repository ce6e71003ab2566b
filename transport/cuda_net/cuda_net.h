// SPDX-License-Identifier: Apache-2.0
// Ranks of other hosts for CUDA memory, over any network's links.
//
//   out: the stream copies (or a kernel packs) what is put into a bounce memory, and stores a number into a word when
//        it has; whoever drives the operation polls the word, and only then puts the piece over the network. A signal
//        goes the same way: it is sent when the stream has done all that was started before it.
//   in:  the network puts into the page-locked staging. When a signal is seen, the stream copies what came before it
//        to the same place of the staging on the device, where kernels find it as if a neighbour had put it there.
//
// Where NICs reach the GPU's memory the bounce memory lies there, peers put into the staging on the device, and a
// signal's data only have to be flushed. Puts do not leave from where the program has them: its next kernel may
// overwrite that, and a copy on the device takes a fraction of what the NIC takes.
//
// The device's stream is never waited for but by polling, and never waits for a peer.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/driver/cuda.h"
#include "transport/cuda_net/bounce.h"
#include "transport/transport.h"

namespace moeccl::transport::cuda_net {

class CudaNetLink;

// Drives the network's engine too. One thread at a time, as for links; board_changed() and arrived() any thread.
class CudaNet final : public Engine, public Arrivals {
 public:
  struct Staging {
    driver::cuda::Context context = nullptr;
    driver::cuda::Stream stream = nullptr;  // of this rank; outlives this
    LocalMemory own;                        // page-locked; where the network puts
    uint64_t staging_bytes = 0;             // of it: what lies behind is read where it is
    std::byte* device_staging = nullptr;    // where kernels want it; null: they read it where it is
    uint64_t most_put_bytes = 0;            // of one put
    uint32_t n_ranks = 0;
  };
  static Result<std::unique_ptr<CudaNet>> create(const Staging& setting);
  // For a network that may reach it: takes the bounce memory from the device.
  Result<DeviceMemory> device_memory();
  // How it came, before links are wrapped: the network reaches that memory, or only page-locked memory.
  Status use(bool direct);
  ~CudaNet() override;

  // The network's, before the first operation; its links go through wrap().
  void set_engine(std::unique_ptr<Engine> inner) { inner_ = std::move(inner); }
  std::unique_ptr<Link> wrap(uint32_t rank, std::unique_ptr<Link> link);
  // The stream will store to the board, as the last that it was given so far: peers are told when it has.
  Status tell_board();
  size_t memory_bytes() const { return words_.bytes() + memory_.bytes(); }

  void begin() override { inner_->begin(); }
  void end() override { inner_->end(); }
  void progress(uint32_t awaited = kAnyone) override;
  void board_changed(bool now) override;
  // Other communicators' less urgent puts make way for these; these are handed over at once and wait for nobody.
  void operation(uint32_t traffic_class, bool begins) override { inner_->operation(traffic_class, begins); }
  Result<bool> drained() const override;
  bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override;

 private:
  friend class CudaNetLink;
  struct Range {
    uint64_t offset = 0, bytes = 0;
  };
  explicit CudaNet(const Staging& setting) : s_(setting), arrived_(setting.n_ranks) {}

  // The number that the stream will have stored when it has done what it was given so far.
  uint64_t ticket() {
    unmarked_ = true;
    return marked_ + 1;
  }
  Status mark();  // makes it store the number, where some ticket needs it
  uint64_t passed() const;
  bool idle() const;
  bool failed() const { return s_.own.board->health.state.load(std::memory_order_acquire) != 0; }
  Status copy(std::byte* dst, const std::byte* src, size_t bytes, const char* what);
  Status settle(uint32_t rank, Link& link);
  std::byte* take(size_t bytes);
  void drop();  // of a rank that has failed: nothing more leaves it

  Staging s_;
  driver::cuda::Memory words_;   // page-locked: the stream's number, then what put_words() sends
  driver::cuda::Memory memory_;  // of bounce_
  Bounce host_bounce_, bounce_;
  bool direct_ = false;
  bool unmarked_ = false;
  uint64_t marked_ = 0;
  Status status_;  // the first failure of progress(); stays
  std::vector<CudaNetLink*> links_;
  std::atomic<bool> board_waits_{false};
  uint64_t board_ticket_ = 0;
  std::atomic<bool> tell_now_{false};
  std::mutex mutex_;
  std::vector<std::vector<Range>> arrived_;  // by source, under the lock: not yet copied to the device
  std::vector<Range> taken_;                 // scratch
  std::unique_ptr<Engine> inner_;            // first to be destroyed: it may still send from the bounce memory
};

class CudaNetLink final : public Link, private Rooms, private DeviceSide {
 public:
  CudaNetLink(CudaNet& net, uint32_t rank, std::unique_ptr<Link> link);

  const char* name() const override { return name_.c_str(); }
  // src: what the device reads. Done when the stream has been given the copy.
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Status check_peer() override { return link_->check_peer(); }
  int64_t unacknowledged_ms() override { return link_->unacknowledged_ms(); }

 private:
  friend class CudaNet;
  std::byte* room(size_t bytes) override;
  size_t most() const override { return SIZE_MAX; }  // of any put: see Staging::most_put_bytes
  Result<PutState> put_words(uint64_t offset, const void* src, size_t bytes) override;
  Status settle() override { return net_.settle(rank_, *link_); }
  bool sent_all() const override { return first_ == waiting_.size(); }
  void reclaim();  // rooms whose bytes have left
  // A put, or a signal (src is null), that may go when the stream has stored `ticket`.
  struct Waiting {
    uint64_t ticket = 0;
    uint64_t offset = 0;
    const std::byte* src = nullptr;
    size_t bytes = 0;
    const std::byte* give_back = nullptr;  // room of the bounce memory, after it
    bool words = false;                    // of the host's
    uint32_t sig = 0, number = 0, tag = 0;
  };
  void push(const Waiting& w);
  bool pump(uint64_t passed);  // false: it met an error
  void drop();

  CudaNet& net_;
  uint32_t rank_;
  std::unique_ptr<Link> link_;
  std::string name_;
  std::vector<Waiting> waiting_;  // from first_ on
  size_t first_ = 0;
  // Rooms from which the network still takes, with the number of posted puts that ends it; in order.
  std::deque<std::pair<uint64_t, const std::byte*>> leaving_;
  std::byte* room_ = nullptr;  // given to be packed, not put yet
};

}  // namespace moeccl::transport::cuda_net
