// SPDX-License-Identifier: Apache-2.0
// Handles are numbers: stale, doubled and foreign ones are detected, and a pinned object outlives its owner's destroy.
#include "src/api/handles.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::api {
namespace {

struct Thing {
  explicit Thing(std::atomic<int>* n) : n_live(n) { ++*n_live; }
  ~Thing() {
    alive = 0;
    --*n_live;
  }
  std::atomic<int>* n_live;
  std::atomic<int> alive{1};
};
using ThingTable = HandleTable<Thing, struct OpaqueThing*, 0xE1>;
using Handle = struct OpaqueThing*;

Handle add(std::atomic<int>& n_live) {
  const Result<Handle> made = ThingTable::get().add(std::make_unique<Thing>(&n_live));
  EXPECT_TRUE(made.ok());
  return made.value();
}

TEST(Handles, ADeadOneNamesNothing) {
  std::atomic<int> n_live{0};
  const Handle a = add(n_live);
  EXPECT_NE(ThingTable::get().find(a), nullptr);
  EXPECT_TRUE(ThingTable::get().take(a));
  EXPECT_EQ(n_live, 0);
  EXPECT_EQ(ThingTable::get().find(a), nullptr);
  EXPECT_FALSE(ThingTable::get().take(a)) << "taken twice";
  EXPECT_EQ(ThingTable::get().pin(a).get(), nullptr);
  // Slots are reused in turn, so eventually this slot comes up, with another generation.
  for (uint32_t i = 0; i < ThingTable::kSlots + 1; ++i) {
    const Handle b = add(n_live);
    ASSERT_EQ(ThingTable::get().find(a), nullptr) << i;
    ASSERT_TRUE(ThingTable::get().take(b));
  }
}

TEST(Handles, ForeignOnesNameNothing) {
  std::atomic<int> n_live{0};
  const Handle a = add(n_live);
  const auto value = reinterpret_cast<uint64_t>(a);
  for (const uint64_t other : {uint64_t{0}, uint64_t{1}, uint64_t{0xE1}, value ^ 1, value ^ 0x100, value ^ (1u << 22),
                               value ^ (1u << 24), value | uint64_t{1} << 63, ~uint64_t{0}}) {
    const auto handle = reinterpret_cast<Handle>(other);
    EXPECT_EQ(ThingTable::get().find(handle), nullptr) << other;
    EXPECT_EQ(ThingTable::get().pin(handle).get(), nullptr) << other;
    EXPECT_FALSE(ThingTable::get().take(handle)) << other;
  }
  EXPECT_TRUE(ThingTable::get().take(a));
}

TEST(Handles, TheTableIsBoundedAndSaysSo) {
  std::atomic<int> n_live{0};
  std::vector<Handle> all;
  for (uint32_t i = 0; i < ThingTable::kSlots; ++i) all.push_back(add(n_live));
  const Result<Handle> more = ThingTable::get().add(std::make_unique<Thing>(&n_live));
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(more.status().code(), moecclOutOfMemory);
  for (const Handle h : all) EXPECT_TRUE(ThingTable::get().take(h));
  EXPECT_EQ(n_live, 0);
}

// While the owner waits, another thread may still reach the object, to end that wait.
TEST(Handles, PinsAreGivenUntilTheTakenOneGoes) {
  std::atomic<int> n_live{0};
  const Handle a = add(n_live);
  {
    const auto taken = ThingTable::get().take(a);
    ASSERT_TRUE(taken);
    EXPECT_EQ(ThingTable::get().find(a), nullptr);
    EXPECT_NE(ThingTable::get().pin(a).get(), nullptr);
    EXPECT_FALSE(ThingTable::get().take(a)) << "a second owner";
  }
  EXPECT_EQ(ThingTable::get().pin(a).get(), nullptr);
}

TEST(Handles, DestroyWaitsForPins) {
  std::atomic<int> n_live{0};
  const Handle a = add(n_live);
  std::atomic<bool> destroyed{false};
  std::thread owner;
  {
    const auto pin = ThingTable::get().pin(a);
    ASSERT_NE(pin.get(), nullptr);
    owner = std::thread([&] {
      EXPECT_TRUE(ThingTable::get().take(a));
      destroyed = true;
    });
    while (ThingTable::get().pin(a).get() != nullptr) std::this_thread::yield();  // until the destroy has begun to wait
    EXPECT_FALSE(destroyed);
    EXPECT_EQ(pin.get()->alive, 1);
  }
  owner.join();
  EXPECT_TRUE(destroyed);
  EXPECT_EQ(n_live, 0);
}

TEST(Handles, WatchersNeverSeeADeadObject) {
  std::atomic<int> n_live{0};
  std::atomic<Handle> current{add(n_live)};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> seen{0}, dead{0};
  std::vector<std::thread> watchers;
  for (int i = 0; i < 3; ++i) {
    watchers.emplace_back([&] {
      while (!stop) {
        const auto pin = ThingTable::get().pin(current.load());
        if (pin.get() == nullptr) continue;
        ++seen;
        if (pin.get()->alive != 1) ++dead;
      }
    });
  }
  for (int i = 0; i < testing::scaled(20'000); ++i) {
    const Handle old = current.load();
    EXPECT_TRUE(ThingTable::get().take(old));
    current = add(n_live);
  }
  while (seen == 0) std::this_thread::yield();
  stop = true;
  for (std::thread& t : watchers) t.join();
  EXPECT_EQ(dead, 0u);
  EXPECT_TRUE(ThingTable::get().take(current.load()));
  EXPECT_EQ(n_live, 0);
}

// Two threads destroy the same handle, and exactly one of them succeeds.
TEST(Handles, OneOfTwoTakesIt) {
  std::atomic<int> n_live{0};
  for (int i = 0; i < testing::scaled(300); ++i) {
    const Handle a = add(n_live);
    std::atomic<int> n_taken{0};
    std::thread other([&] { n_taken += ThingTable::get().take(a) ? 1 : 0; });
    n_taken += ThingTable::get().take(a) ? 1 : 0;
    other.join();
    ASSERT_EQ(n_taken, 1);
    ASSERT_EQ(n_live, 0);
  }
}

TEST(Handles, AChildForgetsItsParentsAndMakesItsOwn) {
  std::atomic<int> n_live{0};
  const Handle a = add(n_live);
  EXPECT_FALSE(ThingTable::get().inherited(a));
  const pid_t child = fork();
  if (child == 0) {
    bool ok = ThingTable::get().inherited(a) && ThingTable::get().pin(a).get() == nullptr;
    {
      const auto taken = ThingTable::get().take(a);
      ok = ok && taken && taken.inherited();
    }
    ok = ok && n_live == 1 && ThingTable::get().find(a) == nullptr;  // forgotten, not destroyed
    const Result<Handle> own = ThingTable::get().add(std::make_unique<Thing>(&n_live));
    ok = ok && own.ok() && !ThingTable::get().inherited(own.value()) && ThingTable::get().take(own.value());
    _exit(ok && n_live == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(ThingTable::get().take(a));
  EXPECT_EQ(n_live, 0);
}

}  // namespace
}  // namespace moeccl::api
