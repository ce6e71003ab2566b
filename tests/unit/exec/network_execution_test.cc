// SPDX-License-Identifier: Apache-2.0
// Collectives over a network that keeps no order.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <random>

#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "tests/support/run_algorithm.h"
#include "tests/support/shuffled_network.h"

namespace moeccl::tests {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
// Sanitizers check each operation, which takes ten times as long.
constexpr uint32_t kMany = kSanitized ? 1'000 : 10'000;

// Runs operations of all kinds with all algorithms that need no access to their peers' memory. Returns the first error,
// or "".
std::string operations_over(const transport::Network& network, uint32_t n, uint32_t n_operations, uint32_t* n_done) {
  NetworkFabrics fabrics(network, n);
  EXPECT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  const plan::LevelTree tree = plan::LevelTree::flat(n);
  struct Job {
    const algo::Algorithm* a;
    plan::Shape shape;
    plan::Plan plan;
  };
  std::vector<Job> jobs;
  for (const algo::Algorithm& a : algo::algorithms()) {
    for (const uint64_t count : {1u, 37u, 700u, 20'000u}) {
      plan::Shape shape;
      shape.op = a.op;
      shape.n_ranks = n;
      shape.root = n / 2;
      shape.count = count;
      shape.element_bytes = 8;
      shape.reach.staging = false;
      shape.staging_bytes = 2 << 20;
      if (a.applies(shape, tree).ok()) jobs.push_back({&a, shape, algo::build_all(a, shape, tree)});
    }
  }
  std::mutex mutex;
  std::string first;
  std::atomic<uint32_t> stop_at{n_operations};
  fabrics.run([&](uint32_t, exec::Fabric& f) {
    std::minstd_rand random(7);
    for (uint32_t k = 0; k < stop_at.load(); ++k) {
      // Large ones take as long as a hundred small ones.
      const size_t pick = random() % jobs.size();
      const Job& job = jobs[random() % 16 == 0 ? pick : pick / 4 * 4 + random() % 3];
      const std::string wrong = run_algorithm(f, *job.a, job.shape, job.plan);
      if (f.rank == 0) *n_done = k + 1;
      if (wrong.empty()) continue;
      const std::lock_guard lock(mutex);
      if (first.empty()) first = wrong;
      // All ranks end with the same operation. A rank that is ahead has at most begun the next but one.
      stop_at.store(std::min(stop_at.load(), k + 4));
    }
  });
  return first;
}

TEST(ShuffledNetwork, TenThousandOperationsAreRight) {
  uint32_t done = 0;
  EXPECT_EQ(operations_over(kShuffledNetwork, 3, kMany, &done), "");
  EXPECT_EQ(done, kMany);
}

// RDMA whose queue pairs overtake each other, with writes that arrive in any order.
TEST(FakeVerbs, OperationsAreRight) {
  for (const transport::Network& network : fake_verbs::kNetworks) {
    FakeVerbs::get().calm();
    const uint32_t n = std::string_view(network.name) == "fake_verbs_unordered" ? kMany : kMany / 5;
    uint32_t done = 0;
    EXPECT_EQ(operations_over(network, 3, n, &done), "") << network.name;
    EXPECT_EQ(done, n) << network.name;
  }
  FakeVerbs::get().calm();
}

// The same with sources that are returned too early.
TEST(ShuffledNetwork, SourcesThatDoNotStayAreFound) {
  if (kSanitized) GTEST_SKIP() << "the network reads memory that is not its own any more: a sanitizer ends it";
  ShuffledNetwork::sources_stay() = false;
  uint32_t done = 0;
  const std::string wrong = operations_over(kShuffledNetwork, 3, 2'000, &done);
  ShuffledNetwork::sources_stay() = true;
  EXPECT_NE(wrong, "") << "2000 operations were right, although their sources were overwritten under way";
}

// The same with signals that do not wait for the data that they cover, on which the test above depends.
TEST(ShuffledNetwork, SignalsThatDoNotWaitAreFound) {
  if (kSanitized) GTEST_SKIP() << "data races with whoever reads it: a sanitizer ends it";
  ShuffledNetwork::signals_wait() = false;
  uint32_t done = 0;
  const std::string wrong = operations_over(kShuffledNetwork, 3, 2'000, &done);
  ShuffledNetwork::signals_wait() = true;
  EXPECT_NE(wrong, "") << "2000 operations were right, although their signals went ahead of their data";
}

}  // namespace
}  // namespace moeccl::tests
