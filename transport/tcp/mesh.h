// SPDX-License-Identifier: Apache-2.0
// Connects this rank to all ranks on other hosts. Of each pair the higher rank connects and the lower one accepts; both
// prove that they hold the communicator's key before anything else is believed. All ranks do this at the same time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "src/base/clock.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/unique_id.h"
#include "transport/common/rails.h"
#include "transport/tcp/tcp_link.h"

namespace moeccl::transport::tcp {

struct MeshOptions {
  uint32_t rank = 0, n_ranks = 1;
  bootstrap::Key key = {};
  int64_t lost_after_ms = 0;      // see driver::set_lost_after()
  int32_t streams_per_rail = 0;   // MOECCL_SOCKET_STREAMS
  std::string congestion;         // MOECCL_SOCKET_CONGESTION
  bool one_machine = false;       // MOECCL_HOST_ID: see choose_rails()
  Cipher cipher = Cipher::kNone;  // of the data: the best that this rank has; kNone: not encrypted
  // Readable when the group cannot come about any more, so that nobody waits for ranks that will not come; -1: none.
  int news = -1;
  Deadline deadline;
};

// Of a connection for data, before its first byte.
Status prepare(int fd, const MeshOptions& options);

class Mesh {
 public:
  // Listens at a free port of each interface. What nics() says must reach all peers before connect().
  static Result<std::unique_ptr<Mesh>> listen(const MeshOptions& options, std::vector<Nic> nics);
  std::span<const Nic> nics() const { return nics_; }
  // peers: what each rank on another host offers. Errors name the ranks that are missing.
  Result<std::vector<TcpPeer>> connect(const std::map<uint32_t, std::vector<Nic>>& peers);

 private:
  Mesh(const MeshOptions& options, std::vector<Nic> nics) : options_(options), nics_(std::move(nics)) {}
  Result<TcpPeer> connect_to(uint32_t peer, std::span<const Nic> nics) const;
  Status prepare_listener(int fd);
  void choose_congestion(const TcpPeer& peer) const;
  struct Way {
    driver::SocketAddress from, to;
    int64_t mbit_per_s = 0;
    Deadline until;  // of connecting
  };
  struct Knocked {
    Way way;
    Fd fd;
    bootstrap::SessionKeys keys;
    Cipher cipher = Cipher::kNone;
  };
  bool has_news() const;
  Result<Knocked> knock(uint32_t peer, const Way& way) const;
  Status shake_hands(uint32_t peer, Knocked* k) const;
  Status greet(uint32_t peer, Knocked* k, const StreamGreeting& greeting) const;

  MeshOptions options_;
  std::vector<Nic> nics_;
  std::vector<Fd> listeners_;
  std::string congestion_;         // of new connections; empty: the system's
  std::string system_congestion_;  // empty: not known
};

}  // namespace moeccl::transport::tcp
