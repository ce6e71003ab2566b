// SPDX-License-Identifier: Apache-2.0
// The meeting point's host answers that the way to it is prohibited, as many firewalls do until it is opened.
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <thread>

#include "src/bootstrap/unique_id.h"
#include "src/driver/thread.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

bool shell(const std::string& command) { return std::system(command.c_str()) == 0; }

Status join_alone(const UniqueId& id, int64_t ms) {
  MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId encoded, encode_unique_id(id));
  MOECCL_ASSIGN_OR_RETURN(const auto session, Session::join(encoded, 0, 1, Deadline::after_ms(patient_ms(ms)),
                                                            {.wait_for_root = true, .others_alive = {}, .gone = {}}));
  session->close();
  return {};
}

// connect() says the same (EACCES) of a route that prohibits as of a firewall's answer over IPv6.
TEST(ProhibitedWay, IsTriedUntilItIsOpen) {
  if (std::getenv("MOECCL_TEST_PROHIBITED") == nullptr) {
    Children children;
    children.start([] {
      if (::unshare(CLONE_NEWNET) != 0 || !shell("ip link set lo up")) return 77;
      ::setenv("MOECCL_TEST_PROHIBITED", "1", 1);
      ::execl("/proc/self/exe", "self", "--gtest_filter=ProhibitedWay.IsTriedUntilItIsOpen",
              static_cast<char*>(nullptr));
      return 1;
    });
    const int code = children.wait(0);
    if (code == 77) GTEST_SKIP() << "this user may not make network namespaces";
    EXPECT_EQ(code, 0);
    return;
  }
  for (const std::string& ip : {std::string("10.77.0.1"), std::string("fd77::1")}) {
    SCOPED_TRACE(ip);
    const bool v6 = ip.find(':') != std::string::npos;
    const std::string tool = v6 ? "ip -6" : "ip", whole = ip + (v6 ? "/128" : "/32");
    if (!shell(tool + " route add prohibit " + whole)) {
      EXPECT_TRUE(v6) << "a route that prohibits cannot be made";
      continue;  // no IPv6 here
    }
    RootOptions options;
    options.timeout_ms = patient_ms(20'000);
    options.socket_addr = (v6 ? "[" + ip + "]" : ip) + ":4711";
    UniqueId id;
    id.key = random_key().value();
    id.address = driver::parse_ip_address(options.socket_addr).value();
    options.key = id.key;
    const Status early = join_alone(id, 300);
    EXPECT_EQ(early.code(), moecclTimeout) << early.message();
    for (const char* part : {"prohibits it", "firewall"})
      EXPECT_NE(early.message().find(part), std::string::npos) << early.message();
    std::unique_ptr<Root> root;
    std::thread opens([&] {
      driver::sleep_ns(300'000'000);
      EXPECT_TRUE(
          shell(tool + " route del prohibit " + whole + " && ip addr add " + whole + " dev lo" + (v6 ? " nodad" : "")));
      Result<std::unique_ptr<Root>> started = Root::start(options);
      EXPECT_TRUE(started.ok()) << started.status().message();
      if (started.ok()) root = std::move(*started);
    });
    const Status joined = join_alone(id, 20'000);
    opens.join();
    EXPECT_TRUE(joined.ok()) << joined.message();
  }
}

TEST(ProhibitedWay, ALinkLocalAddressToListenAtIsRefusedWithItsReason) {
  RootOptions options;
  options.socket_addr = "fe80::1";
  const Status refused = Root::start(options).status();
  EXPECT_EQ(refused.code(), moecclInvalidArgument) << refused.message();
  EXPECT_NE(refused.message().find("link-local"), std::string::npos) << refused.message();
}

}  // namespace
}  // namespace moeccl::bootstrap
