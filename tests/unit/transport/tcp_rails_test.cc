// SPDX-License-Identifier: Apache-2.0
#include "transport/common/rails.h"

#include <gtest/gtest.h>

#include <algorithm>

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

TEST(TcpNics, TakesAnAddressOfEachFamilyAndNeverLoopback) {
  using Names = std::vector<std::string>;
  std::vector<driver::Interface> host = kHost;
  host.push_back(interface("eth0", "10.0.0.7", 24, 10'000));
  const auto nics = choose_nics(host, "");
  ASSERT_TRUE(nics.ok());
  EXPECT_EQ(names(*nics), (Names{"eth0", "eth1", "docker0", "eth0"}));
  EXPECT_EQ((*nics)[0].address.host(), "10.0.0.1");
  EXPECT_EQ((*nics)[3].address.str(), "[fd00::1]:0");
  const auto met = choose_nics(host, "", "[fd00::1]");
  EXPECT_EQ(names(*met), (Names{"eth0", "eth0", "eth1", "docker0"}));
  EXPECT_EQ((*met)[0].address.str(), "[fd00::1]:0") << "the family over which the ranks have met";
}

// As where an address of a service, or of a pod's gateway, stands before the one that other hosts know.
TEST(TcpNics, OfAnInterfacesAddressesTheOneOfTheMeetingIsTaken) {
  std::vector<driver::Interface> host = kHost;
  host.push_back(interface("eth0", "192.168.5.7", 24, 10'000));
  host.push_back(interface("eth0", "fd05::7", 64, 10'000));
  const auto hosts_of = [&](const std::string& met_at) {
    const auto nics = *choose_nics(host, "eth0", met_at);
    std::vector<std::string> all;
    for (const Nic& n : nics) all.push_back(n.address.host());
    return all;
  };
  using Addresses = std::vector<std::string>;
  EXPECT_EQ(hosts_of(""), (Addresses{"10.0.0.1", "[fd00::1]"}));
  EXPECT_EQ(hosts_of("192.168.5.7"), (Addresses{"192.168.5.7", "[fd00::1]"}));
  EXPECT_EQ(hosts_of("[fd05::7]"), (Addresses{"[fd05::7]", "10.0.0.1"}));
  const auto own = *choose_nics(host, "", "192.168.5.7");
  const auto rails = choose_rails(own, std::vector{nic("eth0", "192.168.5.8", 24, 10'000)}, no_route);
  ASSERT_EQ(rails.size(), 1u);
  EXPECT_EQ(own[rails[0].own].address.host(), "192.168.5.7");
  host.push_back(interface("eth0", "10.0.0.100", 32, 10'000));
  EXPECT_EQ(hosts_of("10.0.0.100"), (Addresses{"10.0.0.1", "[fd00::1]"})) << "an address of a service has no network";
}

TEST(TcpNics, FollowsTheFilter) {
  EXPECT_EQ(names(*choose_nics(kHost, "eth1")), (std::vector<std::string>{"eth1"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^docker0,eth1")), (std::vector<std::string>{"eth0", "eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "lo")), (std::vector<std::string>{"lo"}));
  const auto none = choose_nics(kHost, "ib0");
  EXPECT_EQ(none.status().code(), moecclInvalidArgument);
  EXPECT_TRUE(none.status().message().ends_with("there are lo, eth0, eth1, docker0")) << none.status().message();
  EXPECT_NE(none.status().message().find("link-local ones of IPv6 do not count"), std::string::npos);
  EXPECT_EQ(choose_nics(std::vector<driver::Interface>{kHost[0]}, "").status().code(), moecclUnsupported);
}

// A host's containers add bridges, which may come first. Only the last interface is in a network that the peer has.
TEST(TcpNics, OfMoreThanItUsesAreTheOneOfTheMeetingAndTheFastest) {
  const auto host = [](const std::string& bridges, int64_t bridge_rate, const std::string& own, int64_t rate) {
    std::vector<driver::Interface> all;
    for (size_t i = 0; i < kMaxNics; ++i)
      all.push_back(interface(format("br{}", i), format("172.{}{}.0.1", bridges, i), 16, bridge_rate));
    all.push_back(interface("ib0", own, 24, rate));
    return all;
  };
  const auto fast = *choose_nics(host("2", 0, "10.0.0.1", 100'000), "");
  EXPECT_EQ(fast.size(), kMaxNics);
  EXPECT_EQ(fast.front().name, "br0") << "they keep their order";
  const auto rails = choose_rails(fast, *choose_nics(host("3", 0, "10.0.0.2", 100'000), ""), no_route);
  ASSERT_EQ(rails.size(), 1u);
  EXPECT_EQ(fast[rails[0].own].name, "ib0");
  EXPECT_EQ(choose_nics(host("2", 10'000, "10.0.0.1", 1'000), "")->back().name, "br7") << "nothing says otherwise";
  EXPECT_EQ(choose_nics(host("2", 10'000, "10.0.0.1", 1'000), "", "10.0.0.1")->back().name, "ib0");
}

// NCCL_SOCKET_IFNAME counts too, so its values must mean the same.
TEST(TcpNics, FollowTheFilterByNcclsRule) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(*choose_nics(kHost, "eth")), (Names{"eth0", "eth1", "eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "eth1,docker")), (Names{"eth1", "docker0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^docker")), (Names{"eth0", "eth1", "eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "=eth0")), (Names{"eth0", "eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "=eth0,=eth1")), (Names{"eth0", "eth1", "eth0"}));
  EXPECT_EQ(names(*choose_nics(kHost, "^=eth,docker0")), (Names{"eth0", "eth1", "eth0"}));
  EXPECT_EQ(choose_nics(kHost, "=eth,docker").status().code(), moecclInvalidArgument);
}

TEST(TcpNics, SurvivesTheWireAndRefusesNonsense) {
  std::vector<Nic> nics = {nic("eth0", "10.0.0.1:7000", 24, 100'000), nic("ib0.5", "[fd00::2]:9", 64)};
  nics[1].wire = "ib0";
  Writer out;
  write_nics(nics, out);
  Reader in(out.view());
  const auto back = read_nics(in);
  ASSERT_TRUE(in.done());
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].address.str(), "10.0.0.1:7000");
  EXPECT_EQ(back[1].address.str(), "[fd00::2]:9");
  EXPECT_EQ(back[0].mbit_per_s, 100'000);
  EXPECT_EQ(back[1].wire, "ib0");
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
  ASSERT_EQ(rails.size(), 2u);
  EXPECT_TRUE(rails[0].own == 1 && !rails[0].spare);
  EXPECT_TRUE(rails[1].own == 2 && rails[1].spare) << "used only if eth0 does not answer";
}

// Virtual machines' interfaces (virtio) state no rate.
TEST(TcpRails, KeepAnInterfaceOfUnknownRateBesideASlowOne) {
  const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24), nic("mgmt", "192.168.0.1", 24, 1'000)};
  const std::vector<Nic> b = {nic("eth0", "10.0.0.2", 24), nic("mgmt", "192.168.0.2", 24, 1'000)};
  const auto rails = choose_rails(a, b, no_route);
  ASSERT_EQ(rails.size(), 2u);
  EXPECT_TRUE(rails[0].own == 0 && rails[0].mbit_per_s == kUnknownMbit && !rails[0].spare);
  EXPECT_TRUE(rails[1].own == 1 && rails[1].spare);
}

// Each fast NIC has a link of its own to its switch, and a slow network joins all hosts.
struct Routed {
  std::vector<Nic> a = {nic("mgmt0", "10.0.0.1", 24, 1'000), nic("fab0", "10.1.0.1", 31, 100'000),
                        nic("fab1", "10.1.1.1", 31, 100'000)};
  std::vector<Nic> b = {nic("mgmt0", "10.0.0.2", 24, 1'000), nic("fab0", "10.1.0.3", 31, 100'000),
                        nic("fab1", "10.1.1.3", 31, 100'000)};
  static Result<driver::SocketAddress> route(const driver::SocketAddress& peer) {
    return peer.host() == "10.0.0.2" ? ip("10.0.0.1") : peer.host() == "10.1.0.3" ? ip("10.1.0.1") : ip("10.1.1.1");
  }
};

TEST(TcpRails, RoutedRailsCountBesideASharedNetwork) {
  const Routed hosts;
  const auto rails = choose_rails(hosts.a, hosts.b, Routed::route);
  ASSERT_EQ(rails.size(), 3u);
  for (const uint32_t i : {0u, 1u}) {
    EXPECT_TRUE(rails[i].own == i + 1 && rails[i].peer == i + 1 && !rails[i].spare) << i;
    EXPECT_EQ(rails[i].mbit_per_s, 100'000);
  }
  EXPECT_TRUE(rails[2].own == 0 && rails[2].spare);
  EXPECT_FALSE(missed_rail(hosts.a, hosts.b, rails).has_value());
}

TEST(TcpRails, RoutedRailsAndASharedNetworkServeTogetherWhereBothAreFast) {
  Routed hosts;
  hosts.a[0].mbit_per_s = hosts.b[0].mbit_per_s = 25'000;
  const auto rails = choose_rails(hosts.a, hosts.b, Routed::route);
  ASSERT_EQ(rails.size(), 3u);
  EXPECT_TRUE(rails[0].mbit_per_s == 100'000 && rails[2].mbit_per_s == 25'000 && !rails[2].spare);
}

TEST(TcpRails, TellWhichFastInterfaceTheyMiss) {
  Routed hosts;
  const auto rails = choose_rails(hosts.a, hosts.b, no_route);
  ASSERT_EQ(rails.size(), 1u);
  const auto missed = missed_rail(hosts.a, hosts.b, rails);
  ASSERT_TRUE(missed.has_value());
  EXPECT_TRUE(missed->own == 1 && missed->peer == 1 && missed->mbit_per_s == 100'000);
  hosts.b.resize(1);
  EXPECT_FALSE(missed_rail(hosts.a, hosts.b, rails).has_value()) << "the peer has no such interface";
}

// A route between container networks leads through a tunnel in the network that the hosts share.
TEST(TcpRails, TunnelsDoNotCountBesideASharedNetwork) {
  for (const int64_t tunnel : {int64_t{0}, int64_t{25'000}}) {
    const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 25'000), nic("flannel.1", "10.244.1.0", 32, tunnel)};
    const std::vector<Nic> b = {nic("eth0", "10.0.0.2", 24, 25'000), nic("cni0", "10.244.2.1", 24, tunnel)};
    const auto rails = choose_rails(a, b, [](const driver::SocketAddress&) { return Result(ip("10.244.1.0")); });
    EXPECT_EQ(rails.size(), 1u) << tunnel;
  }
}

// Hosts in networks of their own, which routers join, with an overlay over the same wires.
TEST(TcpRails, TunnelsAreSpareBesideARoute) {
  for (const int64_t tunnel : {int64_t{0}, int64_t{25'000}, int64_t{100'000}}) {
    for (const bool management : {false, true}) {
      std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 25'000), nic("flannel.1", "10.244.1.0", 32, tunnel)};
      std::vector<Nic> b = {nic("eth0", "10.0.1.2", 24, 25'000), nic("cni0", "10.244.2.1", 24, tunnel)};
      a[1].tunnel = true;
      if (management)
        a.push_back(nic("mgmt0", "10.9.0.1", 24, 1'000)), b.push_back(nic("mgmt0", "10.9.0.2", 24, 1'000));
      const auto rails = choose_rails(a, b, [](const driver::SocketAddress& peer) {
        return Result(ip(peer.host() == "10.0.1.2" ? "10.0.0.1" : "10.244.1.0"));
      });
      ASSERT_GE(rails.size(), 1u);
      EXPECT_EQ(rails[0].own, 0u);
      EXPECT_EQ(rails[0].peer, 0u);
      for (size_t i = 0; i < rails.size(); ++i) EXPECT_EQ(rails[i].spare, i > 0) << tunnel << " " << management;
    }
  }
}

// Every node has the same IPv4 address behind its NAT, or one that leads nowhere, and is reached over IPv6.
TEST(TcpRails, OfTheOtherFamilyServeWhereTheFirstLeadsNowhere) {
  const auto host = [](const std::string& v4, const std::string& v6) {
    return std::vector<Nic>{nic("eth0", v4, 24, 10'000), nic("eth0", v6, 64, 10'000)};
  };
  const auto route = [](const driver::SocketAddress& peer) -> Result<driver::SocketAddress> {
    return ip(peer.host_bytes().size() == 4 ? "10.0.2.15" : "fd00:1::15");
  };
  const std::vector<Nic> own = host("10.0.2.15", "fd00:1::15");
  const auto same = choose_rails(own, host("10.0.2.15", "fd00:2::15"), route);
  ASSERT_EQ(same.size(), 1u);
  EXPECT_TRUE(same[0].own == 1 && same[0].peer == 1 && !same[0].spare);
  for (const char* v4 : {"10.0.2.16", "10.0.3.16"}) {
    const auto rails = choose_rails(own, host(v4, "fd00:2::16"), route);
    ASSERT_EQ(rails.size(), 2u) << v4;
    EXPECT_TRUE(rails[0].own == 0 && !rails[0].spare) << v4;
    EXPECT_TRUE(rails[1].own == 1 && rails[1].peer == 1 && rails[1].spare) << "one wire is one rail";
  }
  // The side that connects has met the others over IPv6.
  const auto rails = choose_rails({{own[1], own[0]}}, host("10.0.2.16", "fd00:1::16"), route);
  ASSERT_EQ(rails.size(), 2u);
  EXPECT_TRUE(rails[0].own == 0 && rails[0].peer == 1 && !rails[0].spare && rails[1].spare);
}

TEST(TcpRails, ThatShareAWireAreOne) {
  const auto host = [](int number, bool one_wire) {
    std::vector<Nic> nics = {nic("eth0", format("10.0.0.{}", number), 24, 10'000),
                             nic("eth0.100", format("10.1.0.{}", number), 24, 10'000)};
    if (one_wire) nics[1].wire = "eth0";
    return nics;
  };
  for (const auto& [own, peer] : {std::pair{true, false}, {false, true}, {false, false}}) {
    const auto rails = choose_rails(host(1, own), host(2, peer), no_route);
    ASSERT_EQ(rails.size(), 2u);
    EXPECT_FALSE(rails[0].spare);
    EXPECT_EQ(rails[1].spare, own || peer);
  }
}

// Without rules for each source, the kernel sends everything to a network by the first interface there.
TEST(TcpRails, OfOneNetworkServeTogetherOnlyWherePacketsLeaveByBoth) {
  const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 10'000), nic("eth1", "10.0.0.2", 24, 10'000)};
  const std::vector<Nic> b = {nic("eth0", "10.0.0.3", 24, 10'000), nic("eth1", "10.0.0.4", 24, 10'000)};
  for (const bool rules : {false, true}) {
    const auto rails = choose_rails(a, b, no_route, false, [&](const Nic& own, const driver::SocketAddress&) {
      return rules || own.name == "eth0";
    });
    ASSERT_EQ(rails.size(), 2u);
    EXPECT_TRUE(rails[0].own == 0 && !rails[0].spare);
    EXPECT_TRUE(rails[1].own == 1 && rails[1].spare != rules);
  }
}

TEST(TcpRails, TheOneAddressOfAPeerGoesToTheInterfaceThatPacketsLeaveBy) {
  const std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 10'000), nic("eth1", "10.0.0.2", 24, 10'000)};
  const std::vector<Nic> b = {nic("eth0", "10.0.0.3", 24, 10'000)};
  const auto rails = choose_rails(a, b, no_route, false,
                                  [](const Nic& own, const driver::SocketAddress&) { return own.name == "eth1"; });
  ASSERT_EQ(rails.size(), 1u);
  EXPECT_TRUE(rails[0].own == 1 && !rails[0].spare);
  EXPECT_FALSE(missed_rail(a, b, std::vector<Rail>{{0, 0, 10'000, true}}).has_value()) << "a spare one is all there is";
}

TEST(TcpRails, ASpareOneClaimsNoWire) {
  std::vector<Nic> a = {nic("eth0", "10.0.0.1", 24, 10'000), nic("eth0.100", "10.1.0.1", 24, 10'000),
                        nic("eth1", "10.2.0.1", 24, 10'000)};
  std::vector<Nic> b = {nic("eth0", "10.0.0.2", 24, 10'000), nic("eth1", "10.1.0.2", 24, 10'000),
                        nic("eth1.200", "10.2.0.2", 24, 10'000)};
  a[1].wire = "eth0";
  b[2].wire = "eth1";
  const auto rails = choose_rails(a, b, no_route);
  ASSERT_EQ(rails.size(), 3u);
  EXPECT_EQ(std::count_if(rails.begin(), rails.end(), [](const Rail& r) { return !r.spare; }), 2);
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
  EXPECT_EQ(streams_for({0, 0, 1'000}, 0, 16), 1u);
  EXPECT_EQ(streams_for({0, 0, 100'000}, 0, 16), 4u);
  EXPECT_EQ(streams_for({0, 0, 1'000}, 3, 16), 3u);
  EXPECT_EQ(streams_for({0, 0, 100'000}, 0, 2), 2u) << "eight rails share the limit";
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
