// SPDX-License-Identifier: Apache-2.0
// Links to ranks on other hosts for CUDA memory, over any network's links.
//
//   out: the stream copies (or a kernel packs) the data of a put into a bounce memory and then stores a number into a
//        word. The thread that drives the operation polls the word, and only then puts the piece over the network. A
//        signal goes the same way: it is sent once the stream has done everything that was started before it.
//   in:  the network puts into the page-locked staging. Once a signal is seen, the stream copies everything that came
//        before it to the same place of the staging on the device, where kernels find it as if a neighbour had put it.
//
// Where NICs can access GPU memory, the bounce memory is GPU memory, peers put into the staging on the device, and a
// signal's data only needs a flush. Puts never leave directly from the program's buffer: its next kernel may overwrite
// that, and a copy on the device takes a fraction of the NIC's time.
//
// The host polls the device's stream but never blocks on it, and the stream never waits for a peer.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "src/driver/cuda.h"
#include "transport/common/arrived_ranges.h"
#include "transport/cuda_net/bounce.h"
#include "transport/transport.h"

namespace moeccl::transport::cuda_net {

class CudaNetLink;

// Also drives the network's engine. One thread at a time, as for links; any thread may call board_changed() and
// arrived().
class CudaNet final : public Engine, public Arrivals {
 public:
  struct Staging {
    driver::cuda::Context context = nullptr;
    driver::cuda::Stream stream = nullptr;  // of this rank; outlives this object
    LocalMemory own;                        // page-locked; the network puts into it
    uint64_t staging_bytes = 0;             // of the staging; what lies behind it is read in place
    std::byte* device_staging = nullptr;    // where kernels read the staging; null: they read it in place
    uint64_t most_put_bytes = 0;            // the size of the largest put
    uint32_t n_ranks = 0;
  };
  static Result<std::unique_ptr<CudaNet>> create(const Staging& setting);
  // For networks that may access device memory: allocates the bounce memory on the device.
  Result<DeviceMemory> device_memory();
  // Called before links are wrapped. direct: the network can access the device memory; else only page-locked memory.
  Status use(bool direct);
  ~CudaNet() override;

  // Sets the network's engine, before the first operation; the network's links go through wrap().
  void set_engine(std::unique_ptr<Engine> inner) { inner_ = std::move(inner); }
  std::unique_ptr<Link> wrap(uint32_t rank, std::unique_ptr<Link> link);
  // The last work given to the stream so far is a store to the board: peers are told once the stream has made it.
  Status tell_board();
  size_t memory_bytes() const override {
    return words_.bytes() + memory_.bytes() + (inner_ != nullptr ? inner_->memory_bytes() : 0);
  }

  void begin() override { inner_->begin(); }
  void end() override { inner_->end(); }
  void progress(uint32_t awaited = kAnyone) override;
  void board_changed(bool now) override;
  // Less urgent puts of other communicators make way for these. These are handed over at once and wait for no others.
  void operation(uint32_t traffic_class, bool begins) override { inner_->operation(traffic_class, begins); }
  Result<bool> drained() const override;
  bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override;

 private:
  friend class CudaNetLink;
  explicit CudaNet(const Staging& setting) : s_(setting), arrived_(setting.n_ranks) {}

  // Returns the number that the stream will have stored once it has done all its work so far.
  uint64_t ticket() {
    unmarked_ = true;
    return marked_ + 1;
  }
  Status mark();  // makes the stream store the number, if some ticket needs it
  uint64_t passed() const;
  bool idle() const { return !board_waits_ && waiting_.empty(); }
  bool failed() const { return s_.own.board->health.state.load(std::memory_order_acquire) != 0; }
  Status copy(std::byte* dst, const std::byte* src, size_t bytes, const char* what);
  Status settle(uint32_t rank, Link& link);
  std::byte* take(size_t bytes);
  void drop();  // after a failure of this rank: nothing more leaves it

  Staging s_;
  driver::cuda::Memory words_;   // page-locked: the stream's number, then what put_words() sends
  driver::cuda::Memory memory_;  // behind bounce_
  Bounce host_bounce_, bounce_;
  bool direct_ = false;
  bool unmarked_ = false;
  uint64_t marked_ = 0;
  Status status_;  // the first failure of progress(); stays
  std::vector<CudaNetLink*> links_;
  std::vector<CudaNetLink*> waiting_;  // those with something that waits for the stream, each once
  std::vector<CudaNetLink*> leaving_;  // those with rooms that the network still reads, each once
  std::atomic<bool> board_waits_{false};
  uint64_t board_ticket_ = 0;
  std::atomic<bool> tell_now_{false};
  ArrivedRanges arrived_;          // to be copied to the device
  std::unique_ptr<Engine> inner_;  // destroyed first, because it may still send from the bounce memory
};

class CudaNetLink final : public Link, private Rooms, private DeviceSide {
 public:
  CudaNetLink(CudaNet& net, uint32_t rank, std::unique_ptr<Link> link);

  const char* name() const override { return name_.c_str(); }
  // `src` is read by the device. The put is done once the stream has been given the copy.
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Status check_peer() override { return link_->check_peer(); }
  int64_t unacknowledged_ms() override { return link_->unacknowledged_ms(); }
  std::string why_silent() override { return link_->why_silent(); }

 private:
  friend class CudaNet;
  std::byte* room(size_t bytes) override;
  size_t most() const override { return SIZE_MAX; }  // any put fits: see Staging::most_put_bytes
  Result<PutState> put_words(uint64_t offset, const void* src, size_t bytes) override;
  Status settle() override { return net_.settle(rank_, *link_); }
  bool sent_all() const override { return first_ == waiting_.size(); }
  bool reclaim();  // gives back rooms whose bytes have left; true: all have
  // A put, or a signal (src is null), that may be sent once the stream has stored `ticket`.
  struct Waiting {
    uint64_t ticket = 0;
    uint64_t offset = 0;
    const std::byte* src = nullptr;
    size_t bytes = 0;
    const std::byte* give_back = nullptr;  // the room in the bounce memory to give back afterwards
    bool words = false;                    // the room is in host_bounce_
    uint32_t sig = 0, number = 0, tag = 0;
  };
  void push(const Waiting& w);
  bool pump(uint64_t passed);  // false: an error occurred
  void drop();

  CudaNet& net_;
  uint32_t rank_;
  std::unique_ptr<Link> link_;
  std::string name_;
  std::vector<Waiting> waiting_;  // from first_ on
  size_t first_ = 0;
  // Rooms that the network still reads, each with the count of posted puts after which it no longer does; in order.
  std::deque<std::pair<uint64_t, const std::byte*>> leaving_;
  std::byte* room_ = nullptr;  // handed out for packing, not put yet
};

}  // namespace moeccl::transport::cuda_net
