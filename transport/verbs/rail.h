// SPDX-License-Identifier: Apache-2.0
// One open port of an RDMA device: what all links of a rank share on it. Its name, its address and what is wrong with
// it are reported here, so that every error says which NIC it means.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/base/env.h"
#include "src/driver/ibv_api.h"
#include "transport/verbs/gid.h"

namespace moeccl::transport::verbs {

struct RailInfo {
  std::string device;
  uint8_t port = 1;
  bool ethernet = false;
  bool needs_route = false;  // needs a global route header: RoCE, and some InfiniBand
  GidChoice gid;
  uint16_t lid = 0;
  uint8_t mtu_code = 3;  // 1: 256 bytes, 2: 512, ... 5: 4096
  double gbit = 0;       // 0: not known
  bool dmabuf = false;   // its driver takes dma-buf

  std::string name() const { return format("{}:{}", device, port); }
};

// A port as found in the list of devices.
struct FoundRail {
  driver::ibv_abi::Device* device = nullptr;
  RailInfo info;
  std::string problem;  // why it cannot be used; "": it can
};

// Returns whether MOECCL_IB_HCA (`hca`) names the port, or is empty.
bool admits(const std::string& hca, const std::string& device, uint32_t port);

// Returns success, or why the library or the kernel cannot register a dma-buf.
Status takes_dmabuf(const driver::IbvApi& api, driver::ibv_abi::ProtectionDomain* pd);

// The device list of libibverbs. Devices that were opened from it stay usable without it.
class DeviceList {
 public:
  static Result<DeviceList> get(const driver::IbvApi& api);
  DeviceList(DeviceList&& other) noexcept
      : api_(other.api_), list_(std::exchange(other.list_, nullptr)), n_(other.n_) {}
  DeviceList& operator=(DeviceList&&) = delete;
  ~DeviceList();
  // Returns every port that the settings admit, with what is wrong with it. InvalidArgument for a filter that leaves
  // none.
  Result<std::vector<FoundRail>> look(const Env& settings) const;

 private:
  DeviceList(const driver::IbvApi& api, driver::ibv_abi::Device** list, int n) : api_(&api), list_(list), n_(n) {}
  void look_at(driver::ibv_abi::Device* device, const Env& settings, std::vector<FoundRail>* out) const;

  const driver::IbvApi* api_;
  driver::ibv_abi::Device** list_;
  int n_;
};

// Chooses the ports to use: usable, of one link layer (that of the highest rate), and none slower than a quarter of the
// fastest, in the order of their names. Unsupported says what is wrong with each.
Result<std::vector<FoundRail>> usable_rails(std::vector<FoundRail> found);

class Rail {
 public:
  // `api` must outlive the rail.
  static Result<std::unique_ptr<Rail>> open(const driver::IbvApi& api, const FoundRail& found);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // Makes room for the completions of this many requests under way at a time, as far as the device allows.
  Status make_queue(uint32_t entries);
  uint32_t queue_entries() const { return cq_ == nullptr ? 0 : static_cast<uint32_t>(cq_->cqe); }
  int poll(std::span<driver::ibv_abi::Completion> out) {
    return context_->ops.poll_cq(cq_, static_cast<int>(out.size()), out.data());
  }

  const driver::IbvApi& api() const { return *api_; }
  const RailInfo& info() const { return info_; }
  uint32_t max_message_bytes() const { return max_message_bytes_; }
  uint32_t max_requests() const { return max_requests_; }
  driver::ibv_abi::ProtectionDomain* pd() const { return pd_; }
  driver::ibv_abi::CompletionQueue* queue() const { return cq_; }
  driver::ibv_abi::Context* context() const { return context_; }

  // Readable when take_events() has something to take.
  int event_fd() const { return context_->async_fd; }
  // Takes the events that are waiting, but does not wait for any.
  void take_events(int64_t now_ns);
  // Returns success, or why nothing will arrive over this rail any more. A port that is down for less than kPortGraceMs
  // may come back: its queue pairs then resend what was lost.
  Status health(int64_t now_ns) const;
  // "its port went down 1200 ms ago", for errors; "" when all is well.
  std::string trouble(int64_t now_ns) const;
  // The same with the events that wait.
  std::string known_trouble(int64_t now_ns);
  // What the device says of its port when it is asked, which may take long; "" when all is well. Any thread.
  std::string port_trouble() const;

 private:
  Rail(const driver::IbvApi& api, RailInfo info) : api_(&api), info_(std::move(info)) {}

  const driver::IbvApi* api_;
  RailInfo info_;
  driver::ibv_abi::Context* context_ = nullptr;
  driver::ibv_abi::ProtectionDomain* pd_ = nullptr;
  driver::ibv_abi::CompletionQueue* cq_ = nullptr;
  uint32_t max_message_bytes_ = 0, max_requests_ = 0, max_entries_ = 0;
  int64_t down_since_ns_ = 0;
  std::string fatal_;  // "" while none
};

inline constexpr int64_t kPortGraceMs = 2000;

// Called when a device was opened and when queues were made. The kernel keeps the queue pairs of a process that has
// ended, and answers its peers, as long as a child has the device open or parts of it mapped. No child could use them
// (ibv_fork_init(3)).
void keep_queues_from_children();

}  // namespace moeccl::transport::verbs
