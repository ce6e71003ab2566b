// SPDX-License-Identifier: Apache-2.0
// Which ranks share a host, and the rendezvous of those that do.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::comm {

struct HostOfRank {
  uint64_t identity = 0;  // equal where ranks can share memory
  std::string name;       // for messages
};

// Hosts are numbered in order of their first rank.
struct Hosts {
  std::vector<uint32_t> host_of;               // [n_ranks]
  std::vector<std::vector<uint32_t>> members;  // [hosts] ranks, ascending
  std::vector<uint32_t> index_of;              // [n_ranks] position among the host's members
  std::vector<uint64_t> identity;              // [hosts]
  std::vector<std::string> names;              // [hosts]

  // all: [n_ranks].
  explicit Hosts(std::span<const HostOfRank> all);
  uint32_t n() const { return static_cast<uint32_t>(members.size()); }
  bool together(uint32_t a, uint32_t b) const { return host_of[a] == host_of[b]; }
  const std::vector<uint32_t>& around(uint32_t rank) const { return members[host_of[rank]]; }
  // For the flight recorder; empty: all ranks are on one host.
  std::string json() const;
};

// File descriptors travel over UNIX sockets only. Where the ranks meet on TCP, those of each host meet once more among
// themselves; their key derives from the communicator's and is never sent.
class HostSession {
 public:
  // All ranks of `session` call it together. The session must outlive this one.
  static Result<std::unique_ptr<HostSession>> join(bootstrap::Session& session, const Hosts& hosts,
                                                   const bootstrap::Key& key, Deadline deadline);
  // As Session::all_gather_fds, but among the ranks of this host: sets and results are by rank of the communicator.
  Result<std::vector<std::vector<Fd>>> all_gather_fds(std::span<const int> mine, const bootstrap::RankSet& wanted_by,
                                                      Deadline deadline);
  // SO_PEERCRED's process of a rank of this host, in the meeting point's pid namespace; 0: not known.
  int32_t pid_of(uint32_t rank) const;
  void close();

 private:
  Status failure(Status why) const;

  HostSession(bootstrap::Session& all, const Hosts& hosts) : all_(all), hosts_(hosts) {}

  bootstrap::Session& all_;
  const Hosts& hosts_;
  std::unique_ptr<bootstrap::Root> root_;      // on the host's first rank
  std::unique_ptr<bootstrap::Session> local_;  // null: all_ serves, or the rank is alone on its host
};

}  // namespace moeccl::comm
