// SPDX-License-Identifier: Apache-2.0
// Finds the ranks that share a host, and lets them meet.
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
  uint64_t identity = 0;  // equal for ranks that can share memory
  std::string name;       // for messages
  uint64_t network = 0;   // equal for ranks that have the same interfaces; 0: not known
};

// Hosts are numbered in order of their first rank.
struct Hosts {
  std::vector<uint32_t> host_of;               // [n_ranks]
  std::vector<std::vector<uint32_t>> members;  // [hosts] ranks, ascending
  std::vector<uint32_t> index_of;              // [n_ranks] position among the host's members
  std::vector<uint64_t> identity;              // [hosts]
  std::vector<std::string> names;              // [hosts]
  std::vector<uint64_t> network;               // [hosts]
  // [hosts] By how much each host's clock is ahead of the first one's, to within the time that a message takes; below 1
  // s it is 0. Empty until compare_clocks().
  std::vector<int64_t> clock_ahead_ms;

  // `all` is [n_ranks].
  explicit Hosts(std::span<const HostOfRank> all);
  uint32_t n() const { return static_cast<uint32_t>(members.size()); }
  bool together(uint32_t a, uint32_t b) const { return host_of[a] == host_of[b]; }
  // Two hosts may have one network: containers that share it, or names given by MOECCL_HOST_ID.
  bool share_network(uint32_t a, uint32_t b) const {
    return network[host_of[a]] != 0 && network[host_of[a]] == network[host_of[b]];
  }
  const std::vector<uint32_t>& around(uint32_t rank) const { return members[host_of[rank]]; }
  // met_ns: each rank's unix_ns() when one barrier had ended there. Delays only add, so a host's earliest counts.
  void compare_clocks(std::span<const int64_t> met_ns);
  // Describes the hosts for the flight recorder; empty if all ranks are on one host.
  std::string json() const;
};

// The session of the ranks of one host. File descriptors can be sent only over UNIX sockets, so where all ranks meet
// over TCP, those of each host meet once more among themselves. Their key is derived from the communicator's and never
// sent.
class HostSession {
 public:
  // Collective call of all ranks of `session`, which must outlive this object, as must `hosts`.
  static Result<std::unique_ptr<HostSession>> join(bootstrap::Session& session, const Hosts& hosts,
                                                   const bootstrap::Key& key, Deadline deadline);
  // Like Session::all_gather_fds, but among the ranks of this host. Sets and results are indexed by communicator rank.
  Result<std::vector<std::vector<Fd>>> all_gather_fds(std::span<const int> mine, const bootstrap::RankSet& wanted_by,
                                                      Deadline deadline);
  // Returns the process of a rank of this host from SO_PEERCRED, in the meeting point's pid namespace, or 0 if unknown.
  int32_t pid_of(uint32_t rank) const;
  void close();

 private:
  Status failure(Status why) const;

  HostSession(bootstrap::Session& all, const Hosts& hosts) : all_(all), hosts_(hosts) {}

  bootstrap::Session& all_;
  const Hosts& hosts_;
  std::unique_ptr<bootstrap::Root> root_;      // on the host's first rank
  std::unique_ptr<bootstrap::Session> local_;  // null if all_ is used, or if the rank is alone on its host
};

}  // namespace moeccl::comm
