// SPDX-License-Identifier: Apache-2.0
// The transport contract. words.h: what ranks show each other in memory. link.h: one rank's end towards one peer.
// engine.h: what moves bytes. Here: what a transport is, and how a rank connects to ranks on other hosts.
//
// A new network is a folder and one line of networks.cc; link_contract_test then runs on it (docs/contributing.md).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"
#include "transport/engine.h"
#include "transport/link.h"
#include "transport/words.h"

namespace moeccl::driver::cuda {
struct OpaqueContext;  // cuda.h
}

namespace moeccl::transport {

// What a transport can do beyond puts and signals.
struct Capabilities {
  bool ordered = true;     // the wire keeps the order of posting; without it a signal waits until what it covers came
  bool views = false;      // Link::view(): loads and stores reach the peer's memory
  bool reads = false;      // Link::reads(), where the system allows it
  bool one_sided = false;  // bytes land without the receiver's CPU: see Link::one_sided()
  bool inline_words = false;   // a signal costs no more than its words: nothing is registered or copied for it
  bool device_memory = false;  // Endpoint::register_device(), where the system allows it
  bool needs_pump = false;     // an Engine must be driven while something is under way
  bool encrypts = false;       // with NetworkOptions::encrypt; the others are not opened then
};

// What a transport finds on this host. For doctor, explain and the choice.
struct Probe {
  bool usable = false;
  std::string found;    // "mlx5_0 port 1: RoCE v2, 100 Gbit/s"
  std::string why_not;  // and the remedy
};

// What this rank puts from beside its staging, where a network must know memory before it carries it.
struct Region {
  std::byte* base = nullptr;
  size_t bytes = 0;
  // Changes (release) when pages of it went away or were replaced, before their addresses mean other memory: what was
  // registered before that holds pages that are not the program's any more. Null: none ever does.
  const std::atomic<uint64_t>* generation = nullptr;
};

// Memory of this rank's GPU, for a network whose NICs reach it themselves. Each begins a page, and the rest of its last
// page belongs to it.
struct DeviceMemory {
  driver::cuda::OpaqueContext* context = nullptr;  // null: there is none
  std::span<std::byte> landing;  // what peers put to the first bytes of the staging lands here instead
  std::span<std::byte> source;   // puts are made from here
};

struct NetworkOptions {
  uint32_t rank = 0;
  std::vector<uint32_t> host_of;  // [n_ranks]; links go to the ranks of other hosts
  bootstrap::Key key = {};        // peers prove that they hold it
  int64_t timeout_ms = 0;         // of the communicator's operations
  // Readable when the group cannot come about any more, so that nobody waits for ranks that will not come; -1: none.
  int news = -1;
  Deadline deadline;         // of connecting
  bool encrypt = false;      // nothing of the data goes over the network as it is
  bool one_machine = false;  // MOECCL_HOST_ID: the "hosts" are network namespaces, or nothing at all, of one machine
  std::string plugin;        // of NCCL's: the name that MOECCL_NET gives; empty: any
  // Which of this host's devices the rank uses where the user does not say, nearest first: positions in what it is
  // given. Empty: all.
  std::function<std::vector<uint32_t>(std::span<const std::string> devices)> nearest;

  uint32_t n_ranks() const { return static_cast<uint32_t>(host_of.size()); }
  bool remote(uint32_t r) const { return host_of[r] != host_of[rank]; }
};

// Connections of one rank to all ranks on other hosts.
struct NetworkLinks {
  std::vector<std::unique_ptr<Link>> links;  // [n_ranks], null for ranks of this host
  std::unique_ptr<Engine> engine;            // behind the links, so that it ends before them
  // The slowest host's uplink until somebody measures it, the same on all ranks.
  double alpha_ns = 0, bytes_per_ns = 0;
};

// One rank's end of a network before it is connected: devices are open, or sockets listen.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // The first call, for networks whose peers must be told what they may write to before they connect.
  virtual Status register_memory(const LocalMemory& own, std::span<const Region> regions) {
    (void)own, (void)regions;
    return {};
  }
  // Before offer(): NICs read and write this memory; tells how ("dma-buf"). Unsupported says why they do not: then puts
  // land in the staging that register_memory() had.
  virtual Result<std::string> register_device(const DeviceMemory& memory) {
    (void)memory;
    return error(moecclUnsupported, "this network reaches host memory only");
  }
  // Takes that back: some rank's NICs do not.
  virtual void forget_device() {}
  // What all ranks must hear of this one before they connect. It may hold a row for each peer.
  virtual Result<std::vector<std::byte>> offer() = 0;
  // offers: of all ranks, [n_ranks]; their contents are checked. `own` and `regions` stay where they are until the
  // links and the engine are gone. All ranks call it together, and meet once more before the first put.
  virtual Result<NetworkLinks> connect(const LocalMemory& own, std::span<const Region> regions,
                                       std::span<const std::vector<std::byte>> offers) = 0;
};

// A row of the list from which the world chooses.
struct Network {
  const char* name;  // as MOECCL_NET names it
  Capabilities can;
  // Never fails: what is broken is a reason not to use it.
  Probe (*probe)();
  Result<std::unique_ptr<Endpoint>> (*open)(const NetworkOptions& options);
  // Why it is not opened although it may be there; empty: it is.
  std::string refused(bool encrypt) const {
    return encrypt && !can.encrypts ? "it cannot encrypt, as MOECCL_ENCRYPT wants" : "";
  }
};

// Best first. The last one works wherever there is an IP network.
std::span<const Network> networks();
// Null when there is no such name.
const Network* find_network(std::string_view name);

}  // namespace moeccl::transport
