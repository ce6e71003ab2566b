// SPDX-License-Identifier: Apache-2.0
#include "src/driver/interface.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

namespace moeccl::driver {
namespace {

// Runs commands and then `body` in a network of their own. Returns 2 where the system does not allow that, else what
// `body` returns.
int in_own_network(const char* commands, int (*body)()) {
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNET) != 0 || std::system(commands) != 0) _exit(2);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Interfaces, NameTheWireThatTheyShare) {
  const int result = in_own_network(
      "exec 2>/dev/null; ip link add w0 type veth peer name w1 && ip link add link w0 name m0 type macvlan && "
      "ip link add link m0 name n0 type macvlan && "
      "ip addr add 10.5.0.1/24 dev w0 && ip addr add 10.5.0.2/24 dev w0 label w0:7 && ip addr add 10.6.0.1/24 dev w1 "
      "&& "
      "ip addr add 10.7.0.1/24 dev m0 && ip addr add 10.8.0.1/24 dev n0 && "
      "for i in w0 w1 m0 n0; do ip link set $i up || exit 1; done",
      [] {
        std::map<std::string, std::string> wires;
        // A link that has been set up runs only when the kernel has noticed its carrier.
        for (int tries = 0; tries < 500 && wires.size() < 5; ++tries) {
          if (tries > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          const auto all = interfaces();
          if (!all.ok()) return 3;
          for (const Interface& i : *all)
            if (!i.loopback && i.address.host_bytes().size() == 4) wires[i.name] = i.wire;
        }
        const std::map<std::string, std::string> expected = {
            {"w0", ""}, {"w0:7", "w0"}, {"w1", ""}, {"m0", "w0"}, {"n0", "w0"}};
        if (wires == expected) return 0;
        for (const auto& [name, wire] : wires) fprintf(stderr, "%s is on \"%s\"\n", name.c_str(), wire.c_str());
        return 4;
      });
  if (result == 2) GTEST_SKIP() << "no own network can be made here";
  EXPECT_EQ(result, 0);
}

TEST(Interfaces, OfOneNetworkLeaveByTheFirstUnlessRulesSayOtherwise) {
  const int result = in_own_network(
      "exec 2>/dev/null; for i in 1 2; do ip link add d$i type veth peer name e$i && ip link set e$i up && "
      "ip addr add 10.5.0.$i/24 dev d$i && ip link set d$i up || exit 1; done",
      [] {
        const auto leaves = [](const char* name, const char* from) {
          return leaves_by(name, *parse_ip_address(from), *parse_ip_address("10.5.0.9"));
        };
        if (leaves("d1", "10.5.0.1") != true || leaves("d2", "10.5.0.2") != false) return 3;
        if (leaves_by("d1", *parse_ip_address("10.9.0.1"), *parse_ip_address("10.5.0.9")).has_value()) return 4;
        if (std::system("exec 2>/dev/null; ip route add 10.5.0.0/24 dev d2 table 7 && "
                        "ip rule add from 10.5.0.2 table 7") != 0)
          return 2;
        return leaves("d2", "10.5.0.2") == true ? 0 : 5;
      });
  if (result == 2) GTEST_SKIP() << "no own network can be made here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace moeccl::driver
