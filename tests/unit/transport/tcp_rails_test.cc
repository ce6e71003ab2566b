// SPDX-License-Identifier: Apache-2.0
#include "transport/common/rails.h"

#include <gtest/gtest.h>

namespace moeccl::transport::tcp {
namespace {

driver::SocketAddress ip(const std::string& text) { return *driver::parse_ip_address(text); }

driver::Interface interface(const std::string& name, const std::string& address, uint32_t prefix, int64_t rate = 0) {
  return {name, ip(address), prefix, name == "lo", rate};
}

Nic nic(const std::string& name, const std::string& address, uint32_t prefix, int64_t rate = 0) {
  return {name, ip(address), prefix, rate};
}

Result<driver::SocketAddress> no_route(const driver::SocketAddress&) { return error(moecclSystemError, "no route"); }

std::vector<std::string> names(const std::vector<Nic>& nics) {
  std::vector<std::string> out;
  for (const Nic& n : nics) out.push_back(n.name);
  return out;
}

const std::vector<driver::Interface> kHost = {
    interface("lo", "127.0.0.1", 8), interface("eth0", "10.0.0.1", 24, 10'000),
    interface("eth0", "fd00::1", 64, 10'000), interface("eth1", "10.0.1.1", 24, 10'000),
    interface("docker0", "172.17.0.1", 16)};

TEST(TcpNics, TakesEachInterfaceOnceAndNeverLoopback) {
  const auto nics = choose_nics(kHost, "");
  ASSERT_TRUE(nics.ok());
  EXPECT_EQ(names(*nics), (std::vector<std::string>{"eth0", "eth1", "docker0"}));
  EXPECT_EQ((*nics)[0].address.host_bytes().size(), 4u) << "IPv4 first";
}

TEST(TcpNics, FollowsTheFilter) {
  EXPECT_EQ(names(*choose_nics(kHost, "eth1")), (std::vector<std::string>{"eth1"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^docker0,eth1")), (std::vector<std::string>{"eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "lo")), (std::vector<std::string>{"lo"}));
  const auto none = choose_nics(kHost, "ib0");
  EXPECT_EQ(none.status().code(), moecclInvalidArgument);
  EXPECT_TRUE(none.status().message().ends_with("there are lo, eth0, eth1, docker0")) << none.status().message();
  EXPECT_EQ(choose_nics(std::vector<driver::Interface>{kHost[0]}, "").status().code(), moecclUnsupported);
}

// NCCL_SOCKET_IFNAME counts too, so its values must mean the same.
TEST(TcpNics, FollowTheFilterByNcclsRule) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(*choose_nics(kHost, "eth")), (Names{"eth0", "eth1"}));
  EXPECT_EQ(names(*choose_nics(kHost, "eth1,docker")), (Names{"eth1", "docker0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^docker")), (Names{"eth0", "eth1"}));
  EXPECT_EQ(names(*choose_nics(kHost, "=eth0")), (Names{"eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "=eth0,=eth1")), (Names{"eth0", "eth1"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^=eth,docker0")), (Names{"eth0", "eth1"}));
  EXPECT_EQ(choose_nics(kHost, "=eth,docker").status().code(), moecclInvalidArgument);
}

TEST(TcpNics, SurvivesTheWireAndRefusesNonsense) {
  std::vector<Nic> nics = {nic("eth0", "10.0.0.1:7000", 24, 100'000), nic("ib0", "[fd00::2]:9", 64)};
  Writer out;
  write_nics(nics, out);
  Reader in(out.view());
  const auto back = read_nics(in);
  ASSERT_TRUE(in.done());
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].address.str(), "10.0.0.1:7000");
  EXPECT_EQ(back[1].address.str(), "[fd00::2]:9");
  EXPECT_EQ(back[0].mbit_per_s, 100'000);
  for (size_t n = 0; n < out.size(); ++n) {
    Reader cut(out.view().first(n));
    (void)read_nics(cut);
    EXPECT_FALSE(cut.done() && n > 0) << n;
  }
}

TEST(TcpRails, PairsInterfacesOfOneNetwork) {
  const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 25'000), nic("eth1", "10.0.1.1", 24, 100'000)};
  const std::vector<Nic> b = {nic("p0", "10.0.1.2", 24, 100'000), nic("p1", "10.0.0.2", 24, 100'000)};
  const auto rails = choose_rails(a, b, no_route);
  ASSERT_EQ(rails.size(), 2u);
  EXPECT_EQ(rails[0].own, 1u);
  EXPECT_EQ(rails[0].peer, 0u);
  EXPECT_EQ(rails[0].mbit_per_s, 100'000);
  EXPECT_EQ(rails[1].mbit_per_s, 25'000) << "the slower side counts";
}

TEST(TcpRails, LeavesOutBridgesThatBothHaveAndSlowOnes) {
  const std::vector<Nic> a = {nic("docker0", "172.17.0.1", 16), nic("eth0", "10.0.0.1", 24, 100'000),
                              nic("mgmt", "192.168.0.1", 24, 1'000)};
  const std::vector<Nic> b = {nic("docker0", "172.17.0.1", 16), nic("eth0", "10.0.0.2", 24, 100'000),
                              nic("mgmt", "192.168.0.2", 24, 1'000)};
  const auto rails = choose_rails(a, b, no_route);
  ASSERT_EQ(rails.size(), 1u);
  EXPECT_EQ(rails[0].own, 1u);
}

// A peer states the speeds of its interfaces.
TEST(TcpRails, TakeAnySpeedThatAPeerStates) {
  constexpr int64_t kMost = INT64_MAX;
  const std::vector<Nic> a = {nic("a0", "10.0.0.1", 24, kMost), nic("a1", "10.0.1.1", 24, kMost)};
  const std::vector<Nic> b = {nic("b0", "10.0.0.2", 24, kMost), nic("b1", "10.0.1.2", 24, kMost)};
  EXPECT_EQ(choose_rails(a, b, no_route).size(), 2u);
}

TEST(TcpRails, HostsThatAreOneMachineMeetAtItsOwnAddress) {
  const std::vector<Nic> both = {nic("lo", "127.0.0.1", 8)};
  EXPECT_TRUE(choose_rails(both, both, no_route).empty());
  EXPECT_EQ(choose_rails(both, both, no_route, true).size(), 1u);
}

TEST(TcpRails, AsksTheRouteBetweenNetworks) {
  const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24), nic("eth1", "10.0.1.1", 24)};
  const std::vector<Nic> b = {nic("eth0", "10.9.0.1", 24)};
  const auto rails = choose_rails(a, b, [](const driver::SocketAddress& peer) -> Result<driver::SocketAddress> {
    EXPECT_EQ(peer.str(), "10.9.0.1:0");
    return ip("10.0.1.1");
  });
  ASSERT_EQ(rails.size(), 1u);
  EXPECT_EQ(rails[0].own, 1u);
  EXPECT_TRUE(choose_rails(a, b, no_route).empty());
}

TEST(TcpRails, FastOnesGetSeveralConnections) {
  EXPECT_EQ(streams_for({0, 0, 0}, 0), 1u);
  EXPECT_EQ(streams_for({0, 0, 100'000}, 0), 4u);
  EXPECT_EQ(streams_for({0, 0, 1'000}, 3), 3u);
}

TEST(TcpInterfaces, OfThisHostIncludeLoopback) {
  const auto found = driver::interfaces();
  ASSERT_TRUE(found.ok());
  bool loopback = false;
  for (const driver::Interface& i : *found) loopback = loopback || (i.loopback && i.address.str() == "127.0.0.1:0");
  EXPECT_TRUE(loopback) << "127.0.0.1 is not up here";
  EXPECT_TRUE(driver::same_network(ip("10.1.2.3"), ip("10.1.3.4"), 22));
  EXPECT_FALSE(driver::same_network(ip("10.1.2.3"), ip("10.1.3.4"), 24));
  EXPECT_FALSE(driver::same_network(ip("10.1.2.3"), ip("::1"), 0));
}

}  // namespace
}  // namespace moeccl::transport::tcp
