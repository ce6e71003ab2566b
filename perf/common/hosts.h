// SPDX-License-Identifier: Apache-2.0
// Two hosts on one machine: network namespaces joined by a veth pair whose rate tbf limits both ways. EMULATED as a
// network: the hosts share this machine's memory, each has half of its cores. Needs root, ip and tc; each host is gone
// with this process.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace moeccl::perf {

class TwoHosts {
 public:
  // `rate` as tc has it, "1gbit"; null, with the reason, where the machine does not allow it.
  static std::unique_ptr<TwoHosts> create(const std::string& rate, std::string* why);
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // In a child with one thread: it moves to host 0 or 1. On host 0 moecclGetUniqueId then listens where both reach it.
  bool enter(int host) const;

 private:
  TwoHosts() = default;
  pid_t holders_[2] = {0, 0};
};

}  // namespace moeccl::perf
