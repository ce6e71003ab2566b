// SPDX-License-Identifier: Apache-2.0
#include "src/exec/flight.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moeccl::exec {
namespace {

constexpr uint32_t kSlots = 1100;  // three files

std::vector<std::unique_ptr<FlightSlot>> fill() {
  std::vector<std::unique_ptr<FlightSlot>> slots;
  for (uint32_t i = 0; i < kSlots; ++i) {
    slots.push_back(std::make_unique<FlightSlot>());
    FlightPage& page = **slots.back();
    page.bytes = sizeof(FlightPage);
    page.rank = i;
    page.n_ranks = kSlots;
    slots.back()->note_hosts("[" + std::to_string(i) + "]");
    page.magic.store(FlightPage::kMagic);
  }
  return slots;
}

void expect_all(int pid) {
  const Result<std::string> text = flight_json(pid);
  ASSERT_TRUE(text.ok()) << text.status().message();
  const auto all = nlohmann::json::parse(*text)["communicators"];
  ASSERT_EQ(all.size(), kSlots);
  std::vector<bool> seen(kSlots);
  for (const auto& c : all) {
    seen[c["rank"]] = true;
    EXPECT_EQ(c["hosts"][0], c["rank"]);
  }
  EXPECT_EQ(seen, std::vector<bool>(kSlots, true));
}

// Shown to the process itself and to others.
TEST(Flight, ShowsAnyNumberOfCommunicators) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto slots = fill();
    expect_all(0);
    const char failed = ::testing::Test::HasFailure() ? 1 : 0;
    (void)!write(ready[1], &failed, 1);
    pause();
    _exit(0);
  }
  char failed = 1;
  ASSERT_EQ(read(ready[0], &failed, 1), 1);
  EXPECT_EQ(failed, 0);
  expect_all(child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

// Texts of any length, one beside the other; the room of those that are gone is used again.
TEST(Flight, KeepsTheHostsOfLargeWorlds) {
  const auto hosts_of = [](uint32_t n) {
    nlohmann::json hosts = nlohmann::json::array();
    for (uint32_t h = 0; h < n; ++h)
      hosts.push_back({{"name", "rack-and-node-" + std::to_string(h)},
                       {"host_id", std::string(16, 'a')},
                       {"ranks", {{8 * h, 8 * h + 7}}}});
    return hosts;
  };
  const uint32_t sizes[] = {512, 3, 8192, 512, 1};
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<FlightSlot>> slots(std::size(sizes));
    for (const size_t i : {4, 2, 0, 1, 3}) {
      slots[i] = std::make_unique<FlightSlot>();
      FlightPage& page = **slots[i];
      page.bytes = sizeof(FlightPage);
      page.rank = static_cast<uint32_t>(i);
      slots[i]->note_hosts(hosts_of(sizes[i]).dump());
      page.magic.store(FlightPage::kMagic);
    }
    slots[2] = nullptr;
    slots[0]->note_hosts(hosts_of(700).dump());
    const auto all = nlohmann::json::parse(*flight_json(0))["communicators"];
    ASSERT_EQ(all.size(), 4u);
    for (const auto& c : all) {
      ASSERT_TRUE(c.contains("hosts")) << c["rank"];
      EXPECT_EQ(c["hosts"], hosts_of(c["rank"] == 0 ? 700 : sizes[c["rank"].get<size_t>()])) << c["rank"];
    }
  }
}

TEST(Flight, EachProcessDumpsToAFileOfItsOwn) {
  EXPECT_EQ(dump_path("/d/job", "node1", 7), "/d/job.node1.7.json");
  EXPECT_EQ(dump_path("/d/%p-%h.json", "node1", 7), "/d/7-node1.json");
  EXPECT_EQ(dump_path("/d/h.%h.json", "node1", 7), "/d/h.node1.7.json") << "without the process, it would be one file";
  EXPECT_EQ(dump_path("/d/h.%h", "node1", 7), "/d/h.node1.7");
}

TEST(Flight, PagesAreUsedAgain) {
  for (int round = 0; round < 3; ++round) {
    auto slots = fill();
    expect_all(0);
    slots.clear();
    EXPECT_EQ(nlohmann::json::parse(*flight_json(0))["communicators"].size(), 0u);
  }
}

}  // namespace
}  // namespace moeccl::exec
