// SPDX-License-Identifier: Apache-2.0
// Connections between hosts: those that fail to be established, and which network they use.
#include "src/world/network.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "src/base/env.h"
#include "src/bootstrap/unique_id.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/timing.h"
#include "transport/shm/segment.h"

namespace {

// Two hosts on this machine, which reach each other over loopback, and a libibverbs. Set before the environment is
// read.
const bool two_hosts = setenv("MOECCL_SOCKET_IFNAME", "lo", 1) == 0 && setenv("MOECCL_HOST_ID", "here", 1) == 0 &&
                       setenv("MOECCL_IB_LIBRARY", moeccl::tests::FakeVerbs::library().c_str(), 1) == 0 &&
                       setenv("NCCL_IB_QPS_PER_CONNECTION", "16", 1) == 0;  // more than we take

std::atomic<int> cuda_loads{0};  // calls that load the CUDA driver

thread_local int threads_until_none = -1;  // that the calling thread can still start; -1: any number

thread_local bool without_rdma = false;  // the calling thread's rank has no libibverbs

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* of) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_until_none == 0) return EAGAIN;
  if (threads_until_none > 0) --threads_until_none;
  return real(thread, attributes, body, of);
}

extern "C" void* dlopen(const char* name, int flags) noexcept {
  static const auto real = reinterpret_cast<decltype(&dlopen)>(dlsym(RTLD_NEXT, "dlopen"));
  if (name != nullptr && std::strstr(name, "libcuda") != nullptr && (flags & RTLD_NOLOAD) == 0) ++cuda_loads;
  if (without_rdma && name != nullptr && std::strstr(name, "libfake_ibverbs") != nullptr) name = "/without/rdma";
  return real(name, flags);
}

namespace moeccl::comm {
namespace {

struct TwoRanks {
  std::unique_ptr<bootstrap::Root> root;
  Status status[2];

