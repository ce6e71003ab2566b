// SPDX-License-Identifier: Apache-2.0
// Finds a net plugin and presents seven interfaces as one.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "src/base/env.h"
#include "tests/support/captured.h"
#include "tests/support/fake_nets.h"
#include "tests/support/timing.h"
#include "transport/netplugin/loader.h"

namespace moeccl::tests {
namespace {

using namespace transport::netplugin;
using Names = std::vector<std::string>;

bool says(const Status& s, const char* what) { return s.message().find(what) != std::string::npos; }

TEST(NetPluginSearch, FollowsNcclsRules) {
  EXPECT_EQ(plugin_list(""), Names{"libnccl-net.so"});
  EXPECT_EQ(plugin_list("none"), Names{});
  EXPECT_EQ(plugin_list("NONE"), Names{});
  EXPECT_EQ(plugin_list("aws-ofi,/opt/x/libnccl-net.so,,ucx"), (Names{"aws-ofi", "/opt/x/libnccl-net.so", "ucx"}));
}

TEST(NetPluginSearch, AnEmptyListOfNcclsNamesNoPlugin) {
  const auto list = [](std::vector<const char*> variables) { return parse_env(variables, false).env.net_plugin; };
  EXPECT_EQ(list({"NCCL_NET_PLUGIN="}), "none");
  EXPECT_EQ(list({"NCCL_NET_PLUGIN=", "MOECCL_NET_PLUGIN="}), "none") << "an empty one of ours means unset";
  EXPECT_EQ(list({"NCCL_NET_PLUGIN=", "MOECCL_NET_PLUGIN=ucx"}), "ucx");
  EXPECT_EQ(list({"MOECCL_NET_PLUGIN="}), "");
  EXPECT_EQ(parse_env(std::vector<const char*>{"NCCL_SOCKET_IFNAME="}, false).env.socket_ifname, "");
}

TEST(NetPluginSearch, SaysWhatWasTriedAndWhy) {
  const Result<PluginUse> none = use_plugin({.list = "none"});
  ASSERT_FALSE(none.ok());
  EXPECT_TRUE(says(none.status(), "names no plugin")) << none.status().message();
  const Result<PluginUse> missing = use_plugin({.list = "surely-not-there"});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), moecclUnsupported);
  EXPECT_TRUE(says(missing.status(), "libnccl-net-surely-not-there.so")) << missing.status().message();
  const Result<PluginUse> other = use_plugin({.list = "libm.so.6"});
  ASSERT_FALSE(other.ok());
  EXPECT_TRUE(says(other.status(), "ncclNetPlugin_v6 to ncclNetPlugin_v12")) << other.status().message();
}

