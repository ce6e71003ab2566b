// SPDX-License-Identifier: Apache-2.0
// Connects this rank to all ranks on other hosts. In each pair the higher rank connects and the lower one accepts. Both
// prove that they hold the communicator's key before anything else is believed. All ranks do this at the same time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "src/base/clock.h"
#include "src/base/env.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/socket.h"
#include "transport/common/rails.h"
#include "transport/tcp/tcp_link.h"

namespace moeccl::transport::tcp {

struct MeshOptions {
  uint32_t rank = 0, n_ranks = 1;
  bootstrap::Key key = {};
  int64_t lost_after_ms = 0;      // see driver::set_lost_after()
  int32_t streams_per_rail = 0;   // MOECCL_SOCKET_STREAMS
  std::string congestion;         // MOECCL_SOCKET_CONGESTION
  PortRange ports;                // MOECCL_PORT_RANGE
  std::vector<bool> one_machine;  // [n_ranks] or empty: peers with this rank's addresses, see choose_rails()
  Cipher cipher = Cipher::kNone;  // for the data: the best that this rank has; kNone: not encrypted
  driver::Watch watch;            // see NetworkOptions
  Deadline deadline;
};

// Prepares a data connection before its first byte.
Status prepare(int fd, const MeshOptions& options);

class Mesh {
 public:
  // Listens on a free port of each address. The result of nics() must reach all peers before connect().
  static Result<std::unique_ptr<Mesh>> listen(const MeshOptions& options, std::vector<Nic> nics);
  std::span<const Nic> nics() const { return nics_; }
  // peers: what each rank on another host offers. Errors name the missing ranks.
  Result<std::vector<TcpPeer>> connect(const std::map<uint32_t, std::vector<Nic>>& peers);

 private:
  explicit Mesh(const MeshOptions& options) : options_(options) {}
  Result<TcpPeer> connect_to(uint32_t peer, std::span<const Nic> nics);
  Status prepare_listener(int fd);
  void choose_congestion(const TcpPeer& peer) const;
  struct Way {
    driver::SocketAddress from, to;
    int64_t mbit_per_s = 0;
    Deadline until;     // of connecting
    Deadline answered;  // of the handshake
  };
  struct Knocked {
    Way way;
    Fd fd;
    bootstrap::SessionKeys keys;
    Cipher cipher = Cipher::kNone;
  };
  void say_if_missed(uint32_t peer, std::span<const Nic> nics, std::span<const Rail> rails);
  Result<Knocked> knock(uint32_t peer, const Way& way, bool* reached) const;
  Status shake_hands(uint32_t peer, Knocked* k) const;
  Status greet(uint32_t peer, Knocked* k, const StreamGreeting& greeting) const;

  MeshOptions options_;
  std::vector<Nic> nics_;
  std::vector<Fd> listeners_;
  std::string congestion_;         // for new connections; empty: the system's
  std::string system_congestion_;  // empty: not known
  // By own interface: addresses that did not answer it, although there is another way to their hosts.
  std::map<uint32_t, std::set<std::string>> silent_;
  std::set<uint32_t> missed_;  // own interfaces for which say_if_missed() has warned
};

}  // namespace moeccl::transport::tcp
