// The accepting side of the mesh: takes connections of several ranks at once and lets no stranger hold up the others.
#pragma once

#include <atomic>
#include <map>
#include <span>
#include <vector>

#include "transport/tcp/mesh.h"

namespace moeccl::transport::tcp {

class Acceptor {
 public:
  // expected: the ranks that will connect here.
  Acceptor(const MeshOptions& options, std::span<const Fd> listeners, std::vector<uint32_t> expected);
  ~Acceptor();
  // Until all have come, the deadline passes (Timeout, naming the missing ranks) or `stop` is set.
  Status run(const std::atomic<bool>& stop);
  std::vector<TcpPeer> take();

 private:
  struct Pending;
  struct Coming {
    std::vector<Fd> fds;  // [n_streams], by number
    std::vector<double> weights;
    size_t n_there = 0;
    std::string where;
  };
  Status accept_all(int listener);
  // False: drop it.
  bool step(Pending& p);
  bool answer(Pending& p);
  void keep(Pending& p);
  bool complete() const;

  MeshOptions options_;
  std::span<const Fd> listeners_;
  std::map<uint32_t, Coming> coming_;
  std::vector<std::unique_ptr<Pending>> pending_;
};

}  // namespace moeccl::transport::tcp
