// SPDX-License-Identifier: Apache-2.0
// Connections between hosts that fail to be established.
#include "src/world/network.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "src/base/env.h"
#include "src/bootstrap/unique_id.h"
#include "tests/support/timing.h"
#include "transport/shm/segment.h"

namespace {

// Two hosts on this machine, which reach each other over loopback. Set before the environment is read.
const bool two_hosts = setenv("MOECCL_SOCKET_IFNAME", "lo", 1) == 0 && setenv("MOECCL_HOST_ID", "here", 1) == 0;

std::atomic<int> cuda_loads{0};  // calls that load the CUDA driver

thread_local int threads_until_none = -1;  // that the calling thread can still start; -1: any number

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
  EXPECT_NE(machines.status[1].message().find("no interface of this host has a route to rank 0"), std::string::npos)
      << machines.status[1].message();
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
