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
