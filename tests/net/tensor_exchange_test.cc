// SPDX-License-Identifier: Apache-2.0
// MoNTA's strategies between hosts: two hosts of t = 4 ranks, with a rate-limited line between them.
#include <gtest/gtest.h>
#include <moeccl/pipeline.h>
#include <moeccl/plan.h>

#include <cstring>
#include <vector>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kTensor = 4, kHosts = 2, kTimes = 2;

char byte_of(int from_host, int block, size_t i) {
  return static_cast<char>((static_cast<size_t>(from_host) * 89 + static_cast<size_t>(block) * 37 + i * 7 + i / 251) %
                           251);
}

struct Ran {
  std::vector<char> out;
  int64_t sent = 0;  // by this rank's host
};

// All ranks of a host pass the same values. The byte counters are read while no rank sends.
Ran exchange(int rank, moecclComm_t comm, const char* plan, size_t count) {
  Ran ran;
  std::vector<char> in(count * kHosts);
  for (int d = 0; d < kHosts; ++d)
    for (size_t i = 0; i < count; ++i) in[static_cast<size_t>(d) * count + i] = byte_of(rank / kTensor, d, i);
  ran.out.assign(in.size(), -1);
  EXPECT_EQ(moecclPlanForce(comm, moecclOpTensorAllToAll, plan), moecclSuccess);
  const auto meet = [&] {
    int32_t one = 1;
    EXPECT_EQ(moecclAllReduce(&one, &one, 1, moecclInt32, moecclSum, comm, nullptr), moecclSuccess);
  };
  meet();
  const int64_t before = sent_payload();
  meet();
  for (int i = 0; i < kTimes; ++i)
    EXPECT_EQ(moecclTensorAllToAll(in.data(), ran.out.data(), count, moecclUint8, comm, nullptr), moecclSuccess);
  meet();
  ran.sent = sent_payload() - before;
  meet();
  return ran;
}

TEST(TensorExchange, BetweenHostsGivesTheSameBytesAndSendsAQuarter) {
  std::string why_not;
  const auto hosts = TestHosts::create(HostsOptions{.weights = {1, 1}, .rate = "1gbit"}, &why_not);
  if (hosts == nullptr) GTEST_SKIP() << why_not;
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = hosts.get();
  run_ranks(
      kTensor * kHosts,
      [](int rank, moecclComm_t comm) {
        moecclTensorGroups_t groups{};
        groups.size = sizeof(groups);
        ASSERT_EQ(moecclTensorGroups(comm, &groups), moecclSuccess);
        ASSERT_EQ(groups.n_groups, kHosts);
        ASSERT_EQ(groups.n_ranks, kTensor);
        for (const size_t count : {size_t{100'003}, size_t{2} << 20}) {
          const Ran base = exchange(rank, comm, "baseline", count);
          for (int s = 0; s < kHosts; ++s)
            for (size_t i = 0; i < count; ++i)
              ASSERT_EQ(base.out[static_cast<size_t>(s) * count + i], byte_of(s, rank / kTensor, i)) << s << " " << i;
          const auto whole = static_cast<double>(count) * kTimes * kTensor;
          EXPECT_GT(static_cast<double>(base.sent), 0.99 * whole);
          for (const char* plan : {"o1", "o2", "o3", "lean"}) {
            const Ran ran = exchange(rank, comm, plan, count);
            EXPECT_EQ(std::memcmp(ran.out.data(), base.out.data(), base.out.size()), 0) << plan;
            // Each byte crosses once; the rest is signals and TCP's retransmissions.
            EXPECT_GT(static_cast<double>(ran.sent), 0.99 * whole / kTensor) << plan;
            EXPECT_LT(static_cast<double>(ran.sent), 1.5 * whole / kTensor) << plan;
          }
        }
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