TEST(NetPluginRails, AreTheFastestAndDifferentForTheRanksOfAHost) {
  const auto devices = [](std::vector<int64_t> rates) {
    std::vector<PluginUse::Device> all;
    for (const int64_t r : rates) all.push_back({static_cast<int>(all.size()), {}}), all.back().is.mbit_per_s = r;
    return all;
  };
  const auto numbers = [](const std::vector<PluginUse::Device>& rails) {
    std::vector<int> all;
    for (const PluginUse::Device& d : rails) all.push_back(d.number);
    return all;
  };
  using Numbers = std::vector<int>;
  EXPECT_EQ(numbers(rails_of_rank(devices({0}), 3)), Numbers{0});
  EXPECT_EQ(numbers(rails_of_rank(devices({1000, 100'000, 25'000, 24'000}), 0)), (Numbers{1, 2}));
  const auto eight = devices(std::vector<int64_t>(8, 400'000));
  EXPECT_EQ(numbers(rails_of_rank(eight, 0)), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(numbers(rails_of_rank(eight, 1)), (Numbers{4, 5, 6, 7}));
  EXPECT_EQ(numbers(rails_of_rank(eight, 2)), (Numbers{0, 1, 2, 3}));
}

class EveryVersion : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(NetPlugin, EveryVersion,
                         ::testing::Values("all", "v6", "v7", "v8", "v9", "v10", "v11", "v12"));

// Sends a message in each direction through the bare interface, in the form of the newest version.
TEST_P(EveryVersion, MovesMessagesThroughOneInterface) {
  const FakeNet fake(GetParam());
  ASSERT_TRUE(fake.there()) << dlerror();
  fake.script("null=3 devices=2");
  Result<PluginUse> use = use_plugin({.list = fake.file(), .comm_id = 7});
  ASSERT_TRUE(use.ok()) << use.status().message();
  NetApi& api = use->api();
  EXPECT_EQ(api.version(), GetParam() == "all" ? 12 : std::stoi(GetParam().substr(1)));
  EXPECT_EQ(api.name(), api.version() == 8 ? "FakeOverwritten" : "Fake");
  EXPECT_EQ(use->devices().size(), 2u);
  EXPECT_EQ(use->devices()[1].is.mbit_per_s, 10'000);
  EXPECT_EQ(use->devices()[1].is.max_bytes, size_t{1} << 30);

  Handle handle = {};
  Result<Comm> listener = api.listen(use->context(), 1, &handle);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  Comm to = nullptr, from = nullptr;
  for (int i = 0; i < 100'000 && (to == nullptr || from == nullptr); ++i) {
    if (to == nullptr) to = *api.connect(use->context(), 1, &handle);
    if (from == nullptr) from = *api.accept(*listener);
  }
  ASSERT_TRUE(to != nullptr && from != nullptr);
  std::vector<char> source(100'000, 'x'), target(120'000);
  const Result<Memory> out = api.register_memory(to, source.data(), source.size(), abi::kPtrHost);
  const Result<Memory> in = api.register_memory(from, target.data(), target.size(), abi::kPtrHost);
  ASSERT_TRUE(out.ok() && in.ok());
  Request send = nullptr, receive = nullptr;
  int refused = 0;
  while (receive == nullptr) {
    receive = *api.receive(from, target.data(), target.size(), in.value());
    refused += receive == nullptr ? 1 : 0;
  }
  while (send == nullptr) send = *api.send(to, source.data(), source.size(), out.value());
  EXPECT_EQ(refused, 2);
  size_t bytes = 0, ignored = 0;
  for (bool sent = false, received = false; !sent || !received;) {
    if (!sent) sent = *api.test(send, &ignored);
    if (!received) received = *api.test(receive, &bytes);
  }
  EXPECT_EQ(bytes, source.size());
  EXPECT_EQ(std::memcmp(source.data(), target.data(), source.size()), 0);
  EXPECT_TRUE(api.deregister(to, out.value()).ok() && api.deregister(from, in.value()).ok());
  EXPECT_TRUE(api.close_send(to).ok() && api.close_receive(from).ok() && api.close_listen(*listener).ok());
}

TEST_P(EveryVersion, WithoutDevicesIsFinalizedAndLeftOut) {
  const FakeNet fake(GetParam());
  fake.script("devices=0");
  const long before = fake.count("finalize");
  const Result<PluginUse> use = use_plugin({.list = fake.file()});
  ASSERT_FALSE(use.ok());
  EXPECT_EQ(use.status().code(), moecclUnsupported);
  EXPECT_TRUE(says(use.status(), "devices says 0")) << use.status().message();
  const bool contexts = GetParam() == "all" || std::stoi(GetParam().substr(1)) >= 11;
  EXPECT_EQ(fake.count("finalize") - before, contexts ? 1 : 0);
  // The next plugin of the list is used.
  const FakeNet next(GetParam() == "v12" ? "v11" : "v12");
  const Result<PluginUse> other = use_plugin({.list = fake.file() + "," + next.file()});
  ASSERT_TRUE(other.ok()) << other.status().message();
}

TEST(NetPlugin, IsChosenByItsName) {
  const FakeNet fake("v12"), overwritten("v8");
  EXPECT_TRUE(use_plugin({.list = fake.file(), .wanted = "fake"}).ok()) << "case does not count";
  // Before and after the plugin has renamed itself.
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(use_plugin({.list = overwritten.file(), .wanted = "Fake"}).ok());
  EXPECT_TRUE(use_plugin({.list = overwritten.file(), .wanted = "FakeOverwritten"}).ok());
  const Result<PluginUse> other = use_plugin({.list = fake.file(), .wanted = "AWS Libfabric"});
  ASSERT_FALSE(other.ok());
  EXPECT_TRUE(says(other.status(), "name is Fake") && says(other.status(), "AWS Libfabric"))
      << other.status().message();
}

TEST(NetPlugin, ThatFailsSaysWhatItSaidAndIsNotTriedAgain) {
  for (const char* version : {"v9", "v12"}) {
    const FakeNet fake(version);
    fake.script("init");
    // Another path to the file, because the plugin is left out under this one from here on.
    std::string file = fake.file();
    file.insert(file.rfind('/'), "/.");
    const long before = fake.count("init");
    for (int i = 0; i < 3; ++i) {
      const Result<PluginUse> use = use_plugin({.list = file});
      ASSERT_FALSE(use.ok());
      for (const char* part :
           {"Fake", version, "init returned 2", "system error", "init fails by script", "MOECCL_NET=tcp"})
        EXPECT_TRUE(says(use.status(), part)) << part << ": " << use.status().message();
    }
    EXPECT_EQ(fake.count("init"), before + 1);
  }
}

TEST(NetPlugin, IsInitialisedAndFinalizedByOneThreadAtATime) {
  const FakeNet fake("v12");
  const long before = fake.count("overlapped");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(use_plugin({.list = fake.file()}).ok());
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(fake.count("overlapped"), before);
}

// Whether the parent's plugin was ready, or one of its threads was still at it and held the lock.
TEST(NetPlugin, OfAParentIsNotForItsForkedChild) {
  const FakeNet fake("v12");
  for (const bool at_it : {false, true}) {
    ASSERT_TRUE(use_plugin({.list = fake.file()}).ok());
    fake.script(at_it ? "hold" : "");
    const long begun = fake.count("init");
    std::thread other;
    if (at_it) {
      other = std::thread([&] { EXPECT_TRUE(use_plugin({.list = fake.file()}).ok()); });
      while (fake.count("init") == begun) std::this_thread::yield();
    }
    const pid_t child = fork();
    if (child == 0) {
      alarm(static_cast<unsigned>(patient_ms(20'000) / 1000));  // else it would wait for ever
      const Result<PluginUse> use = use_plugin({.list = fake.file()});
      _exit(!use.ok() && says(use.status(), "forked") && says(use.status(), "MOECCL_NET=tcp") ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    fake.script("");
    if (at_it) other.join();
  }
}

// Its ranks get another network, perhaps a slower one.
TEST(NetPlugin, ThatAForkedChildCannotUseIsToldOnce) {
  const FakeNet fake("v12");
  ASSERT_TRUE(use_plugin({.list = fake.file()}).ok());
  const std::string log = testing::log_of([&] {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 3; ++i) (void)use_plugin({.list = fake.file()});
      const pid_t grandchild = fork();
      if (grandchild == 0) {
        (void)use_plugin({.list = fake.file()});
        _exit(0);
      }
      int status = 0;
      waitpid(grandchild, &status, 0);
      _exit(status);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
  size_t lines = 0;
  for (size_t at = log.find("WARN no net plugin is used"); at != std::string::npos; ++lines)
    at = log.find("WARN no net plugin is used", at + 1);
  EXPECT_EQ(lines, 2u) << "one of each process in: " << log;
}

TEST(NetPlugin, ThatWantsAGpuToDriveItIsLeftOut) {
  const FakeNet fake("v12");
  fake.script("gpu");
  const Result<PluginUse> use = use_plugin({.list = fake.file()});
  ASSERT_FALSE(use.ok());
  EXPECT_TRUE(says(use.status(), "driven by a GPU")) << use.status().message();
}

// Up to v10 a plugin is initialised once; in later versions each communicator does it.
TEST(NetPlugin, OldOnesAreInitialisedOnce) {
  for (const char* versions : {"v9", "v12"}) {
    const FakeNet fake(versions);
    ASSERT_TRUE(use_plugin({.list = fake.file()}).ok());
    const long inits = fake.count("init"), ends = fake.count("finalize");
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(use_plugin({.list = fake.file()}).ok());
    const long more = std::string(versions) == "v9" ? 0 : 3;
    EXPECT_EQ(fake.count("init") - inits, more);
    EXPECT_EQ(fake.count("finalize") - ends, more);
  }
}

}  // namespace
}  // namespace moeccl::tests
