// SPDX-License-Identifier: Apache-2.0
// Two hosts on one machine: network namespaces joined by a veth pair, whose rate tbf limits in both directions. The
// network is EMULATED: the hosts share this machine's memory, and each has half of its cores. Needs root, ip and tc.
// The hosts end with this process.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace moeccl::perf {

class TwoHosts {
 public:
  // `rate` is in tc's notation, such as "1gbit". Returns null, with the reason, where the machine does not allow it.
  static std::unique_ptr<TwoHosts> create(const std::string& rate, std::string* why);
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // Moves the calling process, a child with one thread, to host 0 or 1. On host 0, moecclGetUniqueId then listens on an
  // address that both hosts reach.
  bool enter(int host) const;

 private:
  TwoHosts() = default;
  pid_t holders_[2] = {0, 0};
};

}  // namespace moeccl::perf
