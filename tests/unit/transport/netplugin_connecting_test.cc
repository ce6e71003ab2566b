// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/connecting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/support/fake_nets.h"
#include "tests/support/timing.h"

namespace moeccl::tests {
namespace {

using namespace transport::netplugin;

TEST(NetPluginConnecting, EndsWithAnAbort) {
  const FakeNet fake("v12");
  ASSERT_TRUE(fake.there());
  const auto side = [&](uint32_t rank, const driver::Watch& watch) {
    transport::NetworkOptions o;
    o.host_of = {0, 1};
    o.rank = rank;
    o.watch = watch;
    o.deadline = Deadline::after_ms(patient_ms(20'000));
    auto made = std::make_shared<Connecting>(std::make_shared<PluginUse>(std::move(*use_plugin({fake.file()}))), o);
    EXPECT_TRUE(made->listen().ok());
    return made;
  };
  std::atomic<bool> aborted = false;
  const auto waits = side(0, {-1, [&] { return aborted ? error(moecclAborted, "by the test") : Status(); }});
  const auto never = side(1, {});  // offers, but does not connect
  const std::vector<std::vector<std::byte>> offers = {waits->offer(), never->offer()};
  Status status;
  std::thread connecting([&] { status = waits->connect(offers).status(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const Stopwatch watch;
  aborted = true;
  connecting.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_EQ(status.code(), moecclAborted) << status.message();
}

}  // namespace
}  // namespace moeccl::tests