  // Both connect at the same time, and rank 0 can start only this many threads. networks: HostOfRank::network of each.
  explicit TwoRanks(int threads_of_rank_0, std::array<uint64_t, 2> networks = {}) {
    const Deadline deadline = Deadline::after_ms(tests::patient_ms(10'000));
    bootstrap::RootOptions options;
    options.socket_addr = "127.0.0.1";
    root = std::move(*bootstrap::Root::start(options));
    const auto body = [&](uint32_t rank) {
      auto session = std::move(*bootstrap::Session::join(root->id(), static_cast<int>(rank), 2, deadline));
      const HostOfRank host_of_rank[] = {{1, "a", networks[0]}, {2, "b", networks[1]}};
      const Hosts hosts(host_of_rank);
      auto segment = *transport::shm::Segment::create({2, rank, 1 << 20, 4096}, false);
      Config config;
      config.timeout_ms = 5000;
      if (rank == 0) threads_until_none = threads_of_rank_0;
      const auto made = connect_network_links(*session, *transport::find_network("tcp"), hosts, bootstrap::Key{},
                                              config, segment->memory(rank), {}, deadline);
      threads_until_none = -1;
      status[rank] = made.status();
      if (!made.ok()) session->abandon(made.status());
      if (made.ok()) session->close();
    };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }
};

TEST(Network, ComesAbout) {
  ASSERT_TRUE(two_hosts && env().socket_ifname == "lo");
  const TwoRanks ranks(-1);
  EXPECT_TRUE(ranks.status[0].ok()) << ranks.status[0].message();
  EXPECT_TRUE(ranks.status[1].ok()) << ranks.status[1].message();
}

// Buffers in host memory leave CUDA alone, which the program may start later: in children, or with other devices.
TEST(Network, DoesNotStartCuda) {
  const int before = cuda_loads;
  const TwoRanks ranks(-1);
  EXPECT_TRUE(ranks.status[0].ok()) << ranks.status[0].message();
  EXPECT_EQ(cuda_loads, before);
}

// Containers of one machine that share its network reach each other at an address that both have. Two machines that
// have the same address, such as a container bridge's, do not.
TEST(Network, OfOneMachineLeadsToItsOwnAddress) {
  const TwoRanks containers(-1, {5, 5});
  for (const Status& s : containers.status) EXPECT_TRUE(s.ok()) << s.message();
  const TwoRanks machines(-1, {5, 6});
  const std::string& why = machines.status[1].message();
  EXPECT_NE(why.find("(lo 127.0.0.1"), std::string::npos) << why;
  EXPECT_NE(why.find(") has a route to one that rank 0 offers (lo 127.0.0.1"), std::string::npos) << why;
}

// Two ranks that choose among all networks, where RDMA is the fake libibverbs.
struct TwoChoose {
  NetworkResult of[2];
  Status status[2];
  std::string log;  // at the default level

  // rdma: whether each rank has it.
  explicit TwoChoose(std::array<bool, 2> rdma) {
    tests::FakeVerbs::get().calm();
    const Deadline deadline = Deadline::after_ms(tests::patient_ms(10'000));
    bootstrap::RootOptions options;
    options.socket_addr = "127.0.0.1";
    const auto root = std::move(*bootstrap::Root::start(options));
    const auto body = [&](uint32_t rank) {
      without_rdma = !rdma[rank];
      auto session = std::move(*bootstrap::Session::join(root->id(), static_cast<int>(rank), 2, deadline));
      const HostOfRank host_of_rank[] = {{1, "a"}, {2, "b"}};
      const Hosts hosts(host_of_rank);
      Config config;
      config.timeout_ms = 5000;
      exec::Fabric f(rank, 2, 1 << 20);
      f.own = *transport::shm::Segment::create({2, rank, 1 << 20, 4096}, false);
      auto made = connect_hosts(*session, nullptr, hosts, bootstrap::Key{}, config, f, deadline);
      status[rank] = made.status();
      if (made.ok()) of[rank] = *made;
      f.engine = nullptr;
      session->close();
      without_rdma = false;
    };
    ::testing::internal::CaptureStderr();
    std::thread other([&] { body(1); });
    body(0);
    other.join();
    log = ::testing::internal::GetCapturedStderr();
    for (const Status& s : status) EXPECT_TRUE(s.ok()) << s.message();
  }
  bool over(const char* network) const {
    return of[0].network == transport::find_network(network) && of[1].network == of[0].network;
  }
};

// One host without RDMA takes it from all of them. Explain shows the same text as the log.
TEST(Network, ThatOnlySomeRanksHaveIsSaidOnce) {
  const TwoChoose ranks({true, false});
  EXPECT_TRUE(ranks.over("tcp"));
  const std::string why =
      "no verbs on rank 1 (b): /without/rdma: cannot open shared object file: No such file or directory; no plugin on "
      "any rank: ";
  EXPECT_EQ(ranks.of[0].why.substr(0, why.size()), why);
  EXPECT_EQ(ranks.of[0].why, ranks.of[1].why);
  const size_t at = ranks.log.find(why);
  EXPECT_NE(at, std::string::npos) << ranks.log;
  EXPECT_NE(ranks.log.find("WARN"), std::string::npos) << ranks.log;
  EXPECT_EQ(ranks.log.find(why, at + 1), std::string::npos) << ranks.log;
}

TEST(Network, ThatNoRankHasIsNotWorthAWarning) {
  const TwoChoose ranks({false, false});
  EXPECT_TRUE(ranks.over("tcp"));
  EXPECT_EQ(ranks.of[0].why.substr(0, 16), "no verbs on any ") << ranks.of[0].why;
  EXPECT_EQ(ranks.log, "");
}

TEST(Network, IsRdmaWithMoreQueuePairsThanWeTake) {
  const TwoChoose ranks({true, true});
  EXPECT_TRUE(ranks.over("verbs")) << ranks.of[0].why;
  EXPECT_EQ(ranks.of[0].why + ranks.log, "");
  EXPECT_GT(ranks.of[1].node_link.bytes_per_ns, 0);
}

// A process of its own, because env() reads the variables once.
TEST(Network, WithAValueOfNcclsThatIsRefusedWarns) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string run = "NCCL_IB_SL=16 '" + program +
                          "' --gtest_also_run_disabled_tests --gtest_filter=Network.DISABLED_HasARefusedValueOfNccls";
  EXPECT_EQ(std::system(run.c_str()), 0);
}
TEST(Network, DISABLED_HasARefusedValueOfNccls) {
  const TwoChoose ranks({true, true});
  EXPECT_TRUE(ranks.over("tcp"));
  EXPECT_NE(ranks.log.find("no verbs on any rank: NCCL_IB_SL"), std::string::npos) << ranks.log;
  EXPECT_NE(ranks.log.find("WARN"), std::string::npos) << ranks.log;
}

// Only the rank that connects knows the rate of the interfaces that are used.
TEST(Network, HasOneUplinkForAllRanks) {
  const TwoChoose ranks({false, false});
  EXPECT_GT(ranks.of[0].node_link.bytes_per_ns, 0);
  EXPECT_EQ(ranks.of[0].node_link.bytes_per_ns, ranks.of[1].node_link.bytes_per_ns);
}

// The accepting thread and the engine's thread: everything made before them ends in order.
TEST(Network, WithoutItsThreadsSaysSo) {
  for (const int threads : {0, 1}) {
    const TwoRanks ranks(threads);
    EXPECT_EQ(ranks.status[0].code(), moecclSystemError) << ranks.status[0].message();
    EXPECT_NE(ranks.status[0].message().find(threads == 0 ? "moeccl-accept" : "moeccl-tcp"), std::string::npos)
        << ranks.status[0].message();
  }
}

}  // namespace
}  // namespace moeccl::comm
