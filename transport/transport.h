// SPDX-License-Identifier: Apache-2.0
// The transport contract. words.h has what ranks show each other in memory, link.h one rank's end of a link to one
// peer, and engine.h what moves the bytes. This header says what a transport is and how a rank connects to ranks on
// other hosts.
//
// A new network needs a folder and one line of networks.cc; link_contract_test then covers it (docs/contributing.md).
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
#include "src/driver/socket.h"
#include "transport/engine.h"
#include "transport/link.h"
#include "transport/words.h"

namespace moeccl::driver::cuda {
struct OpaqueContext;  // cuda.h
}

namespace moeccl::transport {

// What a transport can do beyond puts and signals.
struct Capabilities {
  bool ordered = true;     // the wire keeps the posting order; without it a signal waits until what it covers has come
  bool views = false;      // Link::view(): loads and stores access the peer's memory
  bool reads = false;      // Link::reads(), where the system allows it
  bool one_sided = false;  // bytes land without the receiver's CPU: see Link::one_sided()
  bool device_memory = false;  // Endpoint::register_device(), where the system allows it
  bool needs_pump = false;     // an Engine must be driven while something is under way
  bool encrypts = false;       // with NetworkOptions::encrypt; the other networks are not opened then
};

// Returns what is set, in words: "keeps the order of puts, may reach CUDA memory".
std::string text_of(const Capabilities& capabilities);

// What a transport finds on this host, for doctor, explain and the choice of a network.
struct Probe {
  bool usable = false;
  std::string found;    // "mlx5_0 port 1: RoCE v2, 100 Gbit/s"
  std::string why_not;  // and the remedy
};

// Memory besides its staging from which this rank puts, for networks that must know memory before they carry it.
struct Region {
  std::byte* base = nullptr;
  size_t bytes = 0;
  // Changes (release) when pages of the region went away or were replaced, before their addresses refer to other
  // memory: what was registered before holds pages that are not the program's any more. Null: that never happens.
  const std::atomic<uint64_t>* generation = nullptr;
};

// Memory of this rank's GPU, for a network whose NICs access it themselves. Each part begins on a page, and the rest of
// its last page belongs to it.
struct DeviceMemory {
  driver::cuda::OpaqueContext* context = nullptr;  // null: there is none
  std::span<std::byte> landing;  // what peers put to the first bytes of the staging lands here instead
  std::span<std::byte> source;   // puts are made from here
  std::string why_none = {};     // if there is none
};

struct NetworkOptions {
  uint32_t rank = 0;
  std::vector<uint32_t> host_of;  // [n_ranks]; links go to the ranks of other hosts
  bootstrap::Key key = {};        // peers prove that they hold it
  int64_t timeout_ms = 0;         // of the communicator's operations
  uint64_t memory_bytes = 0;      // of the staging that peers put to
  bool wants_arrivals = false;    // LocalMemory::arrivals may be set
  // Ends connecting before its deadline: the descriptor once the group can no longer come about, so that no rank waits
  // for ranks that will not come, and `cancelled` once this rank gives up.
  driver::Watch watch;
  Deadline deadline;     // of connecting
  bool encrypt = false;  // no data goes over the network in the clear
  // [n_ranks] or empty: ranks whose "hosts" share this machine's addresses (containers, MOECCL_HOST_ID)
  std::vector<bool> same_network;
  std::string met_at;  // an address of this host that others have reached: "10.0.0.1"; empty: not known
  std::string plugin;  // an NCCL net plugin: the name that MOECCL_NET gives; empty: any
  // Returns which of this host's devices the rank uses where the user does not say, nearest first, as positions in its
  // argument. An empty function or result means all.
  std::function<std::vector<uint32_t>(std::span<const std::string> devices)> nearest;

  uint32_t n_ranks() const { return static_cast<uint32_t>(host_of.size()); }
  bool remote(uint32_t r) const { return host_of[r] != host_of[rank]; }
};

// Connections of one rank to all ranks on other hosts.
struct NetworkLinks {
  std::vector<std::unique_ptr<Link>> links;  // [n_ranks], null for ranks of this host
  std::unique_ptr<Engine> engine;            // declared after the links, so that it is destroyed before them
  // The slowest host's uplink until it is measured, as far as this rank knows: the smallest of all ranks counts. 0
  // bytes_per_ns: it does not know.
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
  // Called before offer(): lets NICs read and write this memory and returns how ("dma-buf"). Unsupported says why they
  // cannot; puts then land in the staging that register_memory() was given.
  virtual Result<std::string> register_device(const DeviceMemory& memory) {
    (void)memory;
    return error(moecclUnsupported, "this network reaches host memory only");
  }
  // Takes that back, because some rank's NICs cannot access its device memory.
  virtual void forget_device() {}
  // Returns what all ranks must know of this one before they connect.
  virtual Result<std::vector<std::byte>> offer() = 0;
  // Returns what each rank alone must know, [n_ranks]; or nothing, on all ranks, for networks that have no such parts.
  virtual std::vector<std::vector<std::byte>> rows() { return {}; }
  // offers: those of all ranks, [n_ranks], each followed by its row for this rank; their contents are checked. `own`
  // and `regions` must stay where they are until the links and the engine are gone. All ranks call this together, and
  // meet once more before the first put.
  virtual Result<NetworkLinks> connect(const LocalMemory& own, std::span<const Region> regions,
                                       std::span<const std::vector<std::byte>> offers) = 0;
};

// A row of the list from which src/world chooses a network.
struct Network {
  const char* name;  // as MOECCL_NET names it
  Capabilities can;
  // Never fails: a fault is a reason not to use the network.
  Probe (*probe)();
  Result<std::unique_ptr<Endpoint>> (*open)(const NetworkOptions& options);
  // Returns why the network is not opened although it may be there; empty: it is opened.
  std::string refused(bool encrypt) const {
    return encrypt && !can.encrypts ? "it cannot encrypt, as MOECCL_ENCRYPT wants" : "";
  }
};

// Best first. The last one works wherever there is an IP network.
std::span<const Network> networks();
// Returns null when there is no such name.
const Network* find_network(std::string_view name);

}  // namespace moeccl::transport
