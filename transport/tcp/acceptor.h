// SPDX-License-Identifier: Apache-2.0
// The accepting side of the mesh. It takes connections of several ranks at once, and lets no stranger hold up the
// others.
#pragma once

#include <atomic>
#include <map>
#include <span>
#include <vector>

#include "src/bootstrap/lobby.h"
#include "transport/tcp/mesh.h"

namespace moeccl::transport::tcp {

class Acceptor {
 public:
  // expected: the ranks that will connect here.
  Acceptor(const MeshOptions& options, std::span<const Fd> listeners, std::vector<uint32_t> expected);
  ~Acceptor();
  // Runs until all have come, the deadline passes (Timeout, naming the missing ranks), `stop` is set or the options'
  // watch ends it.
  Status run(const std::atomic<bool>& stop);
  std::vector<TcpPeer> take();

 private:
  struct Pending;
  struct Coming {
    std::vector<Fd> fds;  // [n_streams], by number
    std::vector<double> weights;
    std::vector<RecordKeys> keys;
    size_t n_there = 0;
    std::string where;
  };
  Status accept_some(int listener);
  void drop(bootstrap::Lobby::Id id);
  bool make_room();
  // Both return false if the connection is to be dropped.
  bool step(bootstrap::Lobby::Id id, Pending& p);
  bool answer(bootstrap::Lobby::Id id, Pending& p);
  void keep(Pending& p);
  bool complete() const;
  std::string places() const;  // where it listens

  MeshOptions options_;
  std::span<const Fd> listeners_;
  std::map<uint32_t, Coming> coming_;
  bootstrap::Lobby lobby_;
  bootstrap::Lobby::Id next_id_ = 1;
  std::map<bootstrap::Lobby::Id, std::unique_ptr<Pending>> pending_;
  bool pause_ = false;  // accept nothing before the next poll
};

}  // namespace moeccl::transport::tcp
