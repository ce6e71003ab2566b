// SPDX-License-Identifier: Apache-2.0
// Ranks that connect: what ends the wait for a peer, and what does not.
#include "transport/tcp/mesh.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "src/driver/socket.h"
#include "tests/support/timing.h"
#include "tests/support/two_meshes.h"

namespace moeccl::transport::tcp {
namespace {

MeshOptions patient(uint32_t rank) { return options_of(rank, tests::patient_ms(20'000)); }

Nic at_port(uint16_t port) {
  Nic nic = {"lo", *driver::parse_ip_address("127.0.0.1"), 8, 0};
  nic.address.set_port(port);
  return nic;
}

// The peer comes never, accepts and says nothing, or refuses.
TEST(TcpMeshWait, EndsWithAnAbort) {
  const Result<Fd> silent = driver::listen_at(*driver::parse_ip_address("127.0.0.1"));
  const uint16_t silent_port = driver::local_address(silent->get())->port();
  for (const uint16_t port : {uint16_t{0}, silent_port, static_cast<uint16_t>(tests::free_port())}) {
    std::atomic<bool> aborted = false;
    MeshOptions o = patient(port == 0 ? 0 : 1);
    o.watch.cancelled = [&] { return aborted ? error(moecclAborted, "by the test") : Status(); };
    auto mesh = listen(o);
    const std::map<uint32_t, std::vector<Nic>> peers = {{1 - o.rank, {at_port(port)}}};
    Status status;
    std::thread connecting([&] { status = mesh->connect(peers).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const tests::Stopwatch watch;
    aborted = true;
    connecting.join();
    MOECCL_EXPECT_WITHIN(watch, 1000);
    EXPECT_EQ(status.code(), moecclAborted) << port << ": " << status.message();
  }
}

// A firewall between two hosts is the usual cause, and the other ranks get this sentence, too.
TEST(TcpMeshWait, SaysWhatToLookAtWhenNobodyAnswers) {
  const Result<Fd> silent = driver::listen_at(*driver::parse_ip_address("127.0.0.1"));
  const uint16_t silent_port = driver::local_address(silent->get())->port();
  for (const uint16_t port : {silent_port, static_cast<uint16_t>(tests::free_port())}) {
    const auto got = listen(options_of(1, 300))->connect({{0, {at_port(port)}}});
    ASSERT_FALSE(got.ok());
    const std::string& why = got.status().message();
    EXPECT_TRUE(why.starts_with("connecting to rank 0: ")) << why;
    for (const char* part : {"MOECCL_SOCKET_IFNAME", "firewall", "MOECCL_PORT_RANGE"})
      EXPECT_EQ(why.find(part) == std::string::npos, port == silent_port) << why;
    EXPECT_EQ(why.find("is its process stopped?") == std::string::npos, port != silent_port) << why;
  }
}

// As while a bond fails over or a neighbour's hardware address is asked for.
TEST(TcpMeshWait, OutlastsAWayThatIsMissingForAMoment) {
  MeshOptions a = patient(0);
  a.ports = {static_cast<uint16_t>(tests::free_port()), 0};
  a.ports.last = a.ports.first;
  auto mesh_b = listen(patient(1));
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    got_a = listen(a)->connect({{1, nics_of(*mesh_b)}});
  });
  const auto got_b = mesh_b->connect({{0, {at_port(a.ports.first)}}});
  late.join();
  EXPECT_TRUE(got_a.ok()) << got_a.status().message();
  EXPECT_TRUE(got_b.ok()) << got_b.status().message();
}

TEST(TcpMeshWait, IsShortForARailThatRefusesWhileAnotherServes) {
  auto mesh_a = listen(patient(0)), mesh_b = listen(patient(1));
  const Nic own = {"net1", *driver::parse_ip_address("127.1.0.2"), 16, 40'000};
  auto two = std::move(*Mesh::listen(patient(1), {nics_of(*mesh_b)[0], own}));
  Nic dead = {"net1", *driver::parse_ip_address("127.1.0.1"), 16, 40'000};
  dead.address.set_port(static_cast<uint16_t>(tests::free_port()));
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  const tests::Stopwatch watch;
  std::thread other([&] { got_a = mesh_a->connect({{1, nics_of(*two)}}); });
  const auto got_b = two->connect({{0, {nics_of(*mesh_a)[0], dead}}});
  other.join();
  EXPECT_TRUE(got_a.ok()) << got_a.status().message();
  ASSERT_TRUE(got_b.ok()) << got_b.status().message();
  EXPECT_EQ((*got_b)[0].streams.size(), 1u);
  MOECCL_EXPECT_WITHIN(watch, 6000);
}

// It accepts connections from the start, but only a rail beside it is dead for good.
TEST(TcpMeshWait, GivesTheTimeThatIsLeftToAPeerThatIsSlowToAnswer) {
  const MeshOptions b = options_of(1, tests::patient_ms(10'000));
  auto mesh_a = listen(patient(0)), mesh_b = listen(b);
  const Nic own = {"net1", *driver::parse_ip_address("127.1.0.2"), 16, 40'000};
  auto two = std::move(*Mesh::listen(b, {nics_of(*mesh_b)[0], own}));
  Nic dead = {"net1", *driver::parse_ip_address("127.1.0.1"), 16, 40'000};
  dead.address.set_port(static_cast<uint16_t>(tests::free_port()));
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread slow([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(6000));
    got_a = mesh_a->connect({{1, nics_of(*two)}});
  });
  const auto got_b = two->connect({{0, {nics_of(*mesh_a)[0], dead}}});
  slow.join();
  EXPECT_TRUE(got_a.ok()) << got_a.status().message();
  EXPECT_TRUE(got_b.ok()) << got_b.status().message();
}

TEST(TcpMesh, ConnectsOverIpv6) {
  const Nic six = {"lo", *driver::parse_ip_address("::1"), 128, 0};
  MeshOptions a = patient(0), b = patient(1);
  a.one_machine = b.one_machine = {true, true};
  auto mesh_a = Mesh::listen(a, {six}), mesh_b = Mesh::listen(b, {six});
  if (!mesh_a.ok()) GTEST_SKIP() << mesh_a.status().message();
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread other([&] { got_a = (*mesh_a)->connect({{1, nics_of(**mesh_b)}}); });
  const auto got_b = (*mesh_b)->connect({{0, nics_of(**mesh_a)}});
  other.join();
  EXPECT_TRUE(got_a.ok()) << got_a.status().message();
  ASSERT_TRUE(got_b.ok()) << got_b.status().message();
  EXPECT_TRUE((*got_b)[0].where.starts_with("[::1]:")) << (*got_b)[0].where;
}

// An IPv6 address may still be in doubt, or IPv6 switched off.
TEST(TcpMeshListen, OneAddressOfAnInterfaceIsEnough) {
  const Nic good = {"lo", *driver::parse_ip_address("127.0.0.1"), 8, 0};
  const Nic bad = {"lo", *driver::parse_ip_address("2001:db8::1"), 64, 0};
  const auto mesh = Mesh::listen(patient(0), {good, bad});
  ASSERT_TRUE(mesh.ok()) << mesh.status().message();
  EXPECT_EQ((*mesh)->nics().size(), 1u);
  EXPECT_FALSE(Mesh::listen(patient(0), {bad}).ok());
}

}  // namespace
}  // namespace moeccl::transport::tcp
