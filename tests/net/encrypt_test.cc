// SPDX-License-Identifier: Apache-2.0
// MOECCL_ENCRYPT: which bytes cross the cable between two hosts, and which errors the ranks get.
#include <gtest/gtest.h>
#include <linux/if_ether.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <string_view>

#include "tests/support/ranks_on_hosts.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

constexpr std::string_view kSecret = "what the program sends: its own.";
constexpr const char* kTopology = "node:2(bw=1.2347GB/s,lat=25us) gpu:1";

struct Seen {
  std::atomic<int64_t> bytes, with_data, with_topology;
  std::atomic<int> ready, stop;
};

// Reads all packets on a host's cable, in a child process, until it is told to stop.
class Listener {
 public:
  Listener(const TestHosts& hosts, int host, Shared<Seen>& seen) : seen_(seen) {
    pid_ = fork();
    if (pid_ == 0) _exit(listen(hosts, host) ? 0 : 1);
    while (seen_->ready == 0) usleep(1000);
  }
  ~Listener() {
    usleep(100'000);  // leaves time for the packets still in the queue
    seen_->stop = 1;
    int status = -1;
    waitpid(pid_, &status, 0);
    EXPECT_EQ(status, 0);
  }

 private:
  bool listen(const TestHosts& hosts, int host) {
    const bool there = hosts.enter(host);
    const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, htons(ETH_P_ALL));
    sockaddr_ll at = {};
    at.sll_family = AF_PACKET;
    at.sll_protocol = htons(ETH_P_ALL);
    at.sll_ifindex = static_cast<int>(if_nametoindex("eth0"));
    const int room = 64 << 20;
    const bool ok = there && fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) == 0 &&
                    bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
    seen_->ready = ok ? 1 : -1;
    std::string packet(128 << 10, '\0');
    while (ok && seen_->stop == 0) {
      pollfd entry{fd, POLLIN, 0};
      if (poll(&entry, 1, 20) <= 0) continue;
      const ssize_t n = recv(fd, packet.data(), packet.size(), MSG_DONTWAIT);
      if (n <= 0) continue;
      const std::string_view text(packet.data(), static_cast<size_t>(n));
      seen_->bytes += n;
      seen_->with_data += text.find(kSecret) != std::string_view::npos;
      seen_->with_topology += text.find("1.2347") != std::string_view::npos;
    }
    return ok;
  }

  Shared<Seen>& seen_;
  pid_t pid_ = -1;
};

// Runs small and large operations on data that is easy to find.
void exchange(moecclComm_t comm) {
  for (const size_t blocks : {2u, 3000u, 60'000u}) {
    std::string in, out;
    for (size_t i = 0; i < blocks; ++i) in += kSecret;
    out.resize(in.size());
    MOECCL_ASSERT_COMM_OK(moecclAllToAll(in.data(), out.data(), in.size() / 2, moecclUint8, comm, nullptr), comm);
    EXPECT_EQ(out, in);
    std::string gathered(2 * in.size(), '\0');
    MOECCL_ASSERT_COMM_OK(moecclAllGather(in.data(), gathered.data(), in.size(), moecclUint8, comm, nullptr), comm);
    EXPECT_EQ(gathered, in + in);
  }
}

TEST(Encryption, LeavesNothingReadableOnTheCable) {
  for (const bool encrypt : {false, true}) {
    MAKE_HOSTS(hosts, .weights = {1, 1});
    const Variables set = {{"MOECCL_ENCRYPT", encrypt ? "1" : "0"}};
    Shared<Seen> seen;
    {
      Listener listener(*hosts, 0, seen);
      RankOptions options = on(*hosts);
      options.init = false;
      run_ranks(
          2,
          [&](int rank, moecclComm_t) {
            moecclConfig_t config = MOECCL_CONFIG_INIT;
            config.topology = kTopology;
            moecclComm_t comm = nullptr;
            MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &config));
            exchange(comm);
            const std::string text = explain(comm);
            EXPECT_EQ(text.find("over tcp, encrypted") != std::string::npos, encrypt) << text;
            MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          },
          options);
    }
    ASSERT_EQ(seen->ready, 1);
    EXPECT_GT(seen->bytes, 6'000'000);
    if (encrypt) {
      EXPECT_EQ(seen->with_data, 0);
    } else {
      EXPECT_GT(seen->with_data, 10) << "the listener hears what is said";
    }
    EXPECT_EQ(seen->with_topology, 0) << "the meeting point's connections are encrypted in any case";
  }
}

// A network that cannot encrypt is refused, with the reason.
TEST(Encryption, RefusesANetworkThatCannot) {
  MAKE_HOSTS(hosts, .weights = {1, 1}, .named = true);
  const Variables set = {{"MOECCL_ENCRYPT", "1"}, {"MOECCL_NET", "verbs"}};
  RankOptions options = on(*hosts);
  options.init = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        EXPECT_EQ(moecclCommInitRank(&comm, 2, unique_id(), rank), moecclUnsupported);
        const std::string text = moecclGetLastError(nullptr);
        for (const char* part : {"MOECCL_ENCRYPT", "MOECCL_NET", "verbs"})
          EXPECT_NE(text.find(part), std::string::npos) << text;
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
